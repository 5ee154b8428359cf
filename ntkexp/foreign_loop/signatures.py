"""Signatures: random projections of a tensor w, which are compared instead of
the tensor.

    σ_b = Σ_i r_i w_{b,i}

w_b is one of 16 equal parts of the flattened tensor. The r_i ~ N(0, 1) are drawn once. If
a tensor has an error e, its signature has the error σ(e), and E‖σ(e)‖² = ‖e‖². So the
distance of two signatures is about the distance of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.host_reads import read_numbers, to_host
from ntkexp.stream import normal, stream

SIGNATURE_PARTS = 16
# A sum in the tensor's dtype has at most this many terms. Longer sums are split, and
# their parts are added in float64.
MAX_SUMMED = 2**14
Numbers: TypeAlias = NDArray[np.float64]
"""A signature in double precision, in host memory."""


@dataclass(frozen=True)
class Signed:
    """Signatures of a step's gradients and of the weights after
    the step, in host memory."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @classmethod
    def of(cls, gradient: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Signed:
        """Copy the signatures to the host, with one transfer."""
        read = to_host([*gradient.values(), *after.values()])
        of_gradient = dict(zip(gradient, read[: len(gradient)], strict=True))
        of_weights = dict(zip(after, read[len(gradient) :], strict=True))
        return cls(of_gradient, of_weights)


@dataclass(frozen=True)
class Signatures:
    """Functions that compute signatures, and the random vectors r drawn so far, by
    length, dtype and device."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict
    )

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, in host memory.

        A signature has one element for each part, and a last element. The last element
        is the projection of the numbers that remain if the size of the tensor is not a
        multiple of 16, else 0. Small tensors have one number in each part.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        signatures = self.on_device(tensors)
        return dict(zip(signatures, to_host(list(signatures.values())), strict=True))

    def on_device(
        self, tensors: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, on the device of the tensor."""
        return {name: self.signature(tensor) for name, tensor in tensors.items()}

    def signature(self, tensor: Tensor) -> Float[Tensor, " part"]:
        """Return the signature of one tensor, on its device."""
        count = tensor.numel()
        parts = max(1, min(SIGNATURE_PARTS, count))
        width, rest = divmod(count, parts)
        values = tensor.detach()
        signature = values.new_zeros(parts + 1)
        if not rest and width <= MAX_SUMMED:
            # the most frequent case, with the fewest Python calls
            torch.mv(
                values.reshape(parts, width),
                self.drawn(width, values),
                out=signature[:parts],
            )
            return signature
        flat = values.reshape(-1)
        rows = flat[: width * parts] if rest else flat
        rows = rows.view(parts, width)
        drawn = self.drawn(width, flat)
        if width <= MAX_SUMMED:
            torch.mv(rows, drawn, out=signature[:parts])
        else:
            # rounding errors grow with the length of a sum: add short sums in float64
            sums = (
                torch.mv(rows[:, at : at + MAX_SUMMED], drawn[at : at + MAX_SUMMED])
                for at in range(0, width, MAX_SUMMED)
            )
            signature[:parts] = sum(each.double() for each in sums)
        if rest:
            signature[parts] = flat[width * parts :] @ self.drawn(rest, flat)
        return signature

    def drawn(self, count: int, like: Tensor) -> Tensor:
        """Return the random vector r of length `count`,
        with the dtype and device of `like`."""
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            self.numbers[key] = normal(stream("signature", count), count).to(like)
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the relative distance ‖σ₁ − σ₂‖ / ‖σ₂‖ of two signatures,
    or ‖σ₁‖ if σ₂ = 0.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    sizes = [theirs.norm() for theirs in other.values()]
    gaps = [(one[name] - theirs).norm() for name, theirs in other.items()]
    norms = read_numbers([*sizes, *gaps])
    size = hypot(*norms[: len(sizes)])
    missed = hypot(*norms[len(sizes) :])
    return missed / size if size else missed


def in_doubles(signatures: Sequence[Tensor]) -> list[Numbers]:
    """Convert signatures to double precision in host memory, all at once.

    >>> in_doubles([torch.ones(1), torch.zeros(2)])
    [array([1.]), array([0., 0.])]
    """
    joined: Numbers = torch.cat(to_host(signatures)).double().numpy()
    doubles = list[Numbers]()
    start = 0
    for signature in signatures:
        end = start + len(signature)
        doubles.append(joined[start:end])
        start = end
    return doubles


def size(signature: Numbers) -> float:
    """Return the norm of a signature, which approximates the norm of its tensor."""
    return hypot(*signature.tolist())
