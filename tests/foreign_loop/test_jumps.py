"""Discrete choices that change at a query: their effect is in `jumps`, and all parts still add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.measure import Measure
from ntkexp.mistake import Mistake

EXAMPLES, INPUTS, EXPERTS, STEPS = 16, 4, 4, 12
ROUNDING = 1e-12  # of sums of 16 examples over 12 steps, relative to their sizes

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    X = torch.randn(EXAMPLES, INPUTS, dtype=torch.float64)
    Y = torch.randint(3, (EXAMPLES,))


class Routed(nn.Module):
    """Experts, and a router that chooses one for each example."""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.router = nn.Linear(INPUTS, EXPERTS).double()
            self.experts = nn.ModuleList(nn.Linear(INPUTS, 3).double() for _ in range(EXPERTS))
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.router(x), torch.stack([expert(x) for expert in self.experts], 1))


pytestmark = pytest.mark.usefixtures("all_operations")


def two_best(scores: Tensor, outputs: Tensor) -> Tensor:
    weights, chosen = scores.softmax(1).topk(2, 1)
    return (outputs.gather(1, chosen[..., None].expand(-1, -1, 3)) * weights[..., None]).sum(1)


def best(scores: Tensor, outputs: Tensor) -> Tensor:
    return outputs[torch.arange(len(outputs)), scores.argmax(1)] * scores.amax(1, keepdim=True)


def in_order(scores: Tensor, outputs: Tensor) -> Tensor:
    return outputs.sum(1) * scores.sort(1).values[:, :3]


def by_bucket(scores: Tensor, outputs: Tensor) -> Tensor:
    edges = torch.linspace(-1, 1, 9, dtype=scores.dtype)
    return outputs.sum(1) * (scores + torch.bucketize(scores, edges))[:, :3]


def by_place(scores: Tensor, outputs: Tensor) -> Tensor:
    """Count the running sums below fixed numbers."""
    numbers = torch.tensor([1.0, 2.0, 4.0], dtype=scores.dtype).repeat(len(scores), 1)
    return outputs.sum(1) * (scores[:, :3] + torch.searchsorted(scores.exp().cumsum(1), numbers))


def unpooled(scores: Tensor, outputs: Tensor) -> Tensor:
    """The larger of two scores returns to its place."""
    pooled, places = functional.max_pool1d(scores[:, None], 2, return_indices=True)
    spread = functional.max_unpool1d(pooled, places, [2])
    return (outputs * spread.transpose(1, 2)).sum(1)


def nearest_pixels(scores: Tensor, outputs: Tensor) -> Tensor:
    """A picture of the outputs, and the pixels that are nearest to places."""
    places = torch.stack([scores, scores.flip(1)], 2)[:, None].tanh()
    picture = functional.grid_sample(outputs[:, None], places, mode="nearest", align_corners=False)
    return outputs.sum(1) * (scores.square().sum(1, keepdim=True) + picture[:, 0, 0, :3])


def one_of_two_ways(scores: Tensor, outputs: Tensor) -> Tensor:
    """Python decides by the only example which operations run and which parameters they use."""
    if bool(scores[0, 0] > scores[0, 1]):
        return outputs[:, 0] * scores[:, :1]
    return (outputs[:, 1] * scores[:, 1:2]).tanh()


CASES: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "the two best experts": (two_best, "aten.topk"),
    "the best expert": (best, "aten.argmax"),
    "scores in order": (in_order, "aten.sort"),
    "the bucket of a score": (by_bucket, "aten.bucketize"),
    "a place among running sums": (by_place, "aten.searchsorted"),
    "the place of a maximum": (unpooled, "aten.max_pool2d_with_indices"),
    "the nearest pixel": (nearest_pixels, "aten.grid_sampler_2d"),
}  # fmt: skip


Make: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, 0.05)


def nesterov(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.2, momentum=0.9, nesterov=True)


def attributed(
    choose: Callable[[Tensor, Tensor], Tensor],
    queries: Tensor,
    measure: Measure | None = None,
    make: Make = adam,
    size: int = 8,
) -> xr.Dataset:
    model = Routed(choose)
    optimizer = make(model.parameters())
    with ntkexp.follow(model, optimizer, queries=queries, measure=measure) as trace:
        for step in range(STEPS):
            batch = torch.arange(EXAMPLES).roll(step)[:size]
            optimizer.zero_grad()
            functional.cross_entropy(model(X[batch]), Y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace.attribute(quiet=True)


@pytest.mark.parametrize("measure", [None, lambda outputs, call: outputs.logsumexp(1)], ids=["outputs", "a measure"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(9)
def test_parts_and_jumps_add_up(case: str, measure: Measure | None) -> None:
    choose, operation = CASES[case]
    found = attributed(choose, X[:6], measure)
    assert operation in found.attrs["jumped"]
    total = found["contribution"].sum("example") + found["decay"] + found["rounding"] + found["jumps"]
    size = float(abs(found["contribution"]).sum("example").max())
    assert float(abs(total - found["change"]).max()) <= ROUNDING * size
    assert float(abs(found["by_step"].sum("step") - found["change"]).max()) <= ROUNDING * size


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_a_jump_leaves_the_other_queries_alone(case: str) -> None:
    """Other queries with jumps do not affect the contributions and jumps of a query."""
    choose, _ = CASES[case]
    together = attributed(choose, X[:6])
    jumped = np.abs(together["jumps"].to_numpy()).max(1) > 0
    assert jumped.any()
    size = float(abs(together["contribution"]).max())
    for query in (int(jumped.argmax()), int(jumped.argmin())):
        alone = attributed(choose, X[query : query + 1])
        ours = together["contribution"][query].sel(example=alone["example"]).to_numpy()
        assert np.abs(ours - alone["contribution"][0].to_numpy()).max() <= ROUNDING * size
        assert ("jumps" in alone) == bool(jumped[query])


@pytest.mark.parametrize("make", [adam, nesterov])
def test_ways_with_other_parameters(make: Make) -> None:
    """After a jump, a step uses other parameters. Momentum still moves the parameters from before the jump."""
    found = attributed(one_of_two_ways, X[1:2], make=make, size=1)
    assert "different operations" in found.attrs["jumped"] or "takes different ways" in found.attrs["jumped"]
    total = found["contribution"].sum("example") + found["decay"] + found["rounding"] + found["jumps"]
    size = float(abs(found["contribution"]).sum("example").max())
    assert float(abs(total - found["change"]).max()) <= ROUNDING * size


def test_numbers_that_leave_torch_are_no_choice() -> None:
    """A smooth factor that Python computes has no difference rule, so nothing explains it."""

    def normalised(scores: Tensor, outputs: Tensor) -> Tensor:
        return outputs[:, 0] * scores[:, :1] / (1 + abs(scores[0, 0].item()))

    with pytest.raises(Mistake, match=r"a number that left torch, as by item\(\) or float\(\), differs"):
        attributed(normalised, X[:1], size=1)
