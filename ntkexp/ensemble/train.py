"""Networks that differ by their seeds alone, trained side by side by gradient descent, with all layers or the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.ensemble.stacked import StackedNetworks, stacked

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
        """Train networks at once, and give their outputs."""
        trained = self.trained(stacked(modules))
        with torch.no_grad():
            return trained.outputs(self.inputs)

    def trained(self, networks: StackedNetworks) -> StackedNetworks:
        """The networks after the last step; those of earlier steps are let go as it goes."""
        return deque(self.course(networks), maxlen=1).pop()

    def course(self, networks: StackedNetworks) -> Iterator[StackedNetworks]:
        """Go through training: the networks before it, and after every step. None knows of another, so their losses
        are added up.
        """
        weights, train = networks.weights, len(self.targets)
        moving = last(list(weights)) if self.readout else list(weights)
        yield networks
        for _ in range(self.steps):
            free = {name: weights[name].detach().requires_grad_() for name in moving}
            missed = networks.at({**weights, **free}).outputs(self.inputs[:train]) - self.targets
            gradients = torch.autograd.grad(missed.square().sum() / (2 * self.divisor), list(free.values()))
            moved = zip(moving, gradients, strict=True)
            weights = {**weights, **{name: weights[name] - self.size * gradient for name, gradient in moved}}
            yield networks.at(weights)


def last(names: Sequence[str]) -> list[str]:
    """Find the parameters of the last layer.

    >>> last(["net.1.weight", "net.3.weight", "net.3.bias"])
    ['net.3.weight', 'net.3.bias']
    """
    layer = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == layer]
