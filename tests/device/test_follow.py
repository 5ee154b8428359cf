"""A loop on the device is followed, stored and attributed as on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ntkexp.foreign_loop.trace import Trace
from tests.device.emulated import DEVICE
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, Maker, Optimizers, followed, loop
from tests.foreign_loop.test_rules import OPTIMIZERS

EPS = torch.finfo(torch.float64).eps
CLOSE = 1e5 * EPS  # of all parts: eps for each of some hundred sums in another order, over 8 steps that build on them

LOOPS = {
    **{f"{maker.__name__} {body.__name__}": (maker, body) for maker, body in loops.LOOPS},
    **{maker.__name__: (maker, loops.plain) for maker in OPTIMIZERS},
}
FAST = ("momentum scheduled_and_clipped", "adamw scheduled_and_clipped")


SHORT = {"Muon": torch.bfloat16, "ASGD": torch.float32}
"""The numbers that some optimizers compute in, or hold their step size in: another order may round to the next one."""


def close_to(optimizers: Maker) -> float:
    """Return how close parts are, relative to all."""
    kind = SHORT.get(optimizers.__name__.partition(" ")[0])
    return CLOSE if kind is None else torch.finfo(kind).eps


def some_fast(fast: tuple[str, ...]) -> list[object]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS]


def on(device: str, optimizers: Maker) -> Loop:
    """Return the loop with its network, data and queries on a device."""

    def made(model: nn.Sequential) -> Optimizers:
        return optimizers(model.to(device))

    given = loop(made)
    given.x, given.y, given.queries = (each.to(device) for each in (given.x, given.y, given.queries))
    return given


def same_parts(ours: Trace, theirs: Trace, close: float = CLOSE) -> None:
    """Check that the same examples contributed the same."""
    there, expected = ours.attribute(), theirs.attribute()
    size = float(abs(expected["contribution"]).max())
    for name in {"contribution", "decay", "casts", "change"} & set(expected):
        missed = float(abs(there[name] - expected[name]).max())
        assert missed <= close * size, (name, missed / size)
    assert list(there["example"].values) == list(expected["example"].values)


@pytest.mark.parametrize("name", some_fast(FAST))
def test_parts_are_those_of_the_processor(name: str) -> None:
    maker, body = LOOPS[name]
    same_parts(followed(on(DEVICE, maker), body), followed(on("cpu", maker), body), close_to(maker))


@pytest.mark.parametrize("name", some_fast(FAST[1:]))
def test_so_are_those_of_a_loop_that_is_stored(name: str, tmp_path: Path) -> None:
    maker, body = LOOPS[name]
    trace = followed(on(DEVICE, maker), body, to=tmp_path / "run", every=3)
    same_parts(trace, followed(on("cpu", maker), body), close_to(maker))
