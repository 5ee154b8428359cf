"""Every schedule: factors between zero and one, after a linear warm-up."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ntkexp.schedule import AbstractSchedule, Cosine, List, Step
from tests.config.components import choices, configured

SCHEDULES = choices("schedule")
STEPS = 50


def schedule(name: str, **changes: object) -> AbstractSchedule:
    made = configured("schedule", name, **changes)
    assert isinstance(made, AbstractSchedule)
    return made


def factors(chosen: AbstractSchedule) -> list[float]:
    return [chosen.factor(step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_start_at_one_and_never_rise(name: str) -> None:
    found = factors(schedule(name))
    assert found[0] == 1.0
    assert all(0 < after <= before for before, after in pairwise(found))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_multiplies_the_first_steps(name: str) -> None:
    plain = factors(schedule(name))
    warm = factors(schedule(name, warm_up=4))
    assert warm[:4] == [share * factor for share, factor in zip((0.2, 0.4, 0.6, 0.8), plain, strict=False)]
    assert warm[4:] == plain[4:]


def test_half_a_cosine_is_symmetric_about_its_middle() -> None:
    """(1 + cos x)/2 and (1 + cos(π − x))/2 add up to one, to rounding of numbers about one."""
    half = Cosine()
    assert all(abs(half.shape(step, STEPS) + half.shape(STEPS - step, STEPS) - 1) < 1e-15 for step in range(STEPS))
    assert Cosine(last=0.25).shape(STEPS, STEPS) == 0.25


def test_a_staircase_is_constant_between_stairs() -> None:
    found = factors(Step(every=10, decay=0.5))
    assert [found[step] for step in range(0, STEPS, 10)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert all(found[step] == found[step - step % 10] for step in range(STEPS))


def test_a_list_is_read_as_it_stands_and_its_end_stays() -> None:
    assert factors(List(factors=(1.0, 0.5, 2.0)))[:5] == [1.0, 0.5, 2.0, 2.0, 2.0]
