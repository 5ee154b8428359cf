"""Contributions against plain autograd, which shares no code with the package.

The contribution of example i to f is Σ_s ⟨J̄_s, Δθ_s,i⟩. J̄_s is the mean Jacobian along step s, by Gauss-Legendre
quadrature. Δθ_s,i is the part of the step that the optimizer's recursion makes of the gradients of example i. The
secant Jacobian of the package differs from J̄_s in the second order of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.utils import clip_grad_norm_

import ntkexp

NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
RATE = 1e-4  # steps of about this size, so that second-order terms are below 1e-7 of the Jacobian
TOLERANCE = 1e-5  # parts of an example may cancel: 100 times these terms

Give: TypeAlias = Callable[[Tensor, Sequence[int]], object]
Train: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, Give], None]

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    X, Y, QUERIES = torch.randn(9, 4).double(), torch.randn(9, 2).double(), torch.randn(3, 4).double()


@dataclass
class Account:
    """The contributions of a loop. Hooks on the optimizer compute them while it runs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)  # of the next step
    momenta: dict[int, list[Tensor]] = field(default_factory=dict)
    contributions: dict[int, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = list(self.model.parameters())
        self.optimizer.register_step_pre_hook(self.on_begin)
        self.optimizer.register_step_post_hook(self.on_end)

    def give(self, losses: Tensor, names: Sequence[int]) -> None:
        """Add the gradient of each loss to its example. The loop minimises the sum of the losses."""
        for name, loss in zip(names, losses, strict=True):
            parts = torch.autograd.grad(loss, self.weights, retain_graph=True)
            earlier = self.gradients.get(name, [torch.zeros_like(part) for part in parts])
            self.gradients[name] = [a + b for a, b in zip(earlier, parts, strict=True)]
            self.momenta.setdefault(name, [torch.zeros_like(part) for part in parts])

    def on_begin(self, *_: object) -> None:
        self.before = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def on_end(self, *_: object) -> None:
        flat = [torch.cat([part.flatten() for part in parts]) for parts in self.gradients.values()]
        summed = torch.stack(flat).sum(0)
        consumed = torch.cat([weight.grad.flatten() for weight in self.weights if weight.grad is not None])
        factor = float(consumed.norm() / summed.norm().clamp(min=1e-300))  # by clipping
        assert torch.allclose(factor * summed, consumed, rtol=1e-9, atol=1e-12)
        jacobian = self.mean_jacobian()
        for name, momentum in self.momenta.items():
            given = self.gradients.get(name, [torch.zeros_like(part) for part in momentum])
            moves = [self.move(k, weight, factor * given[k], momentum) for k, weight in enumerate(self.weights)]
            total = sum(torch.tensordot(part, move, move.dim()) for part, move in zip(jacobian, moves, strict=True))
            self.contributions[name] = self.contributions.get(name, 0.0) + total
        self.gradients = {}

    def move(self, index: int, weight: Tensor, gradient: Tensor, momentum: list[Tensor]) -> Tensor:
        """Advance the momentum of one example, and return its part of the step of a weight."""
        (group,), state = self.optimizer.param_groups, self.optimizer.state[weight]
        if "momentum" in group:
            momentum[index] = group["momentum"] * momentum[index] + gradient
            return momentum[index] * -float(group["lr"])
        (first, second), time = group["betas"], float(state["step"])
        momentum[index] = first * momentum[index] + (1 - first) * gradient
        size: Tensor = (state["exp_avg_sq"] / (1 - second**time)).sqrt() + group["eps"]
        factor: float = -group["lr"] / (1 - first**time)
        return momentum[index] / size * factor

    def mean_jacobian(self) -> list[Tensor]:
        """Return J̄, one tensor [query, out, …] for each weight."""
        training = self.model.training
        self.model.eval()
        after = {name: weight.detach() for name, weight in self.model.named_parameters()}
        total = [torch.zeros(()).double() for _ in after]
        for node, node_weight in zip(NODES, NODE_WEIGHTS, strict=True):
            at = {name: torch.lerp(self.before[name], after[name], (1 + node) / 2) for name in after}
            parts = jacrev(lambda weights: functional_call(self.model, weights, (QUERIES,)))(at)
            total = [a + node_weight / 2 * parts[name] for a, name in zip(total, after, strict=True)]
        self.model.train(training)
        return total


def squares(model: nn.Module, batch: Tensor, inputs: Tensor | None = None) -> Tensor:
    outputs: Tensor = model(X[batch] if inputs is None else inputs)
    return (outputs - Y[batch]).square().sum(1)


def uneven(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """Accumulate over micro-batches of 4, 4 and 1 examples."""
    for _ in range(4):
        optimizer.zero_grad()
        for batch in torch.split(torch.randperm(9), 4):
            losses = squares(model, batch) / 9
            give(losses, batch.tolist())
            losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def augmented(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """Add noise to the inputs, draw some examples twice, and clip. One batch has no gradient."""
    for step in range(5):
        batch = torch.randint(9, (5,))
        NAMES[:] = batch.tolist()
        losses = squares(model, batch, X[batch] + 0.1 * torch.randn(5, 4).double()) * (step != 2)
        give(losses, NAMES)
        optimizer.zero_grad(set_to_none=False)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def contrasted(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """The loss couples examples: the part of an example is that of its own outputs."""
    for _ in range(4):
        batch = torch.randperm(9)[:6]
        outputs = model(X[batch])
        unit = nn.functional.normalize(outputs, dim=1)
        loss = nn.functional.cross_entropy(unit @ unit.T, torch.arange(6).roll(1))
        (slopes,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        give((outputs * slopes).sum(1), batch.tolist())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


NAMES: list[int] = []  # of the present batch
LOOPS: dict[str, tuple[Train, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "uneven": (uneven, torch.optim.SGD, {"momentum": 0.9}),
    "augmented": (augmented, torch.optim.Adam, {}),
    "contrasted": (contrasted, torch.optim.SGD, {"momentum": 0.5}),
    "contrasted, Adam": (contrasted, torch.optim.Adam, {"eps": 1e-3}),
}


@pytest.mark.parametrize("case", LOOPS)
def test_contributions_are_those_of_plain_autograd(case: str) -> None:
    train, kind, settings = LOOPS[case]
    by_noise = train is augmented

    def seeded() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3 * by_noise), nn.Linear(6, 2)).double()
        return model, kind(model.parameters(), lr=RATE, **settings)  # type: ignore[call-arg]

    account = Account(*seeded())
    train(account.model, account.optimizer, account.give)
    model, optimizer = seeded()
    ids = (lambda call: NAMES) if by_noise else None
    with ntkexp.follow(model, optimizer, queries=QUERIES, ids=ids) as trace:
        train(model, optimizer, lambda losses, names: None)
    found = trace.attribute(quiet=True)["contribution"].to_numpy()
    expected = torch.stack(list(account.contributions.values()), -1).numpy()
    assert found.shape == expected.shape  # examples in the order of their first use
    missed = np.linalg.norm(found - expected, axis=(0, 1))
    assert (missed <= TOLERANCE * np.linalg.norm(expected, axis=(0, 1))).all()
