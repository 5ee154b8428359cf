"""An independent oracle for steps whose factors depend on the gradient: signs, trust ratios, clipping by value.

The test carries a share of the memory and of each step for every example, with the factors of the whole step. The
contribution of an example is its share of the movement, times the mean Jacobian along the step. The mean is taken over
eight Gauss–Legendre nodes. One layer under a tanh has the same mean Jacobian and secant Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_value_

from ntkexp.foreign_loop.example_names import digests
from tests.foreign_loop import loops, other_optimizers
from tests.foreign_loop.bugs import on_gradients
from tests.foreign_loop.loops import Body, Loop, Maker, followed, loop, of_timm, outputs_of, plain

ROWS = loops.EXAMPLES + 1  # one for each example, and one for weight decay
CLOSE = 1e-11  # quadrature along steps of at most 0.1


@dataclass
class Shares:
    """The parts of one parameter's memory: one row for each example, and one for weight decay."""

    memory: Tensor
    square: Tensor
    points: Tensor  # parts of the weights, minus the weights before the loop
    count: int = 0

    def take(self, decay: float, gain: Tensor | float, parts: Tensor) -> Tensor:
        """m ← β m + α p, for all rows."""
        self.count += 1
        self.memory = decay * self.memory + gain * parts
        return self.memory


Moved: TypeAlias = Callable[[Shares, Tensor, Tensor, float], Tensor]
"""The movements of all rows, from their gradients, the weight, and the norm of all gradients."""


def lion(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    mixed = 0.9 * shares.memory + 0.1 * parts
    whole = mixed.sum(0)
    shares.take(0.99, 0.01, parts)
    moved = -0.01 * torch.where(whole == 0, 0.0, mixed / whole.abs())
    moved[-1] -= 0.01 * 0.1 * weight
    return moved


def signum(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    memory = shares.take(0.9, 0.1, parts)
    signs: Tensor = memory / memory.sum(0).abs()
    return -0.01 * signs


def lamb(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    parts = parts / max(1.0, norm / 0.5)
    memory = shares.take(0.9, 0.1, parts)
    shares.square = 0.999 * shares.square + 0.001 * parts.sum(0).square()
    root = (shares.square / (1 - 0.999**shares.count)).sqrt() + 1e-6
    update = memory / (1 - 0.9**shares.count) / root
    update[-1] += 0.1 * weight
    ratio = float(weight.norm() / update.sum(0).norm())
    return update * (-0.02 * ratio)


def lars(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    gradient = parts.sum(0)
    ratio = 0.02 * weight.norm() / (gradient.norm() + 0.1 * weight.norm() + 1e-8)
    parts[-1] += 0.1 * weight
    return -1.0 * shares.take(0.9, ratio, parts)


def rmsprop(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    shares.square = 0.99 * shares.square + 0.01 * parts.sum(0).square()
    return -0.01 * shares.take(0.9, 1.0, parts / (shares.square.sqrt() + 1e-8))


def momentum_by_value(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    gradient = parts.sum(0)
    return -0.1 * shares.take(0.9, gradient.clamp(-0.05, 0.05) / gradient, parts)


def adam_by_value(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    gradient = parts.sum(0)
    factor = gradient.clamp(-0.05, 0.05) / gradient
    memory = shares.take(0.9, 0.1 * factor, parts)
    shares.square = 0.999 * shares.square + 0.001 * (factor * gradient).square()
    root = (shares.square / (1 - 0.999**shares.count)).sqrt() + 1e-8
    return -0.01 * memory / (1 - 0.9**shares.count) / root


def schedule_free(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    """The rows of `memory` add up to the change of z, and the rows of `points` to the change of y."""
    shares.count += 1
    shares.square = 0.99 * shares.square + 0.01 * parts.sum(0).square()
    parts = parts / ((shares.square / (1 - 0.99**shares.count)).sqrt() + 1e-8)
    parts[-1] += 0.1 * weight
    rate = 0.02 * min(1.0, shares.count / 3)
    rates = [0.02 * min(1.0, (k + 1) / 3) for k in range(shares.count)]
    share = rate**2 / sum(each**2 for each in rates)
    before = shares.points
    shares.points = (1 - share) * before + share * shares.memory + rate * (0.8 * (1 - share) - 1) * parts
    shares.memory = shares.memory - rate * parts
    return shares.points - before


def swapped(given: Loop, batch: Tensor) -> None:
    """The weights are moved to their average and back, for an evaluation."""
    (optimizer,) = given.optimizers
    assert isinstance(optimizer, other_optimizers.SGDScheduleFree)
    optimizer.eval()
    outputs_of(given.model, given.queries)
    optimizer.train()
    plain(given, batch)


@on_gradients
def by_value(given: Loop, _: list[Tensor]) -> None:
    clip_grad_value_(given.model.parameters(), 0.05)


@dataclass
class Unrolled:
    """A loop over one layer that divides each step among examples."""

    model: nn.Sequential
    queries: Tensor
    moved: Moved
    ascent: float = 0.0  # the loop computes gradients at w + ascent · g
    shares: dict[str, Shares] = field(default_factory=dict)
    parts: Tensor = field(default_factory=lambda: torch.zeros(0))  # [query, out, row]

    def __post_init__(self) -> None:
        for name, weight in self.model.named_parameters():
            zeros = torch.zeros_like(weight.detach())
            rows = zeros.expand(ROWS, *zeros.shape).clone()
            self.shares[name] = Shares(rows, zeros, rows.clone())
        self.parts = torch.zeros(*outputs_of(self.model, self.queries).shape, ROWS, dtype=torch.float64)

    def gradients(self, weights: dict[str, Tensor], x: Tensor, y: Tensor, batch: Tensor) -> dict[str, Tensor]:
        """The gradients of all rows at some weights."""
        at = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        gradients = {name: torch.zeros(ROWS, *weight.shape, dtype=weight.dtype) for name, weight in weights.items()}
        for example in batch.tolist():
            outputs = torch.func.functional_call(self.model, at, x[example][None])
            loss = nn.functional.cross_entropy(outputs, y[example][None]) / len(batch)
            for name, gradient in zip(at, torch.autograd.grad(loss, list(at.values())), strict=True):
                gradients[name][example] += gradient
        return gradients

    def step(self, x: Tensor, y: Tensor, batch: Tensor) -> None:
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        gradients = self.gradients(weights, x, y, batch)
        if self.ascent:
            up = {name: weight + self.ascent * gradients[name].sum(0) for name, weight in weights.items()}
            gradients = self.gradients(up, x, y, batch)
        norm = float(torch.stack([gradient.sum(0).norm() for gradient in gradients.values()]).norm())
        movements = {
            name: self.moved(self.shares[name], gradients[name], weights[name], norm).detach() for name in weights
        }
        changes = {name: movement.sum(0) for name, movement in movements.items()}

        # the mean Jacobian along the step
        nodes, sizes = np.polynomial.legendre.leggauss(8)
        for node, size in zip(nodes, sizes, strict=True):
            along = {name: weights[name] + (1 + node) / 2 * change for name, change in changes.items()}
            jacobians = torch.func.jacrev(lambda at: torch.func.functional_call(self.model, at, self.queries))(along)
            for name, jacobian in jacobians.items():
                flat = jacobian.detach().flatten(2)
                self.parts += size / 2 * torch.einsum("qcw,nw->qcn", flat, movements[name].flatten(1))
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.add_(changes[name])


def one_layer(maker: Maker) -> Loop:
    given = loop(maker)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        given.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    given.optimizers = maker(given.model)
    return given


def all_in_one(kind: Callable[..., optim.Optimizer], **settings: object) -> Maker:
    return lambda model: [kind(model.parameters(), **settings)]


def momentum_alone(shares: Shares, parts: Tensor, weight: Tensor, norm: float) -> Tensor:
    return -0.1 * shares.take(0.9, 1.0, parts)


ASCENT = 0.05
CASES: dict[str, tuple[Maker, Body, Moved]] = {
    "SAM by hand": (all_in_one(optim.SGD, lr=0.1, momentum=0.9), loops.by_hand_like_sam, momentum_alone),
    "Lion": (all_in_one(other_optimizers.Lion, lr=0.01, weight_decay=0.1), plain, lion),
    "signSGD": (all_in_one(other_optimizers.SignSGD, lr=0.01, momentum=0.9), plain, signum),
    "LAMB": (of_timm("Lamb", together=True, lr=0.02, weight_decay=0.1, max_grad_norm=0.5), plain, lamb),
    "LARS": (
        of_timm("Lars", together=True, lr=1.0, momentum=0.9, weight_decay=0.1, trust_coeff=0.02),
        plain,
        lars,
    ),
    "AdamW schedule-free": (
        all_in_one(other_optimizers.AdamWScheduleFree, lr=0.02, betas=(0.8, 0.99), weight_decay=0.1, warmup_steps=3),
        swapped,
        schedule_free,
    ),
    "RMSprop": (all_in_one(optim.RMSprop, lr=0.01, momentum=0.9), plain, rmsprop),
    "SGD by value": (all_in_one(optim.SGD, lr=0.1, momentum=0.9), by_value, momentum_by_value),
    "Adam by value": (all_in_one(optim.Adam, lr=0.01), by_value, adam_by_value),
}


@pytest.mark.parametrize("case", CASES)
def test_contributions_are_shares_of_the_steps_with_their_factors(case: str) -> None:
    maker, body, moved = CASES[case]
    given = one_layer(maker)
    trace = followed(given, body)
    found = trace.attribute(quiet=True)

    again = one_layer(maker)
    unrolled = Unrolled(again.model, again.queries, moved, ASCENT if case.startswith("SAM") else 0.0)
    for _, batch in zip(range(loops.STEPS), loops.batches(), strict=False):
        unrolled.step(again.x, again.y, batch)
    for name, weight in given.model.named_parameters():
        torch.testing.assert_close(again.model.get_parameter(name), weight, rtol=CLOSE, atol=CLOSE)

    names = [name for name in digests(given.x) if name in trace.examples]
    seen = [k for k, name in enumerate(digests(given.x)) if name in trace.examples]
    expected = unrolled.parts[:, :, seen]
    ours = torch.from_numpy(found["contribution"].sel(example=names).values)
    assert (ours - expected).abs().max() <= CLOSE * expected.abs().max()
    decay = torch.from_numpy(found["decay"].values)
    assert (decay - unrolled.parts[:, :, -1]).abs().max() <= CLOSE * expected.abs().max()
