"""Whether what removals of single examples change adds up to what the removal of all of them together changes:

    miss    ‖Σ_{i ∈ G} τᵢ − Δ_G‖/‖Δ_G‖        over points, and over groups G of one size

Δ_G is what the output changes by when G is left out of the same training: the same start, order and step sizes. What is
added up is said by `single`: Δ of each example alone (`retrained`), what a sweep back over the training says of it
(`effect`), or Δ of the examples of another group (`others`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.retraining import Retraining, groups_of, retraining
from ntkexp.claim.trial.would_change import would_change
from ntkexp.component import Count
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Level


class AddedRemovals(AbstractTrial):
    """A training, in the words of `ntkexp train`, is repeated without groups, with each of these activations."""

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    sizes: tuple[Count, ...] = Field((2, 5, 10, 20, 50), min_length=1)
    groups: int = Field(32, ge=2, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found: list[Mapping[str, Level]] = []
        for activation in self.activations:
            words = ["path.rule=[left]", "path.error_samples=0", "ladder.machine=[]", f"model.activation={activation}"]
            trained = retraining([*self.base, *words], seed)
            found += [{"activation": activation, **row} for row in self.misses(trained, seed)]
        return found

    def misses(self, trained: Retraining, seed: int) -> Sequence[Mapping[str, Level]]:
        """How far every sum is from what groups of every size change."""
        if max(self.sizes) >= trained.train:
            raise Mistake(f"trial.sizes: of {trained.train} examples some must be left; lower the last")
        alone = trained.changes_without(torch.eye(trained.train, dtype=torch.float64))
        effect, rows = would_change(trained).t(), list[Mapping[str, Level]]()
        for size in self.sizes:
            left = groups_of(size, self.groups, trained.train, seed)
            together = trained.changes_without(left)
            sums = {"retrained": left @ alone, "effect": left @ effect, "others": left.roll(1, 0) @ alone}
            rows += [{"size": size, "single": single, "miss": miss(told, together)} for single, told in sums.items()]
        return rows


def miss(told: Float[Tensor, "group point"], actual: Float[Tensor, "group point"]) -> float:
    """How far apart both are, as a share of the actual.

    >>> miss(torch.tensor([[4.0, 2.0]]), torch.tensor([[4.0, 0.0]]))
    0.5
    """
    return float((told - actual).norm() / actual.norm())
