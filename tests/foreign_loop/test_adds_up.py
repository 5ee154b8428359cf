"""The law of attribution: parts add up to what training did, in all, by step and by component.

    f_T − f_0 = Σ contributions + decay + rounding,    each sum = Σ over components

One table of loops: optimizers × the ways to use them × precisions × layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from ntkexp.path.components import By
from tests.foreign_loop.loops import (
    BOUNDS,
    LOOPS,
    Body,
    Loop,
    Maker,
    accumulated,
    adamw,
    followed,
    loop,
    momentum,
    nesterov,
    outputs_add_up,
    plain,
    scheduled_and_clipped,
    sgd,
)
from tests.foreign_loop.test_rules import OPTIMIZERS

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


@dataclass(frozen=True)
class Case:
    """One loop: its optimizers, the body of a step, and what replaces its middle layer."""

    optimizers: Maker
    body: Body = plain
    dtype: torch.dtype = torch.float64
    layer: Callable[[nn.Module], nn.Module] | None = None
    by: tuple[By | None, ...] = ALL
    cancels: bool = False  # parts may be larger than their sum, so that the bound is relative to them

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"-{self.layer.__name__}"
        return f"{self.optimizers.__name__}-{self.body.__name__}-{str(self.dtype)[6:]}{layer}"

    def loop(self) -> Loop:
        given = loop(self.optimizers, self.dtype)
        if self.layer is not None:
            given.model[2] = self.layer(given.model[2])
            given.model(given.x)
            given.optimizers = self.optimizers(given.model)
        return given


OFTEN = (
    *(Case(optimizers, body) for optimizers, body in LOOPS),
    *(Case(optimizers, scheduled_and_clipped, torch.float32) for optimizers in (momentum, adamw)),
    *(Case(sgd, layer=layer) for layer in (old_weight_norm, pruned, Keeping)),
    Case(nesterov, layer=weight_norm),
)
RULES = (
    *(Case(each, scheduled_and_clipped, by=(None,), cancels=True) for each in OPTIMIZERS),
    *(
        pytest.param(Case(each, accumulated, by=(None, "parameter"), cancels=True), marks=pytest.mark.slow)
        for each in OPTIMIZERS
    ),
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", OFTEN, ids=str)
def test_parts_add_up_to_what_training_did(case: Case) -> None:
    adds_up(case)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_parts_add_up_by_every_rule(case: Case) -> None:
    adds_up(case)


def adds_up(case: Case) -> None:
    given = case.loop()
    with torch.no_grad():
        start = given.model(given.queries)
    trace = followed(given, case.body)
    with torch.no_grad():
        change = given.model(given.queries) - start
    assert change.norm() > 0
    for by in case.by:
        found = trace.attribute(by=by, quiet=True)
        outputs_add_up(found, change, BOUNDS[case.dtype], cancels=case.cancels)
        if by is not None:
            components_add_up(found, torch.finfo(case.dtype).eps)


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
