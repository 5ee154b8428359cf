"""How well scores of training examples predict trainings without some of them.

    LDS    mean over queries q of Spearman over trainings S of  −Σ_{i left out of S} τ(q, i)  with  f_S(q)
    QLD    mean over queries q of the harm that is done to q by leaving out its top examples by τ

A score τ(q, i) is positive where example i raises the query's measure f. The linear datamodeling score is of S. M. Park
et al. (2023), arXiv:2303.14186; its interval resamples queries and trainings together, as both were drawn.
"""

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
from ntkexp.report.tables import Column, Table, format_text
from ntkexp.text import counted, listed, percent, short

Scores: TypeAlias = NDArray[np.float64]
"""[query, example]: a query is an output at a point."""

RESAMPLES = 1000


@dataclass(frozen=True)
class DatamodelingScore:
    """The LDS of some scores, and an interval that holds it with 95 % confidence; NaN for queries that never change."""

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
    """The LDS of scores [query, example], given `left_out` [training, example] and `outputs` [training, query].

    >>> left_out = np.eye(3, dtype=bool)
    >>> linear_datamodeling_score(np.array([[3.0, 2.0, 1.0]]), left_out, np.array([[0.1], [0.2], [0.9]])).value
    1.0
    """
    predicted = -(left_out.astype(float) @ scores.T)
    by_query = spearman(predicted, outputs)
    generator, found = np.random.default_rng(0), []
    for _ in range(resamples):
        rows, queries = (generator.integers(0, count, count) for count in outputs.shape)
        at = np.ix_(rows, queries)
        found.append(mean_known(spearman(predicted[at], outputs[at])))
    tail = 100 * (1 - CONFIDENCE) / 2
    known = [value for value in found if np.isfinite(value)]
    low, high = np.percentile(known, [tail, 100 - tail]) if known else (np.nan, np.nan)
    return DatamodelingScore(mean_known(by_query), float(low), float(high), by_query)


def spearman(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> NDArray[np.float64]:
    """The correlation of ranks down each column; ties share their mean rank, and a constant column gives NaN.

    >>> spearman(np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), np.array([[1.0, 7.0], [8.0, 7.0], [9.0, 7.0]]))
    array([ 1., nan])
    """
    from scipy.stats import rankdata  # noqa: PLC0415  slow, and most reports need none

    first, second = (rankdata(part, axis=0) for part in (predicted, actual))
    first, second = first - first.mean(0), second - second.mean(0)
    size = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(size > 0, (first * second).sum(0) / size, np.nan)
    diverged = ~(np.isfinite(predicted).all(0) & np.isfinite(actual).all(0))  # NaN has no rank
    return np.where(diverged, np.nan, np.round(found, 15))


def mean_known(values: NDArray[np.float64]) -> float:
    """The mean of what is known; NaN if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def top_examples(scores: Scores, count: int, *, lower_is_better: bool) -> list[tuple[int, ...]]:
    """For each query those `count` examples that did it most good by these scores, in ascending order.

    >>> top_examples(np.array([[0.1, -3.0, 2.0]]), 1, lower_is_better=False)
    [(2,)]
    >>> top_examples(np.array([[0.1, -3.0, 2.0]]), 1, lower_is_better=True)
    [(1,)]
    """
    order = np.argsort(scores if lower_is_better else -scores, axis=1, kind="stable")
    return [tuple(sorted(row.tolist())) for row in order[:, :count]]


# --- What was found, and how it is shown.


@dataclass(frozen=True)
class ValidatedScore:
    """How one kind of scores fared."""

    name: str
    lds: DatamodelingScore
    harm: Estimate | None = None  # QLD


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How scores fared, and the ground truth that they were compared with."""

    truth: GroundTruth
    scores: tuple[ValidatedScore, ...]
    harm_by_chance: Estimate | None = None  # of leaving out as many examples at random
    top: int | None = None  # how many examples QLD leaves out
    metasmoothness: float | None = None
    lower_is_better: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """A row for each score, the best first."""
        columns = (
            Column("score", number=False),
            Column("LDS"),
            Column("low"),
            Column("high"),
            Column("queries"),
            Column("QLD"),
            Column("QLD low"),
            Column("QLD high"),
        )
        rows = []
        for each in sorted(
            self.scores, key=lambda score: -np.nan_to_num(score.lds.value, nan=-2.0)
        ):
            known = int(np.isfinite(each.lds.by_query).sum())
            harm = (
                (None, None, None)
                if each.harm is None
                else (each.harm.value, each.harm.low, each.harm.high)
            )
            rows.append((each.name, each.lds.value, each.lds.low, each.lds.high, known, *harm))
        if (chance := self.harm_by_chance) is not None:
            rows.append(
                ("at random", None, None, None, None, chance.value, chance.low, chance.high)
            )
        return Table(columns, tuple(rows))

    @property
    def sentences(self) -> list[str]:
        """What the numbers are of, and what speaks against them."""
        trainings, examples = self.truth.left_out.shape
        size = int(self.truth.left_out[0].sum())
        seeds = f", each from {counted(self.truth.fresh, 'fresh seed')}" if self.truth.fresh else ""
        said = [
            f"LDS: rank correlation of predicted with actual outputs of {counted(trainings, 'training')} without "
            f"{counted(size, 'example')} of {examples}{seeds}, averaged over queries; 95 % interval over queries and "
            "trainings"
        ]
        if self.top is not None:
            what = "rise" if self.lower_is_better else "fall"
            said.append(
                f"QLD: {what} of a query's measure after training without its top {counted(self.top, 'example')}, "
                "averaged over queries"
            )
        if self.metasmoothness is not None:
            said.append(
                f"metasmoothness {short(self.metasmoothness)} (1: weights change smoothly with the data)"
            )
        constant = [
            f"{each.name} ({counted(int((~np.isfinite(each.lds.by_query)).sum()), 'query')})"
            for each in self.scores
            if not np.isfinite(each.lds.by_query).all()
        ]
        if constant:
            said.append(
                f"left out, because scores or outputs are constant or not finite: {listed(constant)}"
            )
        return [*said, *self.doubts]

    def as_json(self) -> dict[str, Json]:
        """All of it as plain data."""
        rows = [
            dict(zip((column.name for column in self.table.columns), row, strict=True))
            for row in self.table.rows
        ]
        return {
            "scores": rows,
            "trainings": len(self.truth.left_out),
            "left_out": percent(float(self.truth.left_out[0].mean())),
            "fresh_seeds": self.truth.fresh,
            "metasmoothness": self.metasmoothness,
            "ground_truth": self.truth.digest,
            "remarks": self.sentences,
        }

    def __str__(self) -> str:
        return "\n".join([format_text(self.table), "", *self.sentences])


def read_scores(path: Path) -> NDArray[np.generic]:
    """Scores from a file of NumPy."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise WrongArgument(
            f"scores={path} is not an array of NumPy ({type(error).__name__}); numpy.save writes one",
            "scores",
        ) from None
    if not isinstance(found, np.ndarray):
        raise WrongArgument(f"scores={path} holds several arrays; numpy.save writes one", "scores")
    return found


def checked_scores(found: object, shape: tuple[int, int, int], where: str) -> Scores:
    """Scores of [point, out, example], or of [point, example] where there is one output, as [query, example]."""
    try:
        array = np.asarray(found)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # of rows of several lengths, or of a tensor
        raise Mistake(f"{where}: they are no array: {first_line(error)}") from error
    points, outs, examples = shape
    if array.dtype.kind not in "fiu":
        raise Mistake(f"{where}: it holds {array.dtype}, not numbers")
    if array.shape not in ({shape, (points, examples)} if outs == 1 else {shape}):
        turned = "; turn it around (.T)" if array.shape == (examples, points) else ""
        one = f" or {points, examples}" if outs == 1 else ""
        raise Mistake(
            f"{where}: its shape is {array.shape}, and [point, out, example] is {shape}{one}{turned}"
        )
    if not np.isfinite(array).all():
        raise Mistake(f"{where}: some scores are not finite")
    return array.reshape(points * outs, examples).astype(float)
