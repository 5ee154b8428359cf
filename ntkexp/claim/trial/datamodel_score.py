"""Whether contributions predict what training on other examples does: the linear datamodeling score (LDS).

    score = mean over points x of Spearman over halves S of  Σ_{i ∈ S} τ(x, xᵢ)  with  f_T(x), trained on S alone

    method           τ(x, xᵢ)
    contributions    𝒮(x, xᵢ) by secants, whose sum is the network
    tracin           −Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), its first order, with a checkpoint at every step
    last_gradient    −K_T(x, xᵢ) ℓ′ᵢ(T)
    input            ⟨x, xᵢ⟩ yᵢ
    shuffled         𝒮 of another example

S. M. Park et al., "TRAK: attributing model behavior at scale" (2023), arXiv:2303.14186, define the score; TracIn is of
G. Pruthi et al. (2020), arXiv:2002.08484.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import pandas as pd
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.retraining import Retraining, groups_of, retraining
from ntkexp.records.sweep import Level


class DatamodelScore(AbstractTrial):
    """A training, in the words of `ntkexp train`, is repeated on so many halves of its examples."""

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found = retraining([*self.base, "path.rule=[secant,left]", "path.error_samples=0", "ladder.machine=[]"], seed)
        kept = groups_of(found.train // 2, self.groups, found.train, seed)
        actual = found.outputs_without(kept)[:, :, 0]
        return [{"method": name, "score": score(kept @ tau.t(), actual)} for name, tau in attributions(found).items()]


def attributions(found: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What each method says of the points that are no training examples."""
    evidence, problem, train = found.outcome.evidence, found.setting.problem, found.train
    gradient = found.setting.experiment.loss.output_gradient(evidence.end[:train], problem.targets[:train])[:, 0]
    own = evidence.elsewhere("secant")[:, 0]
    flat = problem.inputs.flatten(1)
    return {
        "contributions": own,
        "tracin": evidence.elsewhere("left")[:, 0],
        "last_gradient": -evidence.kernel_end[train:, 0, :, 0] * gradient,
        "input": (flat[train:] @ flat[:train].t()) * problem.targets[:train, 0],
        "shuffled": own.roll(1, 1),
    }


def score(predicted: Float[Tensor, "group point"], actual: Float[Tensor, "group point"]) -> float:
    """Correlate ranks over groups, point by point, and average; there is no figure where a training diverged.

    >>> import torch
    >>> predicted = torch.tensor([[1.0], [2.0], [3.0]])
    >>> score(predicted, torch.tensor([[0.0], [5.0], [90.0]])), score(predicted, torch.tensor([[0.0], [5.0], [nan]]))
    (1.0, nan)
    """
    if not (predicted.isfinite().all() and actual.isfinite().all()):
        return nan
    ranks = [pd.DataFrame(part.numpy()).rank() for part in (predicted, actual)]
    return round(float(ranks[0].corrwith(ranks[1]).mean()), 15)
