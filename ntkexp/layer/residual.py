"""Residual layers: the sum of two branches, whose kernels add up if one of them ends in weights of its own."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import Operations, add, copy
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer import chain
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.mistake import Mistake


class Residual(AbstractLayer):
    """branch(x) + shortcut(x); an empty shortcut is the identity.

    >>> Residual(branch=()).shape((4, 8))
    (4, 8)
    """

    branch: tuple[AbstractLayer, ...]
    shortcut: tuple[AbstractLayer, ...] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ends = [chain.shapes(layers, shape)[-1] for layers in (self.branch, self.shortcut)]
        if ends[0] != ends[1]:
            raise Mistake(f"the branches of a residual layer disagree: {list(ends[0])} and {list(ends[1])}")
        return ends[0]

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return Sum(build(self.branch, shape, generator), build(self.shortcut, shape, generator))

    def carry(self, signal: Signal) -> Signal:
        ends = [chain.carry(layers, signal.branch()) for layers in (self.branch, self.shortcut)]
        ends[0].refuse_beside(ends[1])
        whole = [chain.carry(layers, signal) for layers in (self.branch, self.shortcut)]
        return Signal(
            gaussian=all(end.gaussian for end in ends),
            fresh=all(end.fresh for end in whole),
            wide=all(end.wide for end in ends),
            uneven=any(end.uneven for end in ends),
        )

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        branch, shortcut = (chain.need(layers, wanted, shape) for layers in (self.branch, self.shortcut))
        return branch.union(shortcut)

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        branch, shortcut = (chain.need_own(layers, wanted, shape) for layers in (self.branch, self.shortcut))
        return branch.union(shortcut) if branch and shortcut else branch or shortcut

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        branch = chain.push(self.branch, covariance, shape)
        return branch.plus(chain.push(self.shortcut, covariance.following(branch), shape))

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        branch = chain.fused(self.branch, shape, register, free + 1)
        taken = max((max(operation.register, operation.other) for operation in branch), default=0)
        shortcut = chain.fused(self.shortcut, shape, free, max(free, taken) + 1)
        return copy(register, free), *branch, *shortcut, add(register, free)


class Sum(nn.Module):
    """Two modules stand side by side, and their outputs are added."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape_"]:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total
