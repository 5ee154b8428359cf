"""Signatures: random projections of a tensor w, which are compared instead of
the tensor.

    σ_b = Σ_i r_i w_{b,i}

w_b is one of 16 equal parts of the flattened tensor. The r_i ~ N(0, 1) are drawn once. If
a tensor has an error e, its signature has the error σ(e), and E‖σ(e)‖² = ‖e‖². So the
distance of two signatures is about the distance of the tensors.
"""

from __future__ import annotations

from collections import defaultdict
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
from ntkexp.stream import stream

SIGNATURE_PARTS = 16
# A sum in the tensor's dtype has at most this many terms. Longer sums are split, and
# their parts are added in float64.
MAX_SUMMED = 2**14
Numbers: TypeAlias = NDArray[np.float64]
"""Signatures of several tensors in double precision, in host memory, one per row."""


Rows: TypeAlias = Mapping[str, Float[Tensor, " part"]]
"""Signatures of named tensors. All of them have 17 elements, the last ones of small
tensors are 0."""


@dataclass(frozen=True)
class Signed:
    """Signatures of a step's gradients and of the weights after
    the step, in host memory."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Signatures:
    """Functions that compute signatures, and the random vectors r drawn so far, by
    length, dtype and device."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict
    )

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, in host memory.

        A signature has one element for each part, and one more element. If the size of
        the tensor is not a multiple of 16, the last element is the projection of the
        remaining numbers. Else it is 0. Small tensors have one number in each part.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        (rows,) = self.on_host([tensors])
        return shortened(rows, tensors)

    def on_host(self, several: Sequence[Mapping[str, Tensor]]) -> list[Rows]:
        """Return the signatures of several groups of tensors, with one transfer."""
        signed = [self.on_device(tensors) for tensors in several]
        read = iter(to_host([row for rows in signed for row in rows.values()]))
        return [{name: next(read) for name in rows} for rows in signed]

    def on_device(self, tensors: Mapping[str, Tensor]) -> Rows:
        """Return the signature of every tensor, on the device of the tensor."""
        alike = defaultdict[tuple[torch.dtype, torch.device], list[str]](list)
        for name, tensor in tensors.items():
            alike[tensor.dtype, tensor.device].append(name)
        found: dict[str, Tensor] = {}
        for names in alike.values():
            rows = self.rows([tensors[name] for name in names])
            found |= zip(names, rows.unbind(), strict=True)
        return {name: found[name] for name in tensors}

    @torch.no_grad()
    def rows(self, tensors: Sequence[Tensor]) -> Float[Tensor, "tensor part"]:
        """Return the signatures of tensors of one dtype and device, one in each row.
        Rows of small tensors end with zeros.

        >>> Signatures().rows([torch.zeros(3), torch.zeros(2, 50)]).shape
        torch.Size([2, 17])
        """
        rows = tensors[0].new_zeros(len(tensors), SIGNATURE_PARTS + 1)
        for tensor, row in zip(tensors, rows.unbind(), strict=True):
            parts = parts_of(tensor)
            width, rest = divmod(tensor.numel(), parts)
            if rest or width > MAX_SUMMED:
                self.write_long(tensor.reshape(-1), row)
            else:  # the most frequent case, with the fewest calls of torch
                drawn = self.drawn(width, tensor)
                torch.mv(tensor.reshape(parts, width), drawn, out=row[:parts])
        return rows

    def write_long(self, flat: Float[Tensor, " number"], row: Tensor) -> None:
        """Write the signature of a tensor that has a rest, or long sums, into a row."""
        parts = parts_of(flat)
        width, rest = divmod(len(flat), parts)
        pieces = flat[: width * parts].view(parts, width)
        drawn = self.drawn(width, flat)
        if width <= MAX_SUMMED:
            torch.mv(pieces, drawn, out=row[:parts])
        else:
            # rounding errors grow with the length of a sum: add short sums in float64
            sums = (
                torch.mv(pieces[:, at : at + MAX_SUMMED], drawn[at : at + MAX_SUMMED])
                for at in range(0, width, MAX_SUMMED)
            )
            row[:parts] = sum(each.double() for each in sums)
        if rest:
            row[parts] = flat[width * parts :] @ self.drawn(rest, flat)

    def drawn(self, count: int, like: Tensor) -> Tensor:
        """Return the random vector r of length `count`,
        with the dtype and device of `like`."""
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            drawn = torch.randn(count, generator=generator, dtype=torch.float64)
            self.numbers[key] = drawn.to(like)
        return self.numbers[key]


def parts_of(tensor: Tensor) -> int:
    """Return the number of parts in the signature of a tensor."""
    count = tensor.numel()
    return SIGNATURE_PARTS if count >= SIGNATURE_PARTS else max(1, count)


def shortened(rows: Rows, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the signatures without the zeros at the ends of small tensors, as they are
    stored."""
    return {name: row[: parts_of(tensors[name]) + 1] for name, row in rows.items()}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the relative distance ‖σ₁ − σ₂‖ / ‖σ₂‖ of two signatures,
    or ‖σ₁‖ if σ₂ = 0.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    lengths = [theirs.norm() for theirs in other.values()]
    gaps = [(one[name] - theirs).norm() for name, theirs in other.items()]
    norms = read_numbers([*lengths, *gaps])
    size, missed = hypot(*norms[: len(lengths)]), hypot(*norms[len(lengths) :])
    return missed / size if size else missed


def in_doubles(signatures: Sequence[Float[Tensor, "_ part"]]) -> list[Numbers]:
    """Convert signatures to double precision in host memory, all at once.

    >>> in_doubles([torch.ones(1, 1), torch.zeros(1, 2)])
    [array([[1.]]), array([[0., 0.]])]
    """
    flat = [each.reshape(-1) for each in to_host(signatures)]
    joined: Numbers = torch.cat(flat).double().numpy()
    doubles = list[Numbers]()
    start = 0
    for signature in signatures:
        end = start + signature.numel()
        doubles.append(joined[start:end].reshape(signature.shape))
        start = end
    return doubles


def sizes(signatures: Numbers) -> NDArray[np.float64]:
    """Return the norm of each signature, which approximates the norm of its tensor.

    >>> sizes(np.array([[3.0, 4.0], [0.0, 1e200]]))
    array([5.e+000, 1.e+200])
    """
    found: NDArray[np.float64] = np.hypot.reduce(signatures, axis=1)
    return found
