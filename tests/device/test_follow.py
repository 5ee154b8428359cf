"""A loop on the device is followed, stored and attributed as on the processor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.progress import Silent
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
FAST = ("adamw scheduled_and_clipped",)


SHORT = {"Muon": torch.bfloat16, "ASGD": torch.float32}
"""The numbers that some optimizers compute in, or hold their step size in: another order may round to the next one."""


def close_to(optimizers: Maker) -> float:
    """Return how close parts are, relative to all."""
    kind = SHORT.get(optimizers.__name__.partition(" ")[0])
    return CLOSE if kind is None else torch.finfo(kind).eps


def some_fast(fast: tuple[str, ...]) -> list[object]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS]


def on(device: str, optimizers: Maker, dtype: torch.dtype = torch.float64) -> Loop:
    """Return the loop with its network, data and queries on a device."""

    def made(model: nn.Sequential) -> Optimizers:
        return optimizers(model.to(device))

    given = loop(made, dtype)
    given.x, given.y, given.queries = (each.to(device) for each in (given.x, given.y, given.queries))
    return given


def same_parts(ours: Trace, theirs: Trace, close: float = CLOSE) -> None:
    """Check that the same examples contributed the same."""
    there, expected = ours.attribute(), theirs.attribute()
    size = float(abs(expected["contribution"]).max())
    for name in {"contribution", "decay", "change"} & set(expected):
        missed = float(abs(there[name] - expected[name]).max())
        assert missed <= close * size, (name, missed / size)
    assert list(there["example"].values) == list(expected["example"].values)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_parts_are_those_of_the_processor(name: str) -> None:
    maker, body = LOOPS[name]
    same_parts(followed(on(DEVICE, maker), body), followed(on("cpu", maker), body), close_to(maker))


@pytest.mark.parametrize("name", some_fast(FAST))
def test_so_are_those_of_a_loop_that_is_stored(name: str, tmp_path: Path) -> None:
    maker, body = LOOPS[name]
    trace = followed(on(DEVICE, maker), body, to=tmp_path / "run", every=3)
    same_parts(trace, followed(on("cpu", maker), body), close_to(maker))


@pytest.mark.parametrize("to_disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_masks_of_dropout_are_drawn_again(to_disk: bool, tmp_path: Path) -> None:
    """They come from the generator of the device, whose state is recorded with the call."""

    def with_dropout(model: nn.Sequential) -> Optimizers:
        model[3] = nn.Dropout(0.3)
        return loops.adamw(model.to(DEVICE))

    torch.manual_seed(0)
    given = on(DEVICE, with_dropout)
    trace = followed(given, loops.plain, to=tmp_path / "run" if to_disk else None, every=3)
    assert float(trace.attribute()["closure"].max()) < 1e-9


def test_a_loop_under_autocast_is_explained() -> None:
    def cast(given: Loop, batch: Tensor) -> None:
        given.zero()
        with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
            outputs = given.model(given.x[batch])
        nn.functional.cross_entropy(outputs.float(), given.y[batch]).backward()  # type: ignore[no-untyped-call]
        given.step()

    given = on(DEVICE, loops.sgd, torch.float32)
    found = followed(given, cast).attribute()
    assert found.attrs["autocast"] == "bfloat16"
    assert float(found["closure"].max()) < 1e-3  # of float32, relative to steps


@pytest.mark.slow
def test_a_loop_that_is_resumed_goes_on_there(tmp_path: Path) -> None:
    maker, batch_of = loops.adamw, [batch for _, batch in zip(range(loops.STEPS), loops.batches())]  # noqa: B905
    first = on(DEVICE, maker)
    with follow(first.model, first.optimizers, queries=first.queries, to=tmp_path / "run", every=2):
        for step in range(4):
            loops.plain(first, batch_of[step])
        kept = deepcopy((first.model.state_dict(), first.optimizers[0].state_dict()))
        loops.plain(first, batch_of[4])
    resumed = on(DEVICE, maker)
    resumed.model.load_state_dict(kept[0])
    resumed.optimizers[0].load_state_dict(kept[1])
    with follow(resumed.model, resumed.optimizers, queries=resumed.queries, to=tmp_path / "run", every=2) as trace:
        for step in range(4, loops.STEPS):
            loops.plain(resumed, batch_of[step])
    same_parts(trace, followed(on("cpu", maker), loops.plain))
    elsewhere = load_trace(find_trace(tmp_path / "run"), on("cpu", maker).model)
    same_parts(elsewhere, trace)  # a trace is attributed on the processor, wherever the loop ran


def trained(device: str, optimizer: str, folder: Path | None = None) -> Trace:
    """Follow a regression, of which the loss is known, with clipping."""
    torch.manual_seed(0)
    x, y, queries, targets = (torch.randn(count, size).double().to(device) for count, size in
                              ((12, 2), (12, 1), (3, 2), (3, 1)))  # fmt: skip
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(device)
    made: dict[str, torch.optim.Optimizer] = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adamw": torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2),
    }

    def losses(outputs: Tensor, call: object) -> Tensor:
        return (outputs - y).square().mean(1)

    def measure(outputs: Tensor, call: object) -> Tensor:
        return (outputs - targets).square().mean(1)

    with follow(model, made[optimizer], queries=queries, loss=losses, measure=measure, to=folder) as trace:
        for _ in range(4):
            made[optimizer].zero_grad()
            (model(x) - y).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made[optimizer].step()
    return trace


Way: TypeAlias = Callable[[str, str, Path], NDArray[Any]]


def effects(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    return trained(device, optimizer).attribute(effects=True)["effect"].to_numpy()


def effects_from_disk(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    return trained(device, optimizer, folder).attribute(effects=True)["effect"].to_numpy()


def effects_checked(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    again = partial(trained, device, optimizer)
    return again().attribute(effects=True, again=again)["effect"].to_numpy()


def by_module(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    return trained(device, optimizer, folder).attribute(by="module")["by_component"].to_numpy()


def removal(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    trained(device, optimizer, folder)
    again = partial(trained, device, optimizer)
    return loop_without(find_trace(folder), again, "renormalised", [0, 3], [0, 1], Silent()).shares


def loaded(device: str, optimizer: str, folder: Path) -> NDArray[Any]:
    measure = trained(device, optimizer, folder).measure
    module = deepcopy(trained(device, optimizer).module)
    return load_trace(find_trace(folder), module, measure).attribute()["contribution"].to_numpy()


FAST_WAYS: tuple[Way, ...] = (effects,)
SLOW_WAYS: tuple[Way, ...] = (effects_from_disk, effects_checked, by_module, removal, loaded)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [*FAST_WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)])
def test_what_else_is_found_is_that_of_the_processor(way: Way, optimizer: str, tmp_path: Path) -> None:
    expected, found = (way(device, optimizer, tmp_path / device.replace(":", "-")) for device in ("cpu", DEVICE))
    assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()
