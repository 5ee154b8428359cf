"""When kernels are taken, where that follows from how they change."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as some

from ntkexp.path.settings import Adaptive


def taken(timetable: Adaptive, rate: float) -> list[int]:
    """The steps of a run whose kernel grows by this share of its start at every step."""
    found = []
    for step in range(timetable.steps):
        if timetable.due(step):
            timetable.saw(step, torch.full((2, 1, 2, 1), 1 + rate * step, dtype=torch.float64))
            found.append(step)
    return found


@given(some.integers(1, 400), some.integers(2, 20), some.floats(1e-3, 1), some.floats(0, 1))
def test_there_is_room_for_all_of_them(steps: int, count: int, change: float, rate: float) -> None:
    timetable = Adaptive(steps, count, change)
    found = taken(timetable, rate)
    assert found[0] == 0
    assert len(found) + 1 <= timetable.room


def test_they_lie_as_far_apart_as_the_kernel_takes_to_change() -> None:
    found = taken(Adaptive(steps=10_000, count=1000, change=0.1), rate=0.001)
    logarithms = [torch.log1p(torch.tensor(0.001 * step)) for step in found[8:]]
    gaps = torch.stack(logarithms).diff()
    assert (gaps - 0.1).abs().max() < 0.02  # a distance is foretold from the last, which was e^0.1 times shorter
