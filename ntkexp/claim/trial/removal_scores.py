"""Which scores of training examples say what training without some of them changes, and which say what was added:

    correlation    mean over points x of Spearman over groups G of  Σ_{i ∈ G} τ(x, xᵢ)  with the change of f_T(x) when
                   G is left out of the same training: the same start, order and step sizes
    miss           ‖Σᵢ 𝒮(·, xᵢ) − (f_T − f_0)‖/‖f_T − f_0‖, of the contributions alone

τ are the scores of `ntkexp.claim.trial.told_changes`; `left_out` says who leaves: `one` example, each in turn, or
random groups of a share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.datamodel_score import score
from ntkexp.claim.trial.retraining import Retraining, groups_of, retraining
from ntkexp.claim.trial.told_changes import told_changes
from ntkexp.records.sweep import Level

READ = ("path.rule=[secant,left]", "path.probes=[probe]", "path.error_samples=0", "ladder.machine=[]")


class RemovalScores(AbstractTrial):
    """A training, in the words of `ntkexp train`, is repeated without examples, with each of these activations."""

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found: list[Mapping[str, Level]] = []
        for activation in self.activations:
            trained = retraining([*self.base, *READ, f"model.activation={activation}"], seed)
            of_activation = [*self.correlations(trained, seed), self.sum_of_contributions(trained)]
            found += [{"activation": activation, **row} for row in of_activation]
        return found

    def correlations(self, trained: Retraining, seed: int) -> Sequence[Mapping[str, Level]]:
        """Every score, held against training without groups of every size."""
        told, rows = told_changes(trained), list[Mapping[str, Level]]()
        for who, left in who_leaves(self.groups, trained.train, seed).items():
            actual = trained.changes_without(left)
            rows += [
                {"left_out": who, "score": name, "correlation": score(left @ tau.t(), actual)}
                for name, tau in told.items()
            ]
        return rows

    def sum_of_contributions(self, trained: Retraining) -> Mapping[str, Level]:
        """How far the contributions are from adding up to what training did."""
        evidence, others = trained.outcome.evidence, slice(trained.train, None)
        added = evidence.elsewhere("secant").sum(2)
        change = evidence.end[others] - evidence.start[others]
        return {"left_out": "nobody", "score": "contributions", "miss": float((added - change).norm() / change.norm())}


def who_leaves(groups: int, train: int, seed: int) -> dict[str, Float[Tensor, "group train"]]:
    """Every example by itself, and groups of shares, by their names.

    >>> {who: (len(left), int(left[0].sum())) for who, left in who_leaves(8, 40, seed=0).items()}
    {'one': (40, 1), '5 %': (8, 2), '10 %': (8, 4), '50 %': (8, 20)}
    """
    shares = {"5 %": 20, "10 %": 10, "50 %": 2}
    drawn = {name: groups_of(max(1, train // share), groups, train, seed) for name, share in shares.items()}
    return {"one": torch.eye(train, dtype=torch.float64), **drawn}
