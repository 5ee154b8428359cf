"""A loop on the device is followed, stored and attributed as on the processor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.progress import Silent
from tests.device.emulated import DEVICE
from tests.foreign_loop import loops
from tests.foreign_loop.loops import OPTIMIZERS, Loop, Maker, apart, fitted, followed, loop, same_parts

pytestmark = pytest.mark.slow

CLOSE = 1e5 * torch.finfo(torch.float64).eps  # of all parts: some hundred sums in another order, in each of 8 steps

LOOPS = {  # with one of the settings of each optimizer
    **{f"{maker.__name__} {body.__name__}": (maker, body) for maker, body in loops.LOOPS},
    **{maker.__name__.partition(" ")[0]: (maker, loops.plain) for maker in OPTIMIZERS},
}
SHORT = {"Muon": torch.bfloat16, "ASGD": torch.float32}
"""Optimizers that compute in another precision, or store their step size in it. Reordered sums round differently."""


def close_to(optimizers: Maker) -> float:
    """Return how close parts are, relative to all."""
    kind = SHORT.get(optimizers.__name__.partition(" ")[0])
    return CLOSE if kind is None else torch.finfo(kind).eps


def on(device: str, optimizers: Maker, dtype: torch.dtype = torch.float64) -> Loop:
    """Return the loop with its network, data and queries on a device."""

    def made(model: nn.Sequential) -> loops.Optimizers:
        return optimizers(model.to(device))

    given = loop(made, dtype)
    given.x, given.y, given.queries = (each.to(device) for each in (given.x, given.y, given.queries))
    return given


@pytest.mark.parametrize(("name", "stored"), [(name, row % 2 == 0) for row, name in enumerate(LOOPS)])
def test_parts_are_those_of_the_processor(name: str, stored: bool, tmp_path: Path) -> None:
    """Every second loop is stored on disk."""
    maker, body = LOOPS[name]
    trace = followed(on(DEVICE, maker), body, to=tmp_path / "run" if stored else None, every=3)
    same_parts(trace, followed(on("cpu", maker), body), close_to(maker))


@pytest.mark.parametrize("to_disk", [False, True])
def test_masks_of_dropout_are_drawn_again(to_disk: bool, tmp_path: Path) -> None:
    """The generator of the device draws them; its state is recorded with the call."""

    def with_dropout(model: nn.Sequential) -> loops.Optimizers:
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


def test_a_resumed_loop_is_that_of_the_processor(tmp_path: Path) -> None:
    """A trace is attributed on the processor too."""
    trace = loops.resumed(lambda: on(DEVICE, loops.adamw), loops.plain, 4, to=tmp_path / "run", every=2)
    elsewhere = load_trace(find_trace(tmp_path / "run"), on("cpu", loops.adamw).model)
    for each in (trace, elsewhere):
        same_parts(each, followed(on("cpu", loops.adamw), loops.plain), CLOSE)


def trained(device: str, optimizer: str, folder: Path | None = None) -> Trace:
    """Follow a regression with a known loss and clipping."""
    torch.manual_seed(0)
    sizes = ((12, 2), (12, 1), (3, 2), (3, 1))
    x, y, queries, targets = (torch.randn(count, size).double().to(device) for count, size in sizes)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(device)
    made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    made.register_step_pre_hook(clip)
    asked: dict[str, Any] = {
        "queries": queries,
        "loss": lambda outputs, call: (outputs - y).square().mean(1),
        "measure": lambda outputs, call: (outputs - targets).square().mean(1),
    }
    return fitted(model, made, lambda _: (model(x) - y).square().mean(), 4, to=folder, **asked)


Way: TypeAlias = Callable[[str, str, Path], Any]


def loaded(device: str, optimizer: str, folder: Path) -> Any:
    trace = trained(device, optimizer, folder)
    again = load_trace(find_trace(folder), deepcopy(trained(device, optimizer).module), trace.measure)
    return again.attribute()["contribution"]


def removal(device: str, optimizer: str, folder: Path) -> Any:
    trained(device, optimizer, folder)
    again = partial(trained, device, optimizer)
    return loop_without(find_trace(folder), again, "renormalised", [0, 3], [0, 1], Silent()).shares


def checked(device: str, optimizer: str, folder: Path) -> Any:
    again = partial(trained, device, optimizer)
    return again().attribute(effects=True, again=again)["effect"]


WAYS: dict[str, Way] = {
    "effects": lambda device, name, _: trained(device, name).attribute(effects=True)["effect"],
    "effects from disk": lambda device, name, to: trained(device, name, to).attribute(effects=True)["effect"],
    "effects checked": checked,
    "by module": lambda device, name, to: trained(device, name, to).attribute(by="module")["by_component"],
    "a removal": removal,
    "loaded": loaded,
}


@pytest.mark.parametrize(("way", "optimizer"), [*zip(WAYS, cycle(("adamw", "sgd")))])
def test_other_results_are_those_of_the_processor(way: str, optimizer: str, tmp_path: Path) -> None:
    expected, found = (WAYS[way](each, optimizer, tmp_path / each.replace(":", "-")) for each in ("cpu", DEVICE))
    assert apart(found, expected) <= CLOSE
