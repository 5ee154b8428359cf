"""A table of accuracies by depth, kernels and networks side by side, with those that the paper has.

S. Arora et al., "On exact computation with an infinitely wide neural net" (2019), arXiv:1904.11955, has such a table 1.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.picture.judged_rows import JudgedRows
from ntkexp.claim.trial.convolutional_accuracy import FAMILIES
from ntkexp.component import Count
from ntkexp.text import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim

REGRESSORS = ("process", "kernel", "network")


class AccuracyTable(AbstractPicture):
    """A trial of `ConvolutionalAccuracy` is set beside `per_cent`: by family and depth, what its paper has."""

    per_cent: dict[str, dict[Count, float]]
    numbers: tuple[()] = ()
    """They stand in `per_cent`."""

    def figure(self, judged: JudgedClaim) -> Figure:
        return JudgedRows().figure(judged)

    def table(self, judged: JudgedClaim) -> pd.DataFrame:
        ours = accuracies(judged)
        depths = sorted({depth for depth, *_ in ours} | {depth for paper in self.per_cent.values() for depth in paper})
        found: dict[str, list[float | None]] = {"depth": [*depths]}
        for family in dict.fromkeys(family for _, family, _ in ours):
            for name in REGRESSORS:
                found[f"{family} {name}, %"] = [ours.get((depth, family, name)) for depth in depths]
            if family in self.per_cent:
                found[f"{family} paper, %"] = [self.per_cent[family].get(depth) for depth in depths]
        return pd.DataFrame(found)

    def here(self, judged: JudgedClaim) -> str:
        ours, seeds = accuracies(judged), measured(judged)["seed"].nunique()
        means = {name: fmean(value for (*_, other), value in ours.items() if other == name) for name in REGRESSORS}
        told = [f"{name} {means[name]:.1f} %" for name in sorted(REGRESSORS, key=lambda name: -means[name])]
        plain, pooled = FAMILIES
        gains = [
            f"{ours[depth, pooled, 'kernel'] - value:.1f} points at depth {depth}".replace("-", "−")
            for (depth, family, name), value in ours.items()
            if (family, name) == (plain, "kernel")
        ]
        return (
            f"on the data of the claim, pooling changes the accuracy of the kernel by {listed(gains)}; over all depths "
            f"and families the mean accuracies are {listed(told)}, by {seeds} seeds."
        )


def measured(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows that the table is made of."""
    return judged.rows("depth", "family", "regressor", "accuracy", "seed")


def accuracies(judged: JudgedClaim) -> dict[tuple[int, str, str], float]:
    """Find the accuracy of each depth, family and regressor in per cent, the mean over seeds."""
    cells = measured(judged).groupby(["depth", "family", "regressor"], sort=False)["accuracy"].mean().reset_index()
    names = zip(cells["depth"].astype(int), cells["family"], cells["regressor"], strict=True)
    return dict(zip(names, (100 * cells["accuracy"]).round(1), strict=True))
