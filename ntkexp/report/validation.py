"""Compare scores of training examples with retraining without some examples.

    LDS    mean over queries q of the Spearman correlation, over retrainings S,
           between −Σ_{i left out of S} τ(q, i) and f_S(q)
    QLD    mean over queries q of the decrease of f(q), after retraining without the examples with
           the highest τ(q, i)

A score τ(q, i) is positive if example i increases the output f(q). f_S is the network
after retraining S, which leaves some examples out. The linear datamodeling score (LDS)
is due to S. M. Park et al. (2023), arXiv:2303.14186. The interval of the LDS resamples
queries and retrainings, because both are random samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, WrongArgument, first_line
from ntkexp.records.atomic import Json
from ntkexp.records.ground_truth import GroundTruth
from ntkexp.report.analysis.estimate import CONFIDENCE, Estimate
from ntkexp.report.analysis.rank_correlation import mean_known, spearman
from ntkexp.report.tables import Column, Table, Value, format_text
from ntkexp.text import counted, listed, percent, short

Scores: TypeAlias = NDArray[np.float64]
"""Scores [query, example]. Here a query is one output at one point."""

RESAMPLES = 1000


@dataclass(frozen=True)
class DatamodelingScore:
    """A linear datamodeling score (LDS) with its 95 % interval.

    `by_query` is NaN for queries whose scores or outputs are constant.
    """

    value: float
    low: float
    high: float
    by_query: NDArray[np.float64]


def linear_datamodeling_score(
    scores: Scores,
    left_out: NDArray[np.bool_],
    outputs: NDArray[np.float64],
    resamples: int = RESAMPLES,
) -> DatamodelingScore:
    """Compute the LDS of scores [query, example].

    Args:
        scores: τ [query, example].
        left_out: True for the examples that each retraining leaves out,
            [training, example].
        outputs: f_S(q) [training, query].
        resamples: The number of bootstrap samples for the interval.

    >>> left_out = np.eye(3, dtype=bool)
    >>> outputs = np.array([[0.1], [0.2], [0.9]])
    >>> linear_datamodeling_score(np.array([[3.0, 2.0, 1.0]]), left_out, outputs).value
    1.0
    """
    predicted = predicted_outputs(scores, left_out)
    by_query = spearman(predicted, outputs)

    # Bootstrap: draw trainings and queries with replacement
    generator = np.random.default_rng(0)
    trainings, queries = outputs.shape
    means = []
    for _ in range(resamples):
        drawn_trainings = generator.integers(0, trainings, trainings)
        drawn_queries = generator.integers(0, queries, queries)
        sample = np.ix_(drawn_trainings, drawn_queries)
        means.append(mean_known(spearman(predicted[sample], outputs[sample])))
    tail = 100 * (1 - CONFIDENCE) / 2
    known = [mean for mean in means if np.isfinite(mean)]
    low, high = np.percentile(known, [tail, 100 - tail]) if known else (np.nan, np.nan)
    return DatamodelingScore(mean_known(by_query), float(low), float(high), by_query)


def predicted_outputs(
    scores: Scores, left_out: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return −Σ_{i left out of S} τ(q, i), [training, query].

    If the sums of a query differ only by rounding, for example because all its scores
    are equal, return equal sums. Their ranks would be random."""
    selection = left_out.astype(float)
    predicted = -(selection @ scores.T)
    # the rounding error of a sum of n numbers is at most n eps Σ|τ|
    rounding = np.finfo(float).eps * scores.shape[1]
    errors = rounding * (selection @ np.abs(scores.T)).max(0)
    is_constant = np.ptp(predicted, axis=0) <= 2 * errors
    return np.where(is_constant, predicted[:1], predicted)


def top_examples(
    scores: Scores, count: int, *, lower_is_better: bool
) -> list[tuple[int, ...]]:
    """Return the sorted indices of the `count` most helpful examples of each query.

    If `lower_is_better`, the outputs are losses, and the most helpful examples have the
    lowest scores.

    >>> top_examples(np.array([[0.1, -3.0, 2.0]]), 1, lower_is_better=False)
    [(2,)]
    >>> top_examples(np.array([[0.1, -3.0, 2.0]]), 1, lower_is_better=True)
    [(1,)]
    """
    order = np.argsort(scores if lower_is_better else -scores, axis=1, kind="stable")
    return [tuple(sorted(row.tolist())) for row in order[:, :count]]


# --- The result.


@dataclass(frozen=True)
class ValidatedScore:
    """The linear datamodeling score (LDS) and the decrease of outputs after removals
    (QLD) of one attribution method."""

    name: str
    lds: DatamodelingScore
    # the QLD: the decrease of the outputs if the examples with the highest scores are
    # removed
    harm: Estimate | None = None

    @property
    def constant_queries(self) -> int:
        """The number of queries without a rank correlation."""
        return int((~np.isfinite(self.lds.by_query)).sum())

    @property
    def row(self) -> tuple[Value, ...]:
        harm: tuple[float | None, ...] = (None, None, None)
        if self.harm is not None:
            harm = (self.harm.value, self.harm.low, self.harm.high)
        queries = len(self.lds.by_query) - self.constant_queries
        return (self.name, self.lds.value, self.lds.low, self.lds.high, queries, *harm)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The scores of all methods, and the ground truth.

    Attributes:
        table: A table with the LDS and QLD of each method.
            `print(validation)` shows it.
        sentences: Definitions of the numbers, and reasons to doubt them.
        scores: The LDS and QLD of each method, with 95 % intervals.
        truth: The ground truth: which examples each retraining left out,
            and the outputs after it.
        harm_by_chance: The QLD if `top` random examples are removed instead.
        top: The number of examples that are removed for the QLD.
        metasmoothness: Near 1 if the weights change smoothly with the data.
        lower_is_better: True if the outputs are losses.
        doubts: Reasons to doubt the numbers.
    """

    truth: GroundTruth
    scores: tuple[ValidatedScore, ...]
    # the QLD if `top` random examples are removed
    harm_by_chance: Estimate | None = None
    top: int | None = None  # number of examples that are removed for the QLD
    metasmoothness: float | None = None
    lower_is_better: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """A table with a row for each method, the highest LDS first."""
        numbers = ("LDS", "low", "high", "queries", "QLD", "QLD low", "QLD high")
        columns = (Column("score", number=False), *map(Column, numbers))
        best_first = sorted(
            self.scores, key=lambda score: -np.nan_to_num(score.lds.value, nan=-2.0)
        )
        rows = [score.row for score in best_first]
        if (chance := self.harm_by_chance) is not None:
            rows.append(
                ("at random", *[None] * 4, chance.value, chance.low, chance.high)
            )
        return Table(columns, tuple(rows))

    @property
    def sentences(self) -> list[str]:
        """Sentences that define the numbers in the table, and reasons to doubt them."""
        trainings, examples = self.truth.left_out.shape
        size = int(self.truth.left_out[0].sum())
        seeds = (
            f", each from {counted(self.truth.fresh, 'fresh seed')}"
            if self.truth.fresh
            else ""
        )
        sentences = [
            f"LDS: rank correlation of predicted with actual outputs of "
            f"{counted(trainings, 'training')} without {counted(size, 'random example')} of "
            f"{examples}{seeds}, averaged over queries; 95 % interval over queries and trainings"
        ]
        if self.top is not None:
            change = "increase" if self.lower_is_better else "decrease"
            sentences.append(
                f"QLD: {change} of a query's output after training without its top "
                f"{counted(self.top, 'example')}, averaged over queries"
            )
        if self.metasmoothness is not None:
            sentences.append(
                f"metasmoothness {short(self.metasmoothness)} "
                "(1: weights change smoothly with the data)"
            )
        constant = [
            f"{score.name} ({counted(score.constant_queries, 'query')})"
            for score in self.scores
            if score.constant_queries
        ]
        if constant:
            sentences.append(
                "left out, because scores or outputs are constant or not finite: "
                f"{listed(constant)}"
            )
        return [*sentences, *self.doubts]

    def as_json(self) -> dict[str, Json]:
        names = [column.name for column in self.table.columns]
        return {
            "scores": [dict(zip(names, row, strict=True)) for row in self.table.rows],
            "trainings": len(self.truth.left_out),
            "left_out": percent(float(self.truth.left_out[0].mean())),
            "fresh_seeds": self.truth.fresh,
            "metasmoothness": self.metasmoothness,
            "ground_truth": self.truth.digest,
            "remarks": self.sentences,
        }

    def __str__(self) -> str:
        return "\n".join([format_text(self.table), "", *self.sentences])


# --- Scores of other methods.


def read_scores(path: Path) -> NDArray[np.generic]:
    """Read an array that `numpy.save` wrote."""
    try:
        scores = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise WrongArgument(
            f"scores={path} is not an array of NumPy ({type(error).__name__}); "
            "numpy.save writes one",
            "scores",
        ) from None
    if not isinstance(scores, np.ndarray):
        raise WrongArgument(
            f"scores={path} holds several arrays; numpy.save writes one", "scores"
        )
    return scores


def checked_scores(scores: object, shape: tuple[int, int, int], where: str) -> Scores:
    """Check scores [point, out, example], and reshape them to [query, example].

    If there is a single output, the axis `out` may be missing. Raise if the scores do
    not have the shape `shape`, or if a score is not a finite number. `where` names the
    scores in error messages."""
    try:
        array = np.asarray(scores)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        # rows of unequal length, or a tensor
        raise Mistake(f"{where}: not an array: {first_line(error)}") from error
    points, outs, examples = shape
    if array.dtype.kind not in "fiu":
        raise Mistake(f"{where}: it holds {array.dtype}, not numbers")
    shapes = {shape, (points, examples)} if outs == 1 else {shape}
    if array.shape not in shapes:
        transposed = "; transpose it (.T)" if array.shape == (examples, points) else ""
        without_out = f" or {points, examples}" if outs == 1 else ""
        raise Mistake(
            f"{where}: its shape is {array.shape}, and [point, out, example] is "
            f"{shape}{without_out}{transposed}"
        )
    if not np.isfinite(array).all():
        raise Mistake(f"{where}: some scores are not finite")
    return array.reshape(points * outs, examples).astype(float)
