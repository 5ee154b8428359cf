"""Networks of one shape with their weights stacked, so that all of them are run at once.

>>> layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
>>> for k, layer in enumerate(layers):
...     _ = nn.init.constant_(layer.weight, k + 2.0)
>>> x = torch.tensor([[1.0], [3.0]])
>>> together = stacked(layers)
>>> together.outputs(x)[..., 0].tolist(), together.tangent_kernels(x)[1].tolist()
([[2.0, 6.0], [3.0, 9.0]], [[1.0, 3.0], [3.0, 9.0]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ntkexp.library import tangent_kernel
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class StackedNetworks:
    """The first axis of every weight counts networks; the module is one of them, and lends its shape."""

    module: nn.Module
    weights: Weights
    buffers: Weights

    def outputs(self, x: Float[Tensor, "point *shape"]) -> Float[Tensor, "network point out"]:
        """Run every network at all points."""
        run = vmap(lambda w, b: functional_call(self.module, (w, b), (x,)), in_dims=(0, 0))
        found: Tensor = run(self.weights, self.buffers)
        return found

    def tangent_kernels(self, x: Float[Tensor, "point *shape"]) -> Float[Tensor, "network point point_"]:
        """Find the tangent kernel of every network of one output, among the points."""
        count = len(next(iter(self.weights.values())))
        each = ({name: weight[k] for name, weight in self.weights.items()} for k in range(count))
        return torch.stack([tangent_kernel(self.module, x, weights=weights)[:, 0, :, 0] for weights in each])

    def at(self, weights: Weights) -> StackedNetworks:
        """The same networks, elsewhere."""
        return replace(self, weights=weights)


def stacked(modules: Sequence[nn.Module]) -> StackedNetworks:
    """Stack the weights of modules that differ in nothing else."""
    weights, buffers = stack_module_state(list(modules))
    return StackedNetworks(modules[0], {name: weight.detach() for name, weight in weights.items()}, buffers)
