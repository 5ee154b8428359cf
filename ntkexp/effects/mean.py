"""What leaving an example out does to the others of its batch: the convention of the mean.

    fixed           κⱼ(w) = κⱼwⱼ                     the others keep their shares:         ∂/∂wᵢ = κᵢ γ·∇ℓᵢ
    renormalised    κⱼ(w) = κⱼwⱼ Σκ/Σκw              they share what is left, as a mean over a smaller batch does:
                                                     ∂/∂wᵢ = κᵢ (γ·∇ℓᵢ − Σκⱼγ·∇ℓⱼ/Σκ)

A sum has no mean that could be shared.

>>> along, batch = torch.tensor([[1.0, 3.0]]), TakenBatch(
...     examples=torch.tensor([0, 1]), shares=torch.tensor([0.5, 0.5]), losses=lambda weights: weights
... )
>>> FixedMean().slopes(along, batch).tolist(), RenormalisedMean().slopes(along, batch).tolist()
([[0.5, 1.5]], [[-0.5, 0.5]])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.trajectory import TakenBatch

Effects: TypeAlias = Literal["one_step"] | bool
"""Whether effects are asked for, and whether by steps that are taken without an example."""

MeanName: TypeAlias = Literal["renormalised", "fixed"]


class AbstractMean(ABC):
    """A convention."""

    @abstractmethod
    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        """κ of each row, when the rows have these weights."""

    @abstractmethod
    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        """∂/∂wᵢ of γ·g for every row of a batch, given γ·∇ℓᵢ."""


class FixedMean(AbstractMean):
    """The others keep their shares."""

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        return batch.shares * weights

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return along * batch.shares


class RenormalisedMean(AbstractMean):
    """The others share what is left; nothing is shared where nobody else is."""

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        weighted = batch.shares * weights
        if not batch.is_mean:
            return weighted
        left = weighted.sum(-1, keepdim=True)
        return torch.where(left > 0, weighted * batch.shares.sum() / left, 0.0)

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        if not batch.is_mean:
            return along * batch.shares
        mean = along @ batch.shares / batch.shares.sum()
        return (along - mean[:, None]) * batch.shares


MEANS: dict[MeanName, AbstractMean] = {"renormalised": RenormalisedMean(), "fixed": FixedMean()}
