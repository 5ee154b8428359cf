"""The gradient of a batch, its derivatives, and those of its examples: many runs or many directions at once.

    g(θ, κ) = Jᵀ(κ ⊙ ℓ′),        Hγ = ∂(γ·g)/∂θ,        γ·∇ℓᵢ = ∂(γ·g)/∂κᵢ

Both are found by going backwards through the gradient. No gradient of a single example is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.func import vjp, vmap

from ntkexp.removal.rerun import Rerun

WayBack: TypeAlias = Callable[[Tensor], tuple[Tensor]]

AT_ONCE = 16
"""How many runs or directions are taken through the network together: more would not be faster."""


def gradient(
    rerun: Rerun, weights: Float[Tensor, " weight"], share: Float[Tensor, " row"], rows: Int[Tensor, " row"]
) -> Float[Tensor, " weight"]:
    """Find g(θ), given κ of the examples in these rows."""
    inputs, targets = rerun.inputs[rows], rerun.targets[rows]
    outputs, pull = way_back(lambda vector: rerun.outputs(vector, inputs), weights)
    found: Tensor = pull(share[:, None] * rerun.loss.output_gradient(outputs, targets))[0]
    return found


def gradients(
    rerun: Rerun, weights: Float[Tensor, "run weight"], share: Float[Tensor, "run row"], rows: Int[Tensor, " row"]
) -> Float[Tensor, "run weight"]:
    """Find g(θ) of several runs."""
    return at_once(lambda one, of: gradient(rerun, one, of, rows), weights, share)


def curved(
    rerun: Rerun,
    weights: Float[Tensor, " weight"],
    share: Float[Tensor, " row"],
    rows: Int[Tensor, " row"],
    directions: Float[Tensor, "direction weight"],
) -> Float[Tensor, "direction weight"]:
    """Find Hγ for several directions γ."""
    _, pull = way_back(lambda vector: gradient(rerun, vector, share, rows), weights)
    return pulled(pull, directions)


def scores(
    rerun: Rerun,
    weights: Float[Tensor, " weight"],
    rows: Int[Tensor, " row"],
    directions: Float[Tensor, "direction weight"],
) -> Float[Tensor, "direction row"]:
    """Find γ·∇ℓᵢ for several directions γ and every example."""
    _, pull = way_back(lambda share: gradient(rerun, weights, share, rows), rerun.everyone[rows])
    return pulled(pull, directions)


def way_back(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, WayBack]:
    """The value of a function, and what takes vectors back through its derivative there."""
    value, pull = vjp(function, at)[:2]
    return value, pull


def pulled(pull: WayBack, several: Float[Tensor, "several ..."]) -> Tensor:
    """Take several through the way back."""
    return at_once(lambda one: pull(one)[0], several)


def at_once(function: Callable[..., Tensor], *several: Num[Tensor, "several ..."]) -> Float[Tensor, "several ..."]:
    """Take several through a function together, or one by one where a module looks at numbers and decides by them.

    >>> at_once(lambda x: x * 2 if x.sum() > 0 else x, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 2.],
            [-1.]])
    """
    try:
        found: Tensor = vmap(function, chunk_size=AT_ONCE)(*several)
    except RuntimeError:  # what is wrong with the function itself is told below
        found = torch.stack([function(*each) for each in zip(*several, strict=True)])
    return found


def output_gradients(
    rerun: Rerun, weights: Float[Tensor, " weight"], inputs: Tensor, chosen: Int[Tensor, "chosen 2"]
) -> Float[Tensor, "chosen weight"]:
    """Find ∂f_c(x)/∂θ for chosen pairs (x, c) of a point and an output."""
    outputs, pull = way_back(lambda vector: rerun.outputs(vector, inputs), weights)
    seeds = torch.zeros(len(chosen), *outputs.shape).to(outputs)
    seeds[torch.arange(len(chosen)), chosen[:, 0], chosen[:, 1]] = 1.0
    return pulled(pull, seeds)
