"""The law of attribution: parts add up to the change by training, in all, by step and by component.

    f_T − f_0 = Σ contributions + decay + rounding,    each sum = Σ over components

One table of loops: optimizers × steps × precisions × layers × random numbers × bugs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from ntkexp.foreign_loop.trace import Trace
from ntkexp.path.components import By
from tests.foreign_loop import loops
from tests.foreign_loop.bugs import RECORDED, loss_of_a_stale_graph, on_gradients
from tests.foreign_loop.loops import LOOPS, OPTIMIZERS, SHARPNESS, WAYS, Body, Loop, Maker, Way, followed, plain

SUMMED = 100  # eps: 8 steps, each a sum of some tens of terms, in two orders
BY_COMPONENT = {
    "contribution": "by_component",
    "decay": "decay_by_component",
    "rounding": "rounding_by_component",
    "by_step": "by_component_step",
}
ALL: tuple[By | None, ...] = (None, "module", "parameter")


class Keeping(nn.Module):
    """A layer that keeps its latest output, with its graph, which torch refuses to copy."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.latest = layer, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.latest = [self.layer(x)]
        return self.latest[0]


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    layer = prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]  # torch's own
    return layer


def by_hand(given: Loop, batch: Tensor) -> None:
    """Gradients are assigned, which adds nothing to those before."""
    loss = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    weights = list(given.model.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    given.step()


@on_gradients
def clipped_twice(given: Loop, _: list[Tensor]) -> None:
    """By norm, and then by value."""
    nn.utils.clip_grad_norm_(given.model.parameters(), 0.3)
    nn.utils.clip_grad_value_(given.model.parameters(), 0.03)


def clipped_when_tiny(given: Loop, batch: Tensor) -> None:
    """A bound is compared with the size of the gradients, and not with 1."""
    given.zero()
    loss = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    (2.0**-27 * loss).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_value_(given.model.parameters(), 1e-10)
    given.step()


@on_gradients
def clipped_to_more_and_more(given: Loop, _: list[Tensor]) -> None:
    """Some parameters, to a value that changes at every step."""
    nn.utils.clip_grad_value_(given.model[2:].parameters(), 0.01 + 0.005 * given.done)


def sometimes_empty(given: Loop, batch: Tensor) -> None:
    plain(given, batch[:0] if given.done == 3 else batch)


def balanced(given: Loop, batch: Tensor) -> None:
    """Two losses get weights, so that the norms of their gradients at the last layer are equal."""
    outputs, labels, last = given.model(given.x[batch]), given.y[batch], given.model[4].get_parameter("weight")
    losses = [nn.functional.cross_entropy(outputs[k::2], labels[k::2]) for k in range(2)]
    given.zero()
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in losses]
    torch.stack([loss / norm for loss, norm in zip(losses, norms, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
    given.step()


def with_other_draws(given: Loop, batch: Tensor) -> None:
    """Random numbers are drawn between the calls, one more at each step."""
    torch.rand(given.done)
    plain(given, batch)


def adam_with_a_tensor(model: nn.Sequential) -> loops.Optimizers:
    """Its rate is in float32, and so are the numbers that torch computes from it."""
    return [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)]


@dataclass(frozen=True)
class Case:
    """One loop: its optimizers, the body of a step, and the layer or network that replaces the usual one."""

    optimizers: Maker
    body: Body = plain
    dtype: torch.dtype = torch.float64
    layer: Callable[[nn.Module], nn.Module] | None = None
    way: Way | None = None
    by: tuple[By | None, ...] = ALL
    cancels: bool = False  # parts may be larger than their sum, so that the bound is relative to them

    def __str__(self) -> str:
        names = [each.__name__ for each in (self.optimizers, self.body, self.layer, self.way) if each is not None]
        return "-".join([*names, str(self.dtype)[6:]])

    def loop(self) -> Loop:
        if self.way is not None:
            return loops.random_loop(self.optimizers, self.way)
        given = loops.loop(self.optimizers, self.dtype)
        if self.layer is not None:
            given.model[2] = self.layer(given.model[2])
            given.model(given.x)
            given.optimizers = self.optimizers(given.model)
        return given


OFTEN = (
    *(Case(optimizers, body) for optimizers, body in LOOPS),
    *(Case(optimizers, loops.scheduled_and_clipped, torch.float32) for optimizers in (loops.momentum, loops.adamw)),
    *(Case(optimizers, body) for optimizers, body in SHARPNESS),
    *(Case(optimizers, body, torch.float32) for optimizers, body in SHARPNESS),
    Case(loops.frozen_adamw, loops.thawed_half_way),
    *(Case(loops.sgd, layer=layer) for layer in (old_weight_norm, pruned, Keeping)),
    Case(loops.nesterov, layer=weight_norm),
)
ODD = (
    *(Case(loops.momentum, body, by=(None,)) for body in (*RECORDED, by_hand, sometimes_empty, balanced)),
    Case(loops.adamw, by_hand, by=(None,)),
    *(Case(each, clipped_twice, by=(None, "parameter")) for each in (loops.nesterov, loops.adamw)),
    *(Case(each, clipped_to_more_and_more, by=(None,)) for each in (loops.momentum, loops.adam)),
    Case(loops.adamw, clipped_to_more_and_more, torch.float32, by=(None,)),
    Case(loops.adamw, clipped_when_tiny, by=(None,)),
    Case(adam_with_a_tensor, by=(None,)),
)
RANDOM = (
    *(Case(loops.momentum, loops.accumulated, way=way, by=(None,)) for way in WAYS),
    *(Case(each, with_other_draws, way=loops.dropping, by=(None,)) for each in (loops.sgd, loops.adam, loops.adamw)),
)
RULES = {each: Case(each, loops.scheduled_and_clipped, by=(None,), cancels=True) for each in OPTIMIZERS}
ACCUMULATED = tuple(Case(each, loops.accumulated, by=(None, "parameter"), cancels=True) for each in OPTIMIZERS[::2])
FIRST = {each.__name__.partition(" lr")[0]: each for each in reversed(OPTIMIZERS)}
"""The first optimizer of each kind."""
CASES = (*OFTEN, *ODD, *RANDOM, *RULES.values(), *ACCUMULATED)
FAST = frozenset({*OFTEN[::6], *ODD[::6], *RANDOM[::4], *(RULES[each] for each in FIRST.values())})


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES]
)
def test_parts_add_up(case: Case) -> None:
    given = case.loop()
    start = loops.outputs_of(given.model, given.queries)
    trace = followed(given, case.body)
    state = torch.get_rng_state()
    for by in case.by:
        found = trace.attribute(by=by, quiet=True)
        loops.closes(given, start, found, cancels=case.cancels)
        if case.way is not None:
            assert found["gradient_error"].max() < 1e-13  # with the same masks the same kernels give the same
        if by is not None:
            components_add_up(found, torch.finfo(case.dtype).eps)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("more", [{}, {"every": 3}, {"to": "run"}], ids=["in memory", "every third", "on disk"])
def test_a_layer_may_be_added_to_the_optimizer_half_way(more: dict[str, Any], tmp_path: Path) -> None:
    """A layer that the optimizer held all along, frozen until then, gets the same contributions."""

    def frozen(model: nn.Sequential) -> loops.Optimizers:
        loops.frozen_adamw(model)
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]

    held = followed(loops.loop(frozen), loops.thawed_half_way).attribute(by="module")
    if "to" in more:
        more = {"to": tmp_path / "run", "every": 2}
    added = followed(loops.loop(loops.frozen_adamw), loops.thawed_half_way, **more).attribute(by="module")
    for part in ("contribution", "decay", "by_component"):
        assert loops.apart(added[part], held[part]) <= loops.CLOSE
    assert float(abs(added["by_component"].sel(component="0")).max()) > 0


def components_add_up(found: xr.Dataset, eps: float) -> None:
    """Components add up to the whole: for each example, for decay, for rounding, and for each step.

    The sum of a step rounds at the size of the contributions that cancel in it.
    """
    for whole, parts in BY_COMPONENT.items():
        size = abs(found[parts]).sum(dim="component")
        if whole == "by_step":
            size = size + abs(found["by_component"]).sum(dim=("component", "example"))
        missed = abs(found[parts].sum(dim="component") - found[whole])
        assert float((missed - SUMMED * eps * size).max()) <= 0, whole
    assert float(abs(found["by_component"]).sum()) > 0


def raising(given: Loop, batch: Tensor) -> None:
    if given.done == 5:
        raise KeyError("a loop's own")
    plain(given, batch)


@pytest.mark.parametrize(("body", "error"), [(raising, KeyError), (loss_of_a_stale_graph, RuntimeError)])
def test_a_loop_that_raises_leaves_a_trace_that_adds_up(body: Body, error: type[Exception]) -> None:
    given, traces = loops.loop(loops.momentum), list[Trace]()
    start = loops.outputs_of(given.model, given.queries)
    with pytest.raises(error, match=r"own|modified by an inplace operation"):
        followed(given, body, kept=traces)
    loops.closes(given, start, traces[0].attribute())
