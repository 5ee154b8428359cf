"""Contributions by plain autograd, which shares no code with the package.

The contribution of example i to f is Σ_s ⟨J̄_s, Δθ_s,i⟩. J̄_s is the mean Jacobian along step s, by Gauss-Legendre
quadrature. Δθ_s,i is the part of the step that the optimizer computes from the gradients of example i:

    m ← β m + α gᵢ        θ ← θ − S ⊙ Σᵢ m − decay        f ← f + J̄ Δθ
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass
class Account:
    """The contributions of a loop with SGD or Adam. Hooks on the optimizer compute them while it runs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    queries: Tensor | tuple[Tensor, ...]
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)  # of the next step
    momenta: dict[int, list[Tensor]] = field(default_factory=dict)
    contributions: dict[int, Tensor] = field(default_factory=dict)
    by_decay: Tensor = field(default_factory=lambda: torch.zeros(()).double())
    before: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = list(self.model.parameters())
        self.decays = [torch.zeros_like(weight) for weight in self.weights]  # momenta of weight decay
        self.optimizer.register_step_pre_hook(self.on_begin)
        self.optimizer.register_step_post_hook(self.on_end)

    def give(self, losses: Tensor, names: Sequence[int]) -> None:
        """Add the gradient of each loss to its example. The loop minimises the sum of the losses."""
        for name, loss in zip(names, losses, strict=True):
            parts = torch.autograd.grad(loss, self.weights, retain_graph=True, materialize_grads=True)
            earlier = self.gradients.get(name, [torch.zeros_like(part) for part in parts])
            self.gradients[name] = [a + b for a, b in zip(earlier, parts, strict=True)]
            self.momenta.setdefault(name, [torch.zeros_like(part) for part in parts])

    def on_begin(self, *_: object) -> None:
        self.before = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def on_end(self, *_: object) -> None:
        consumed = {k: weight.grad for k, weight in enumerate(self.weights) if weight.grad is not None}
        summed = {k: torch.stack([parts[k] for parts in self.gradients.values()]).sum(0) for k in consumed}
        ours, theirs = (torch.cat([part.flatten() for part in parts.values()]) for parts in (summed, consumed))
        factor = float(theirs.norm() / ours.norm().clamp(min=1e-300))  # by clipping
        assert torch.allclose(factor * ours, theirs, rtol=1e-9, atol=1e-12)
        jacobian = self.mean_jacobian()

        def effect(k: int, move: Tensor) -> Tensor:
            changed: Tensor = torch.tensordot(jacobian[k], move, move.dim())
            return changed

        for name, momentum in self.momenta.items():
            given = self.gradients.get(name, [torch.zeros_like(part) for part in momentum])
            for k in consumed:
                moved = effect(k, self.move(k, factor * given[k], momentum))
                self.contributions[name] = self.contributions.get(name, torch.zeros_like(moved)) + moved
        for k in consumed:
            self.by_decay = self.by_decay + effect(k, self.decay(k))
        self.gradients = {}

    def move(self, index: int, gradient: Tensor, momentum: list[Tensor]) -> Tensor:
        """Advance the momentum of one example, and return its part of the step of a weight."""
        (group,), state = self.optimizer.param_groups, self.optimizer.state[self.weights[index]]
        if "momentum" in group:
            momentum[index] = group["momentum"] * momentum[index] + gradient
            return momentum[index] * -float(group["lr"])
        (first, second), time = group["betas"], float(state["step"])
        momentum[index] = first * momentum[index] + (1 - first) * gradient
        size: Tensor = (state["exp_avg_sq"] / (1 - second**time)).sqrt() + group["eps"]
        factor: float = -group["lr"] / (1 - first**time)
        return momentum[index] / size * factor

    def decay(self, index: int) -> Tensor:
        """Advance the momentum of weight decay, and return its part of the step of a weight."""
        (group,) = self.optimizer.param_groups
        decay = group["weight_decay"] * list(self.before.values())[index]
        self.decays[index] = group.get("momentum", 0.0) * self.decays[index] + decay
        return self.decays[index] * -float(group["lr"])

    def mean_jacobian(self) -> list[Tensor]:
        """Return J̄, one tensor [*output, *weight] for each weight."""
        training = self.model.training
        self.model.eval()
        after = {name: weight.detach() for name, weight in self.model.named_parameters()}
        total = [torch.zeros(()).double() for _ in after]
        for node, node_weight in zip(NODES, NODE_WEIGHTS, strict=True):
            at = {name: torch.lerp(self.before[name], after[name], (1 + node) / 2) for name in after}
            parts = jacrev(lambda weights: functional_call(self.model, weights, self.queries))(at)
            total = [a + node_weight / 2 * parts[name] for a, name in zip(total, after, strict=True)]
        self.model.train(training)
        return total
