"""Predictions from a kernel file, of every kernel in it, at all points.

Of `ntk`, in a file that holds `nngp` as well, these are the mean and the deviation of networks that train all layers
(`closed_form.ensemble`); of `nngp`, those of networks that train their readout, and at t = ∞ of the Gaussian process
itself (`closed_form.posterior`). A tangent kernel of finite networks predicts without a deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.ensemble import Ensemble, Kernels
from ntkexp.closed_form.posterior import Posterior
from ntkexp.kernel_file.predict.entries import Entries
from ntkexp.kernel_file.predict.question import Question
from ntkexp.kernel_file.predict.score import MeanAndDeviation, Score, score
from ntkexp.kernel_file.predict.solve import SolvedKernel, solve

LEFT_OUT = "left out"


@dataclass(frozen=True)
class Answer:
    """What one kernel says after one way to train: scores, and outputs by split."""

    kernel: str
    solved: SolvedKernel
    scores: tuple[Score, ...]
    predicted: dict[str, MeanAndDeviation]


def predict(entries: Entries, question: Question, tell: Callable[[str], None]) -> Iterator[Answer]:
    """Predict kernel by kernel, way by way."""
    for kernel in reversed(entries.matrix.layout.kernels):
        for found in solve(entries, kernel, question, tell):
            yield answer(entries, kernel, found)


def answer(entries: Entries, kernel: str, found: SolvedKernel) -> Answer:
    """Predict and score at every split."""
    splits = entries.matrix.splits
    predicted = {split: predict_at(entries, kernel, found, points) for split, points in splits.items()}
    if found.left_out is not None:
        predicted[LEFT_OUT] = MeanAndDeviation(entries.values(found.left_out), None)
    scores = []
    for split, outputs in predicted.items():
        points = splits["train" if split == LEFT_OUT else split]
        when = "t=∞" if split == LEFT_OUT else found.when  # the only time at which that has a closed form
        row = (kernel, when, found.ridge, split)
        scores.append(score(outputs, entries.targets[points], entries.labels[points], row, found.said))
    return Answer(kernel, found, tuple(scores), predicted)


def predict_at(entries: Entries, kernel: str, found: SolvedKernel, points: slice) -> MeanAndDeviation:
    """Predict the outputs at some points, block by block."""
    known = found.learned is not None and "nngp" in entries.matrix.layout.kernels
    prior = entries.among("nngp") if known and kernel == "ntk" else None
    means, variances = [], []
    for block in entries.blocks(points):
        cross = entries.rows(kernel, block)
        means.append(entries.values(cross @ found.coefficients))
        if known:
            variances.append(variance(entries, found, prior, cross, block))
    mean = torch.cat(means)
    return MeanAndDeviation(mean, torch.cat(variances).clamp(min=0).sqrt() if variances else None)


def variance(
    entries: Entries, found: SolvedKernel, prior: Tensor | None, cross: Float[Tensor, "point entry"], block: slice
) -> Float[Tensor, " point"]:
    """Find the variance of outputs over networks that train all layers, or, without 𝒢(X, X), their readout."""
    assert found.learned is not None
    assert found.twice is not None
    start = entries.own("nngp", block)
    if prior is None:
        return Posterior(cross, found.learned, found.twice).variance(start)
    nngp = Kernels(prior, entries.rows("nngp", block))
    return Ensemble(cross, nngp, found.learned).variance(start)
