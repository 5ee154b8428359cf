"""Differentiation: from the outputs of a network, or of its surrogate, to its features.

The outputs are differentiated at the taps of every use of a weight, one output after the other or all at once; or one
mixture of them, for which it takes a single back-propagation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from ntkexp.kernel.secant.ownership import Owners
from ntkexp.kernel.secant.uses import Use
from ntkexp.shapes import Weights

Jacobian = TypeVar("Jacobian")


def differentiate(
    arranged: Callable[..., Jacobian],
    output: Float[Tensor, "example out"],
    uses: Sequence[Use],
    owned: Owners,
    leaves: Weights,
    mixtures: Float[Tensor, "mixture example out"],
    *,
    at_once: bool = False,
) -> Jacobian:
    """The Jacobian of mixtures of outputs, as it is arranged from what is pulled back to every use (`arrange.arrange`).

    `leaves` are the weights, or the differences of weights, that are trained.
    """
    taps = [use.tap for use in uses]
    pull = pull_at_once if at_once and len(mixtures) > 1 else pull_one_by_one
    cotangents = pull(output, taps, mixtures) if taps else []
    return arranged(uses, cotangents, owned.of_uses, len(output), len(mixtures), leaves)


def pull_one_by_one(
    output: Float[Tensor, "example out"], taps: list[Tensor], mixtures: Float[Tensor, "mixture example out"]
) -> list[Float[Tensor, "mixture ..."]]:
    """∂f/∂tap, with a back-propagation for every mixture."""
    pulled = [
        torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True) for mixture in mixtures
    ]
    return [stacked(parts) for parts in zip(*pulled, strict=True)]


def stacked(parts: tuple[Tensor, ...]) -> Float[Tensor, "mixture ..."]:
    """What the mixtures pulled back, those of an example beside each other in memory, as kernels go through them."""
    if len(parts) == 1:
        return parts[0][None]
    return torch.stack(parts, 1).transpose(0, 1) if parts[0].dim() else torch.stack(parts)


def pull_at_once(
    output: Float[Tensor, "*shape"], taps: list[Tensor], mixtures: Float[Tensor, "mixture *shape"]
) -> list[Float[Tensor, "mixture ..."]]:
    """∂f/∂tap, with a back-propagation in which every operation runs for all mixtures."""

    def pull(mixture: Float[Tensor, "*shape"]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)

    return list(vmap(pull)(mixtures))


def each_output(output: Float[Tensor, "example out"], chosen: Sequence[int]) -> Float[Tensor, "chosen example out"]:
    """One for each chosen output in turn, of all examples."""
    places = torch.tensor(chosen, device=output.device)[:, None]
    each = torch.zeros(len(chosen), output.shape[1], dtype=output.dtype, device=output.device).scatter(1, places, 1.0)
    return each[:, None].expand(-1, *output.shape)
