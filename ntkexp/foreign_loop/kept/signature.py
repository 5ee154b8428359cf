"""Signatures: a few sums that tell weights from others, or gradients, without keeping them.

    σ_b = Σ_i r_i w_{b,i},   b a sixteenth of the tensor,   r_i ~ N(0, 1) drawn once

An error e in a tensor shows in σ with its own size, E‖σ(e)‖² = ‖e‖²: only by chance could it be hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.stream import stream

PARTS = 16


@dataclass(frozen=True)
class Signed:
    """The signatures of a step: of what it consumed, and of the weights after it."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Signatures:
    """The numbers that were drawn so far, by how many they are."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """The signature of every tensor.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        return {name: self.of_one(tensor.detach()) for name, tensor in tensors.items()}

    def of_one(self, tensor: Tensor) -> Float[Tensor, " part"]:
        """The signature of a tensor, what is left over from equal parts at its end."""
        flat = tensor.reshape(-1)
        parts = max(1, min(PARTS, flat.numel()))
        wide, rest = divmod(flat.numel(), parts)
        found = flat.new_zeros(parts + 1)
        torch.mv(flat[: wide * parts].view(parts, wide), self.drawn(wide, tensor), out=found[:parts])
        if rest:
            found[parts] = flat[wide * parts :] @ self.drawn(rest, tensor)
        return found

    def drawn(self, count: int, like: Tensor) -> Tensor:
        """So many numbers."""
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            self.numbers[key] = torch.randn(count, generator=generator, dtype=torch.float64).to(like)
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two signatures of the same tensors are apart, relative to the second.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    ours, theirs = (torch.cat([each[name] for name in other]) for each in (one, other))
    size = float(theirs.norm())
    missed = float((ours - theirs).norm())
    return missed / size if size else missed
