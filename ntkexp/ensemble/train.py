"""Networks that differ by their seeds alone, trained side by side by gradient descent, with all layers or the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ntkexp.shapes import Weights

TOGETHER = 1 << 22  # weights that are trained at once


def trained(
    modules: Sequence[nn.Module],
    inputs: Float[Tensor, "point *shape"],
    targets: Float[Tensor, "train out"],
    size: float,
    steps: int,
    *,
    readout: bool,
    tell: Callable[[int], None] = lambda networks: None,
) -> Float[Tensor, "network point out"]:
    """The outputs at all points after so many steps on the mean of ½(f − y)² over the first of them."""
    each = sum(weight.numel() for weight in modules[0].parameters())
    count, found = max(1, TOGETHER // each), []
    for start in range(0, len(modules), count):
        few = modules[start : start + count]
        found.append(descended(few, inputs, targets, size, steps, readout=readout))
        tell(start + len(few))
    return torch.cat(found)


def descended(
    modules: Sequence[nn.Module],
    inputs: Float[Tensor, "point *shape"],
    targets: Float[Tensor, "train out"],
    size: float,
    steps: int,
    *,
    readout: bool,
) -> Float[Tensor, "network point out"]:
    """Some of them, whose weights are stacked: no network knows of another, so their losses are added up."""
    stacked, buffers = stack_module_state(list(modules))
    weights: Weights = {name: weight.detach() for name, weight in stacked.items()}
    moving = last(list(weights)) if readout else list(weights)

    def outputs(here: Weights, x: Tensor) -> Tensor:
        run = vmap(lambda w, b: functional_call(modules[0], (w, b), (x,)), in_dims=(0, 0))
        found: Tensor = run(here, buffers)
        return found

    for _ in range(steps):
        leaves = [weights[name].requires_grad_() for name in moving]
        missed = outputs(weights, inputs[: len(targets)]) - targets
        gradients = torch.autograd.grad(missed.square().sum() / (2 * len(targets)), leaves)
        for name, gradient in zip(moving, gradients, strict=True):
            weights[name] = weights[name].detach() - size * gradient
    with torch.no_grad():
        return outputs(weights, inputs)


def last(names: Sequence[str]) -> list[str]:
    """The parameters of the last layer.

    >>> last(["net.1.weight", "net.3.weight", "net.3.bias"])
    ['net.3.weight', 'net.3.bias']
    """
    layer = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == layer]
