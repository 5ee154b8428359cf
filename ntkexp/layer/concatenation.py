"""Concatenations: the channels of several branches behind each other, whose kernels are averaged by their shares.

What follows sees the mean over all channels, of which branch i has the share p_i = c_i/Σ_j c_j:

    K′ = Σ_i p_i K_i,    Θ′ = Σ_i p_i Θ_i

Channels of different branches meet different weights, so that it does not matter whether they are independent. They
may have different variances, so that no activation follows, nor a norm.
"""

from __future__ import annotations

from functools import reduce
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import Operations, add, copy, weigh
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer import chain
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.mistake import Mistake


class Concatenation(AbstractLayer):
    """The channels of two or more branches, the first branch's first; an empty branch is the identity.

    >>> from ntkexp.layer.affine import Dense
    >>> layer = Concatenation(branches=((Dense(features=6),), ()))
    >>> layer.shape((2,)), layer.shares((2,))
    ((8,), (0.75, 0.25))
    """

    branches: Annotated[tuple[tuple[AbstractLayer, ...], ...], Field(min_length=2)]

    def ends(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes that the branches give to an example."""
        found = [chain.shapes(layers, shape)[-1] for layers in self.branches]
        if len({end[1:] for end in found}) > 1:
            raise Mistake(
                f"the branches of a concatenation differ in pixels: {', '.join(str([*end]) for end in found)}"
            )
        return found

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ends = self.ends(shape)
        return (sum(end[0] for end in ends), *ends[0][1:])

    def shares(self, shape: tuple[int, ...]) -> tuple[float, ...]:
        """The share that each branch has of the channels, p."""
        channels = [end[0] for end in self.ends(shape)]
        return tuple(one / sum(channels) for one in channels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return SideBySide(build(layers, shape, generator) for layers in self.branches)

    def carry(self, signal: Signal) -> Signal:
        ends = [chain.carry(layers, signal) for layers in self.branches]
        for end in ends:
            end.refuse_narrow()
        return Signal(fresh=all(end.fresh for end in ends), wide=True, uneven=True)

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return reduce(Pairs.union, (chain.need(layers, wanted, shape) for layers in self.branches))

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        asked = [found for layers in self.branches if (found := chain.need_own(layers, wanted, shape))]
        return reduce(Pairs.union, asked) if asked else None

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        shares = self.shares(shape)
        total = weighted(chain.push(self.branches[0], covariance, shape), shares[0])
        for layers, share in zip(self.branches[1:], shares[1:], strict=True):
            total = total.plus(weighted(chain.push(layers, covariance.following(total), shape), share))
        return total

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        registers = (register, *range(free, free + len(self.branches) - 1))
        free += len(registers) - 1
        found = tuple(copy(register, other) for other in registers[1:])
        for layers, here, share in zip(self.branches, registers, self.shares(shape), strict=True):
            branch = chain.fused(layers, shape, here, free)
            free = max([free, *(1 + max(operation.register, operation.other) for operation in branch)])
            found = (*found, *branch, weigh(here, share))
        return (*found, *(add(register, other) for other in registers[1:]))


class SideBySide(nn.ModuleList):
    """Several modules stand side by side, and their channels are put behind each other."""

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape_"]:
        return torch.cat([branch(x) for branch in self], dim=1)


def weighted(covariance: Covariance, share: float) -> Covariance:
    """The covariance and the tangent kernel, as part of a mean over channels."""
    return covariance.affine(lambda values, _: values, share, 0.0, lambda mixed, nngp: 0.0)
