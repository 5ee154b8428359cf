"""How many points are read at once moves results by rounding alone, and whether tapes are kept not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import prepare
from tests.run.small import Memory, small

SIZES = ("data.train=10", "data.probe=6", "data.test=4", "steps=5", "path.count=2")
CHOSEN = (*SIZES, "path.rule=[secant,left,gauss]", "path.error_samples=2", "ladder.machine=[secant,left]")
WHOLE = 20
ROUNDING = 1e-12  # sums of ten products in another order, through five steps


def outcome(block: int, *overrides: str, keep: bool = True) -> Outcome:
    """The same run, with points read so many at a time."""
    setting = prepare(small(*CHOSEN, *overrides))
    points = setting.points
    cut = replace(points, block=block, keep=keep, cache=[])
    descent, domain = replace(setting.descent, points=cut), replace(setting.domain, points=cut)
    return run(replace(setting, descent=descent, domain=domain), Memory())


def numbers(found: Outcome) -> dict[str, Tensor]:
    """All that a run leaves."""
    paths = {f"{name}.{what}": getattr(path, what) for name, path in found.evidence.paths.items() for what in PARTS}
    return paths | {"end": found.evidence.end, "kernel": found.evidence.kernel_end} | found.weights


PARTS = ("kernel", "contributions")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("block", "more"),
    [
        (1, ("path.probes=[probe]",)),
        (7, ("path.probes=[probe]",)),
        (7, ("path.probes=[train,probe,test]",)),
        (7, ("kernel.sketch=40",)),
    ],
)
def test_small_blocks_change_rounding_alone(block: int, more: tuple[str, ...]) -> None:
    whole, cut = (numbers(outcome(size, *more)) for size in (WHOLE, block))
    for name, value in whole.items():
        scale = float(value.nan_to_num().abs().max())
        torch.testing.assert_close(cut[name], value, rtol=0, atol=ROUNDING * scale, equal_nan=True)


@pytest.mark.parametrize("block", [7, WHOLE])
def test_keeping_tapes_changes_nothing(block: int) -> None:
    kept, dropped = (numbers(outcome(block, keep=keep)) for keep in (True, False))
    for name, value in kept.items():
        assert torch.equal(dropped[name], value), name
