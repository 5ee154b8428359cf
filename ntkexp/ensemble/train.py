"""Networks that differ by their seeds alone, trained side by side by gradient descent, with all layers or the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ntkexp.shapes import Weights

TOGETHER = 1 << 22  # weights that are trained at once


@dataclass(frozen=True)
class EnsembleTraining:
    """So many steps are taken on the sum of ½(f − y)² over the first of the points, divided by `divisor`, by all layers
    or by the last alone.
    """

    inputs: Float[Tensor, "point *shape"]
    targets: Float[Tensor, "train out"]
    size: float
    steps: int
    divisor: float
    readout: bool

    def outputs(
        self, modules: Sequence[nn.Module], tell: Callable[[int], None] = lambda networks: None
    ) -> Float[Tensor, "network point out"]:
        """Train each module, and give its outputs at all points; `tell` hears how many are trained."""
        each = sum(weight.numel() for weight in modules[0].parameters())
        count, found = max(1, TOGETHER // each), []
        for start in range(0, len(modules), count):
            few = modules[start : start + count]
            found.append(self.side_by_side(few))
            tell(start + len(few))
        return torch.cat(found)

    def side_by_side(self, modules: Sequence[nn.Module]) -> Float[Tensor, "network point out"]:
        """Train networks whose weights are stacked: none knows of another, so their losses are added up."""
        stacked, buffers = stack_module_state(list(modules))
        weights: Weights = {name: weight.detach() for name, weight in stacked.items()}
        moving = last(list(weights)) if self.readout else list(weights)

        def outputs(here: Weights, x: Tensor) -> Tensor:
            run = vmap(lambda w, b: functional_call(modules[0], (w, b), (x,)), in_dims=(0, 0))
            found: Tensor = run(here, buffers)
            return found

        train = len(self.targets)
        for _ in range(self.steps):
            leaves = [weights[name].requires_grad_() for name in moving]
            missed = outputs(weights, self.inputs[:train]) - self.targets
            gradients = torch.autograd.grad(missed.square().sum() / (2 * self.divisor), leaves)
            for name, gradient in zip(moving, gradients, strict=True):
                weights[name] = weights[name].detach() - self.size * gradient
        with torch.no_grad():
            return outputs(weights, self.inputs)


def last(names: Sequence[str]) -> list[str]:
    """Find the parameters of the last layer.

    >>> last(["net.1.weight", "net.3.weight", "net.3.bias"])
    ['net.3.weight', 'net.3.bias']
    """
    layer = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == layer]
