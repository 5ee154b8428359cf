"""Differentiation: from the outputs of a network, or of its surrogate, to its features.

The outputs are differentiated at the taps of every use of a weight, one output after the other or all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

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
    chosen: Sequence[int],
    *,
    at_once: bool = False,
) -> Jacobian:
    """The Jacobian of the chosen outputs, as it is arranged from what is pulled back to every use (`arrange.arrange`).

    `leaves` are the weights, or the differences of weights, that are trained.
    """
    taps, columns = [use.tap for use in uses], each_output(output, chosen)
    pull = pull_at_once if at_once and len(chosen) > 1 else pull_one_by_one
    cotangents = pull(output, taps, columns) if taps else []
    return arranged(uses, cotangents, owned.of_uses, len(output), len(chosen), leaves)


def pull_one_by_one(
    output: Float[Tensor, "example out"], taps: list[Tensor], columns: Float[Tensor, "chosen example out"]
) -> list[Float[Tensor, "chosen ..."]]:
    """∂f/∂tap, with a back-propagation for every output."""
    pulled = [
        torch.autograd.grad(output, taps, column, retain_graph=True, materialize_grads=True) for column in columns
    ]
    return [parts[0][None] if len(parts) == 1 else torch.stack(parts) for parts in zip(*pulled, strict=True)]


def pull_at_once(
    output: Float[Tensor, "example out"], taps: list[Tensor], columns: Float[Tensor, "chosen example out"]
) -> list[Float[Tensor, "chosen ..."]]:
    """∂f/∂tap, with a back-propagation in which every operation runs for all outputs."""
    found = torch.autograd.grad(output, taps, columns, retain_graph=True, is_grads_batched=True, allow_unused=True)
    return [
        tap.detach().new_zeros(len(columns), *tap.shape) if pulled is None else pulled
        for tap, pulled in zip(taps, found, strict=True)
    ]


def each_output(output: Float[Tensor, "example out"], chosen: Sequence[int]) -> Float[Tensor, "chosen example out"]:
    """One for each chosen output in turn, of all examples."""
    each = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)[list(chosen)]
    return each[:, None].expand(-1, *output.shape)
