"""What leaving an example out does to the others of its batch: the convention of the mean.

    fixed           κⱼ(w) = κⱼwⱼ                     the others keep their shares:         ∂/∂wᵢ = κᵢ γ·∇ℓᵢ
    renormalised    κⱼ(w) = κⱼwⱼ Σκ/Σκw              they share what is left, as a mean over a smaller batch does:
                                                     ∂/∂wᵢ = κᵢ (γ·∇ℓᵢ − Σκⱼγ·∇ℓⱼ/Σκ)

An example that leaves takes all of its weight along, and what that does to a mean is known exactly: of a batch of |B|,

    γ·g⁻ⁱ − γ·g = −∂/∂wᵢ · 1/(1 − κᵢ/Σκ) = −∂/∂wᵢ · |B|/(|B| − 1)

and −κᵢ γ·∇ℓᵢ where the others keep their shares, where a sum has no mean to share, and where nobody else is.

>>> along, batch = torch.tensor([[1.0, 3.0]]), TakenBatch(
...     examples=torch.tensor([0, 1]), shares=torch.tensor([0.5, 0.5]), losses=lambda weights: weights
... )
>>> FixedMean().slopes(along, batch).tolist(), RenormalisedMean().slopes(along, batch).tolist()
([[0.5, 1.5]], [[-0.5, 0.5]])
>>> FixedMean().removals(along, batch).tolist(), RenormalisedMean().removals(along, batch).tolist()
([[-0.5, -1.5]], [[1.0, -1.0]])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.trajectory import TakenBatch

Effects: TypeAlias = Literal["one_step", "derivative"] | bool
"""Whether effects are asked for: of who leaves, by steps that are taken without an example, or as a mere derivative."""

MeanName: TypeAlias = Literal["renormalised", "fixed"]


class AbstractMean(ABC):
    """A convention."""

    @abstractmethod
    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        """κ of each row, when the rows have these weights."""

    @abstractmethod
    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        """∂/∂wᵢ of γ·g for every row of a batch, given γ·∇ℓᵢ."""

    @abstractmethod
    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        """What γ·g changes by when an example leaves, for every row of a batch: those of an example add up to it."""


class FixedMean(AbstractMean):
    """The others keep their shares."""

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        return batch.shares * weights

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return along * batch.shares

    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return -self.slopes(along, batch)


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

    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        alone = -along * batch.shares
        if not batch.is_mean:
            return alone
        examples, rows = torch.unique(batch.examples, return_inverse=True)
        own = batch.shares.new_zeros(len(examples)).index_add_(0, rows, batch.shares)[rows]
        whole = batch.shares.sum()
        others = whole - own > len(rows) * torch.finfo(whole.dtype).eps * whole  # beyond what summing rounds
        grown = torch.where(others, whole / torch.where(others, whole - own, 1.0), 1.0)
        return torch.where(others, -self.slopes(along, batch) * grown, alone)


@dataclass(frozen=True)
class Infinitesimal(AbstractMean):
    """A convention in which nobody leaves: examples weigh a little less, and effects are the derivative."""

    mean: AbstractMean

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        return self.mean.shares(batch, weights)

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return self.mean.slopes(along, batch)

    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return -self.mean.slopes(along, batch)


MEANS: dict[MeanName, AbstractMean] = {"renormalised": RenormalisedMean(), "fixed": FixedMean()}


def mean_of(effects: Effects, mean: MeanName) -> AbstractMean:
    """The convention by which effects are found."""
    return Infinitesimal(MEANS[mean]) if effects == "derivative" else MEANS[mean]


def kind_of(effects: Effects) -> str:
    """What effects are, in a word: `removal` of who leaves his batches, first order from there on, or as asked for."""
    return "removal" if isinstance(effects, bool) else effects
