"""Expectations: rules that a claim states about its figures, before they are measured.

A *figure* is a measured number. A rule reads the rows of a table and returns evidence,
which `ntkexp.claim.judge` judges. Evidence is a figure with its confidence interval
over seeds and its expected range, or errors with their bounds.

Identity    every error lies below its bound
Bound       the mean over seeds is at most, or at least, a limit
Equality    the mean over seeds equals a value
Order       figures at one level of a column are larger than figures at another level
Slope       a figure is a power law of an axis, with a given exponent
Location    a figure has its maximum or minimum at a given position along an axis
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ntkexp.component import Component
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.sweep import Expected, level
from ntkexp.report.analysis.estimate import Estimate, mean_of
from ntkexp.report.analysis.laws import limit
from ntkexp.report.analysis.power_law import power_law
from ntkexp.report.analysis.two_way import two_way_mean
from ntkexp.text import percent, short

LATER_FIELDS = ("each", "within", "censored", "over_examples")
"""Fields that rules did not have when the first claims were registered. Digests omit
such a field unless it is set, so that old digests stay valid."""
EXAMPLE = "example"
"""The column that identifies the example of a row, such as a test picture. Equal
identifiers mean the same example, for all seeds."""
EXACT_MARGIN = 1e-9
"""The largest margin that needs no reason, because it only covers rounding."""


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval over seeds, and its expected range.

    Attributes:
        strict: True if the edges are outside of the range.
        log: True if the figure and the range are logarithms.
            Their exponentials are shown.
        note: A remark on the figure, or the reason why there is no interval.
        doubt: If not empty, the reason why the verdict must be `undecided`.
        null: The figure that is expected if the claim is false, on the scale of
            `expected`. None if the verdict cannot be `below minimum`.
        over_examples: True if the interval also accounts for the choice of examples.
            Then more seeds alone may not narrow it.
    """

    estimate: Estimate
    expected: Expected
    strict: bool = False
    null: float | None = None
    log: bool = False
    note: str = ""
    doubt: str = ""
    over_examples: bool = False


@dataclass(frozen=True)
class Errors:
    """The number of errors above their bounds, and the range of the seeds' largest
    errors."""

    beyond: int  # number of rows whose error exceeds its bound
    rows: int
    least: float  # the smallest of the seeds' largest errors
    worst: float  # the largest error of all seeds


class AbstractExpectation(Component, ABC):
    """A rule that the measured figures satisfy if the claim is true.

    `where` selects rows by the values of their columns. `each` names columns. The rule
    must hold separately for every combination of values of these columns, so that
    opposite deviations cannot cancel in the mean."""

    where: dict[str, Any] = Field(default_factory=dict)
    each: tuple[str, ...] = ()

    null: ClassVar[float | None] = None
    """The figure that is expected if the claim is false. If None,
    the claim's file must give it."""

    def fields(self) -> dict[str, Any]:
        """Omit fields that were added later unless they are set,
        so that old digests stay valid."""
        return {
            name: value
            for name, value in super().fields().items()
            if value or name not in LATER_FIELDS
        }

    @abstractmethod
    def evidence(self, table: pd.DataFrame) -> Interval | Errors:
        """Return the evidence from the rows of a table: a figure with its interval and
        its expected range, or errors with their bounds. All
        rows must have a finite `value`."""

    def levels(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Split the rows into levels: the combinations of values in the columns `each`.

        Without `each`, return all rows under the name "".
        """
        if not self.each:
            return {"": rows}
        for key in self.each:
            find_column(rows, key, "each")
        groups = {}
        for values, group in rows.groupby(list(self.each), sort=False, dropna=False):
            pairs = zip(self.each, values, strict=True)
            groups[", ".join(f"{key}={value}" for key, value in pairs)] = group
        return groups

    @abstractmethod
    def contains(self, figure: float) -> bool:
        """Return whether a figure lies strictly inside the expected range."""

    def scaled(self, value: float) -> float:
        """Convert a number from the claim's file to the scale of the expected range."""
        return value

    @property
    def edges(self) -> tuple[float, ...]:
        """The finite edges of the expected range, on its scale.
        An identity has no edges."""
        return ()

    @property
    def one_sided(self) -> bool:
        """True if the rule states a direction and a minimum size,
        as a bound or an order does."""
        return False

    @property
    def needs_reason(self) -> bool:
        """True if the rule has a margin or a threshold that the author
        of the claim must justify."""
        return True

    @property
    @abstractmethod
    def words(self) -> str:
        """The expected range, as a few words for a table."""

    @property
    def whole_words(self) -> str:
        """The expected range, the selected rows, and the columns of `each`, as text."""
        rows = ", ".join(f"{key}={value}" for key, value in self.where.items())
        words = f"{self.words} where {rows}" if rows else self.words
        return f"{words} at each {' and '.join(self.each)}" if self.each else words


def select_rows(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows with these values of the columns. Raise if no row has them.

    A list of values selects the rows with any of them.

    >>> table = pd.DataFrame({"depth": [1, 2, 3], "value": [4.0, 5.0, 6.0]})
    >>> select_rows(table, {"depth": [1, 3]})["value"].tolist()
    [4.0, 6.0]
    """
    for key, chosen in where.items():
        column = find_column(table, key, "where")
        values = chosen if isinstance(chosen, list) else [chosen]
        matches = column.isin([level(value) for value in values])
        if not matches.any():
            present = ", ".join(map(str, dict.fromkeys(column.tolist())))
            raise Mistake(f"where: no row has {key}={chosen}; there are {present}")
        table = table[matches]
    return table


def find_column(table: pd.DataFrame, key: str, field: str) -> pd.Series[Any]:
    names = [str(name) for name in table if name != "value"]
    if key not in names:
        raise Mistake(
            f"{field}: the table has no column {key}; it has {', '.join(names)}"
            f"{nearest(key, names)}"
        )
    return table[key]


class Identity(AbstractExpectation):
    """Identity: every error lies below its bound.

    If the table has a column `bound`, the bound of a row is the rounding error in this
    column. Otherwise it is `tolerance`. A single row above its bound refutes the
    identity. The interval reaches from the largest error of the best seed to the
    largest error of the worst seed.

    >>> errors = pd.DataFrame({"seed": [0, 1], "value": [3e-15, 4e-15]})
    >>> [Identity().evidence(errors.assign(bound=bound)).beyond for bound in (1e-12, 1e-16)]
    [0, 2]

    An error of NaN counts as above its bound. An infinite bound, such as the bound of a
    singular kernel, excludes no error. A row with an infinite bound therefore counts as
    above the bound, too.

    >>> Identity().evidence(errors.assign(bound=math.inf)).beyond
    2
    >>> Identity().evidence(errors.assign(bound=1e-12) * math.nan).beyond
    2
    """

    null = math.inf
    tolerance: float = Field(1e-12, gt=0)

    @property
    def needs_reason(self) -> bool:
        """False, because the bound is the rounding error."""
        return False

    def contains(self, figure: float) -> bool:
        return abs(figure) < self.tolerance

    @property
    def words(self) -> str:
        return f"every error ≤ {short(self.tolerance)}, or its row's rounding"

    def evidence(self, table: pd.DataFrame) -> Errors:
        bounds = table["bound"].astype(float) if "bound" in table else self.tolerance
        errors = table["value"].abs()
        worst = errors.groupby(table["seed"]).max()
        below = (errors <= bounds) & np.isfinite(bounds)
        return Errors(
            int((~below).sum()), len(table), float(worst.min()), float(worst.max())
        )


# --- Averages: one figure per seed, averaged over seeds, on a linear or a logarithmic
# scale. The expected range is:
#
# linear   value ± margin                log   value/(1 + margin) … value·(1 + margin)


AGGREGATIONS = {"mean": "mean", "least": "min", "largest": "max"}


class AbstractAverage(AbstractExpectation):
    """A rule for a mean over seeds, with one figure per seed.

    `rows` says whether the figure of a seed is the mean, the least or the largest value
    of its rows. If `within` gives the possible range of the figures, such as [0, 1] for
    shares, the interval stays in this range.

    Censoring: a measurement that ended early may yield only a bound of its value. Its
    row then has a 1 in the column `censored`, and the bound as its value. The field
    `censored` of the rule says on which side of the bound the true value lies, `below`
    or `above` (see `ntkexp.claim.judge.judge_rows`).

    Random examples: by default, the interval holds for the examples that the seeds draw
    from, such as the 357 pictures of one data set. With `over_examples`, the interval
    also accounts for the choice of the measured examples. Then each row has one
    example, which the column `example` identifies (see
    `ntkexp.report.analysis.two_way`)."""

    strict: ClassVar[bool] = False  # True if the edges are outside of the range
    margin: float = Field(ge=0)
    scale: Literal["linear", "log"] = "linear"
    rows: Literal["mean", "least", "largest"] = "mean"
    within: tuple[float, float] | None = None
    censored: Literal["below", "above"] | None = None
    over_examples: bool = False

    @model_validator(mode="after")
    def refuse_extremes_over_examples(self) -> Self:
        if self.over_examples and self.rows != "mean":
            raise Mistake(
                f"over_examples with rows: {self.rows}: the interval over examples needs "
                "means; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def refuse_ends(self) -> Self:
        if self.within is not None and (
            self.scale == "log" or not self.within[0] < self.within[1]
        ):
            raise Mistake(
                f"within={list(self.within)}: give the lower end, then the upper one, "
                "with scale: linear"
            )
        return self

    @property
    def is_log(self) -> bool:
        return self.scale == "log"

    @property
    @abstractmethod
    def expected(self) -> Expected:
        """The expected range; for `scale: log`, its logarithm."""

    @property
    def edges(self) -> tuple[float, ...]:
        return self.expected.edges

    @property
    def one_sided(self) -> bool:
        return self.expected.bound is not None

    @property
    def margin_words(self) -> str:
        return percent(self.margin) if self.is_log else short(self.margin)

    def contains(self, figure: float) -> bool:
        if self.is_log and figure <= 0:
            return self.expected.low == -math.inf
        return self.expected.low < self.scaled(figure) < self.expected.high

    def scaled(self, value: float) -> float:
        """Return a number from the claim's file; for `scale: log`, its logarithm."""
        if not self.is_log:
            return value
        if value <= 0:
            raise Mistake(
                f"{value} has no logarithm; it takes numbers above 0 with scale: log"
            )
        return math.log(value)

    @property
    def scaled_margin(self) -> float:
        return math.log1p(self.margin) if self.is_log else self.margin

    @property
    def whole_words(self) -> str:
        words = super().whole_words
        return f"{words} over seeds and examples" if self.over_examples else words

    def evidence(self, table: pd.DataFrame) -> Interval:
        figures = self.figures(table)
        self.refuse_outside(figures)
        estimate = mean_of(figures)
        if self.over_examples:
            estimate = self.estimate_over_examples(table)
        return Interval(
            replace(estimate, within=self.within),
            self.expected,
            strict=self.strict,
            log=self.is_log,
            over_examples=self.over_examples,
        )

    def refuse_outside(self, figures: list[float]) -> None:
        """Raise if a figure lies outside of the range `within`."""
        if self.within is None:
            return
        low, high = self.within
        outside = [figure for figure in figures if not low <= figure <= high]
        if outside:
            raise Mistake(
                f"within={list(self.within)}: the figure of a seed is "
                f"{short(outside[0])}, which is outside; give a range that contains it"
            )

    def estimate_over_examples(self, table: pd.DataFrame) -> Estimate:
        find_column(table, EXAMPLE, "over_examples")
        numbers = self.averages(table, ["seed", EXAMPLE])
        pairs = numbers.index.to_frame()
        return two_way_mean(
            pairs["seed"].tolist(), pairs[EXAMPLE].tolist(), numbers.tolist()
        )

    def figures(self, table: pd.DataFrame) -> list[float]:
        """Return the figure of each seed: the mean, minimum or maximum of its rows. For
        `scale: log`, use the logarithms of the rows."""
        return self.averages(table, ["seed"]).tolist()

    def averages(self, table: pd.DataFrame, keys: list[str]) -> pd.Series[float]:
        """Return the mean, minimum or maximum of the rows for each value of the columns
        `keys`."""
        values = table["value"].astype(float)
        if self.is_log:
            if (values <= 0).any():
                raise Mistake(
                    "scale: log takes figures above 0, and some are not; write scale: linear"
                )
            values = values.map(math.log)
        groups = values.groupby([table[key] for key in keys])
        averages: pd.Series[float] = groups.agg(AGGREGATIONS[self.rows])
        return averages


class Bound(AbstractAverage):
    """Bound: the mean over seeds is at most limit + margin, or at least limit − margin.

    `side` is `upper` for "at most", and `lower` for "at least".

    >>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [0.21, 0.19, 0.2]})
    >>> from ntkexp.claim.judge import judge_part
    >>> judge_part(Bound(limit=0.5, side="upper", margin=0.0), table).verdict
    'supported'
    >>> judge_part(Bound(limit=0.5, side="lower", margin=0.1), table).verdict
    'refuted'
    """

    limit: float
    side: Literal["upper", "lower"]

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled(self.limit), self.scaled_margin, self.side)

    @property
    def needs_reason(self) -> bool:
        """False if the rule states only the sign of the figure."""
        return bool(self.limit or self.margin)

    @property
    def words(self) -> str:
        sign = "≤" if self.side == "upper" else "≥"
        return f"{sign} {short(self.limit)} ± {self.margin_words}"


class Equality(AbstractAverage):
    """Equality: the mean over seeds equals `value` up
    to the margin (two one-sided tests).

    >>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [2.01, 1.99, 2.0]})
    >>> from ntkexp.claim.judge import judge_part
    >>> [judge_part(Equality(value=value, margin=0.1), table).verdict for value in (2.0, 3.0)]
    ['supported', 'refuted']
    """

    value: float
    margin: float = Field(gt=0)

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled(self.value), self.scaled_margin)

    @property
    def needs_reason(self) -> bool:
        return self.margin > EXACT_MARGIN

    @property
    def words(self) -> str:
        return f"{short(self.value)} ± {self.margin_words}"


class Order(AbstractAverage):
    """Order: figures at one level of a column are larger than at another,
    by more than the margin.

    The rule expects larger figures in rows that have the value `above` in the column
    `along` than in rows that have the value `below`. The two figures of each seed are
    compared (a paired test). Equal figures refute the order.

        linear   above − below > margin        log   above/below > 1 + margin

    >>> levels, seeds = ["left", "secant"] * 3, [0, 0, 1, 1, 2, 2]
    >>> table = pd.DataFrame({"rule": levels, "seed": seeds, "value": [5, 1, 6, 1, 5, 2]})
    >>> from ntkexp.claim.judge import judge_part
    >>> order = Order(along="rule", above="left", below="secant", margin=1.0)
    >>> judge_part(order, table).verdict
    'supported'
    """

    strict = True
    along: str
    above: Any
    below: Any

    # With scale: log, the null is the ratio 0, which every margin excludes.
    null = 0.0

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled_margin, 0.0, "lower")

    @property
    def needs_reason(self) -> bool:
        """False if the rule states only the direction of the difference."""
        return self.margin > 0

    @property
    def words(self) -> str:
        if self.is_log:
            return f"{self.above} > {short(1 + self.margin)} × {self.below}"
        return f"{self.above} − {self.below} > {short(self.margin)}"

    def averages(self, table: pd.DataFrame, keys: list[str]) -> pd.Series[float]:
        find_column(table, self.along, "along")
        above = super().averages(select_rows(table, {self.along: self.above}), keys)
        below = super().averages(select_rows(table, {self.along: self.below}), keys)
        differences: pd.Series[float] = (above - below).dropna()
        if len(differences) < max(len(above), len(below)):
            raise Mistake(
                f"along={self.along}: some seeds are only at {self.above} or only at "
                f"{self.below}, so they have no pair"
            )
        return differences


# --- Rules along an axis.


class Slope(AbstractExpectation):
    """Slope: a figure is a power of the axis `along`,
    with the exponent `value` up to the margin.

    With a `bound`, the exponent is at most (upper) or at least (lower) `value`. The
    exponent is fitted for each seed (`ntkexp.report.analysis.power_law`). If the
    log-log line is significantly curved, a note is added: the exponent then holds only
    for this range of the axis.

    >>> widths = [1.0, 2.0, 4.0] * 2
    >>> values = [1 / width for width in widths]
    >>> table = pd.DataFrame({"width": widths, "seed": [0, 0, 0, 1, 1, 1], "value": values})
    >>> from ntkexp.claim.judge import judge_part
    >>> judge_part(Slope(along="width", value=-1.0, margin=0.1), table).verdict
    'supported'
    """

    null = 0.0
    along: str
    value: float
    margin: float = Field(gt=0)
    bound: Literal["upper", "lower"] | None = None

    def contains(self, figure: float) -> bool:
        return self.expected.low < figure < self.expected.high

    @property
    def edges(self) -> tuple[float, ...]:
        return self.expected.edges

    @property
    def expected(self) -> Expected:
        return Expected(self.value, self.margin, self.bound)

    @property
    def words(self) -> str:
        return f"slope {limit(self.expected)} ± {short(self.margin)}"

    def evidence(self, table: pd.DataFrame) -> Interval:
        positions = find_column(table, self.along, "along").map(as_number)
        if positions.isna().any():
            raise Mistake(
                f"along: {self.along} is not a column of numbers, so figures have no slope along it"
            )
        refuse_several(table, self.along)
        x = np.asarray(positions, dtype=np.float64)
        y = np.asarray(table["value"], dtype=np.float64)
        if (x <= 0).any():
            raise Mistake(
                f"along={self.along}: a power law needs positions above 0, and there is "
                f"{short(float(x.min()))}; leave them out by `where`"
            )
        if (y <= 0).any():
            note = "some figures are not above 0, and have no logarithm"
            return Interval(Estimate(math.nan), self.expected, note=note)
        law = power_law(x, y, table["seed"].to_numpy(dtype=np.int64))
        note = ""
        if law.curved:
            note = f"the line bends, by {short(law.curvature.value)} per factor e"
        return Interval(law.exponent, self.expected, note=note)


def as_number(value: object) -> float:
    """Return a value of an axis as a float, or NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def refuse_several(table: pd.DataFrame, along: str) -> None:
    """Raise if a seed has two rows at the same position, which means that the table
    mixes several curves."""
    if table.duplicated([along, "seed"]).any():
        raise Mistake(
            f"along={along}: a seed has several rows at one position; choose a curve by `where`"
        )


class Location(AbstractExpectation):
    """Location: a figure is largest (or least) at the position `value` along an axis.

    The position is expected between value/(1 + margin) and value·(1 + margin). For each
    seed, the position is the vertex of a parabola through the extreme point and its two
    neighbours, on a logarithmic axis. If the extreme of any seed is at an end of the
    axis, or an end is equally high, the rule is undecided."""

    along: str
    value: float = Field(gt=0)
    margin: float = Field(gt=0)
    extreme: Literal["largest", "least"] = "largest"

    def contains(self, figure: float) -> bool:
        return (
            figure > 0 and self.expected.low < self.scaled(figure) < self.expected.high
        )

    @property
    def expected(self) -> Expected:
        return Expected(math.log(self.value), math.log1p(self.margin))

    @property
    def edges(self) -> tuple[float, ...]:
        return self.expected.edges

    def scaled(self, value: float) -> float:
        """Return the logarithm of a position."""
        if value <= 0:
            raise Mistake(f"{short(value)} is no position on a logarithmic axis")
        return math.log(value)

    @property
    def sign(self) -> int:
        return 1 if self.extreme == "largest" else -1

    @property
    def words(self) -> str:
        return f"{self.extreme} at {short(self.value)} ± {percent(self.margin)}"

    def evidence(self, table: pd.DataFrame) -> Interval:
        find_column(table, self.along, "along")
        refuse_several(table, self.along)
        locations = [self.locate(rows) for _, rows in table.groupby("seed", sort=True)]
        inside = [location for location in locations if not math.isnan(location)]
        doubt = ""
        if lost := len(locations) - len(inside):
            doubt = f"{lost} of {len(locations)} seeds have it at an end of the axis"
        return Interval(mean_of(inside), self.expected, log=True, doubt=doubt)

    def locate(self, rows: pd.DataFrame) -> float:
        """Return the logarithm of the position of one seed's extreme. Return NaN if the
        extreme is at an end of the axis."""
        ordered = rows.sort_values(self.along)
        x = ordered[self.along].to_numpy(dtype=float)
        if len(x) < 3 or (x <= 0).any():
            raise Mistake(
                f"along={self.along}: an extreme needs three positions or more, all above 0"
            )
        y = ordered["value"].to_numpy(dtype=float) * self.sign
        top = int(np.argmax(y))
        if y[top] in {y[0], y[-1]}:  # also if an end is equally high
            return math.nan
        neighbours = slice(top - 1, top + 2)
        return vertex(np.log(x[neighbours]), y[neighbours])


def vertex(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the x of the vertex of the parabola through three points. The middle point
    must be the highest.

    >>> x = np.array([0.0, 1.0, 3.0])
    >>> round(vertex(x, 2 * x - x**2), 6)
    1.0
    """
    # The slope of a parabola is linear in x. It equals the slope between two points at
    # their middle. Between the two middles, it falls to 0 after this share of the way.
    slope_before = (y[1] - y[0]) / (x[1] - x[0])
    slope_after = (y[2] - y[1]) / (x[2] - x[1])
    if slope_before == slope_after:
        return float(x[1])
    share = slope_before / (slope_before - slope_after)
    return float((x[0] + x[1]) / 2 + share * (x[2] - x[0]) / 2)
