"""What a claim expects of its figures, each a rule that judges a table: identity, slope, bound, order, and others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

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
from ntkexp.text import percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- What is expected of figures: which rows it speaks of, and what they say of it, for `ntkexp.claim.judge` to
# judge.
#
# A rule makes a table's rows, which have a `seed`, a `value` and where they lie, into evidence: a figure with its
# interval over seeds beside the range where it should lie, or errors beside their bounds. It decides nothing
# itself.


SEEDS = 5
"""Seeds of an invented table."""
ADDED = ("each", "within")


@dataclass(frozen=True)
class Interval:
    """A figure with its interval over seeds, beside the range where it should lie."""

    estimate: Estimate
    expected: Expected
    strict: bool = False  # whether the edges of the range are no part of it
    log: bool = False  # whether figure and range are logarithms of what is shown
    note: str = ""  # what else is said of the figure; where there is no interval, why
    doubt: str = ""  # why nothing may be concluded from the figure


@dataclass(frozen=True)
class Errors:
    """Errors beside their bounds: how many rows lie beyond."""

    beyond: int
    rows: int
    least: float  # the worst error of the best seed
    worst: float  # and of the worst


class AbstractExpectation(Component, ABC):
    """A rule says which figures support a claim; `where` chooses the rows it speaks of, by their columns.

    `each` names columns at every level of which the rule must hold by itself: opposite misses then do not cancel.
    """

    where: dict[str, Any] = Field(default_factory=dict)
    each: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The rule is plain data; what was added to rules after claims had been digested stands there if it is set."""
        return {
            name: value for name, value in super().fields().items() if value or name not in ADDED
        }

    @abstractmethod
    def evidence(self, table: pd.DataFrame) -> Interval | Errors:
        """What rows that all have a number say of what is expected."""

    def levels(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """The rows of each level at which it must hold by itself; all of them, where it is judged once."""
        if not self.each:
            return {"": rows}
        for key in self.each:
            find_column(rows, key, "each")
        return {
            ", ".join(f"{key}={value}" for key, value in zip(self.each, place, strict=True)): group
            for place, group in rows.groupby(list(self.each), sort=False, dropna=False)
        }

    null: ClassVar[float | None] = None
    """What is found where the claim does not hold, if the rule alone says that; a claim names its own (`null:`)."""

    @abstractmethod
    def contains(self, figure: float) -> bool:
        """Whether a figure lies within what is expected, and not at an edge of it."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What is expected, in a few words."""

    @property
    def whole_words(self) -> str:
        rows = ", ".join(f"{key}={value}" for key, value in self.where.items())
        words = f"{self.words} where {rows}" if rows else self.words
        return f"{words} at each {' and '.join(self.each)}" if self.each else words

    @abstractmethod
    def invent(
        self, offset: float, generator: np.random.Generator, seeds: int = SEEDS
    ) -> pd.DataFrame:
        """Invent a table whose truth is at this offset: −1 well inside what is expected, 0 at its edge, 1 outside."""

    @abstractmethod
    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        """Draw the rows that it speaks of, seed by seed."""

    @abstractmethod
    def mark(self, axes: Axes) -> None:
        """Mark what is expected, and name the axes."""

    @property
    def places(self) -> tuple[float, ...]:
        """Truths at which the rule is tried."""
        return (-1.0, 0.0, 1.0)


def select_rows(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Choose the rows with these values; a list of values chooses all of them.

    >>> select_rows(pd.DataFrame({"depth": [1, 2, 3], "value": [4.0, 5.0, 6.0]}), {"depth": [1, 3]})["value"].tolist()
    [4.0, 6.0]
    """
    for key, chosen in where.items():
        column = find_column(table, key, "where")
        levels = [level(value) for value in (chosen if isinstance(chosen, list) else [chosen])]
        if not column.isin(levels).any():
            there = ", ".join(map(str, dict.fromkeys(column.tolist())))
            raise Mistake(f"where: no row has {key}={chosen}; there are {there}")
        table = table[column.isin(levels)]
    return table


def find_column(table: pd.DataFrame, key: str, field: str) -> pd.Series[Any]:
    names = [str(name) for name in table if name != "value"]
    if key not in names:
        raise Mistake(
            f"{field}: the table has no column {key}; it has {', '.join(names)}{nearest(key, names)}"
        )
    return table[key]


ZERO = 1e-18
"""Errors below are drawn here: zero has no logarithm."""


class Identity(AbstractExpectation):
    """Identity: every error lies under its bound, the row's own where the table has a column `bound`.

    Errors are at most `tolerance`, or what their rows say is explained by rounding, if that is more.

    One row beyond refutes it: this is no matter of chance, and the interval reaches from the best seed to the
    worst.

    >>> table = pd.DataFrame({"seed": [0, 1], "value": [3e-15, 4e-15], "bound": [1e-12, 1e-12]})
    >>> Identity().evidence(table).beyond, Identity().evidence(table.assign(bound=1e-16)).beyond
    (0, 2)

    An error that is no number lies under no bound, and a bound without end, as that of a singular kernel, explains
    nothing.

    >>> Identity().evidence(table.assign(bound=math.inf)).beyond, Identity().evidence(table * math.nan).beyond
    (2, 2)
    """

    null: ClassVar[float | None] = math.inf
    tolerance: float = Field(1e-12, gt=0)

    def contains(self, figure: float) -> bool:
        return abs(figure) < self.tolerance

    @property
    def words(self) -> str:
        return f"every error ≤ {short(self.tolerance)}, or its row's rounding"

    @property
    def places(self) -> tuple[float, ...]:
        """Chance has no part in it, so there is no edge at which it is undecided."""
        return (-1.0, 1.0)

    def evidence(self, table: pd.DataFrame) -> Errors:
        bounds = table["bound"].astype(float) if "bound" in table else self.tolerance
        errors = table["value"].abs()
        worst = errors.groupby(table["seed"]).max()
        under = (errors <= bounds) & np.isfinite(bounds)
        return Errors(int((~under).sum()), len(table), float(worst.min()), float(worst.max()))

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        errors = np.sort(np.maximum(table["value"].abs().to_numpy(dtype=float), ZERO))
        axes.plot(np.arange(1, len(errors) + 1) / len(errors), errors, "o", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "y")
        axes.axhline(self.tolerance, color=VERMILION, linewidth=0.8, linestyle="--")
        axes.set(xlabel="share of rows with a smaller error", ylabel="error")

    def invent(
        self, offset: float, generator: np.random.Generator, seeds: int = SEEDS
    ) -> pd.DataFrame:
        """Invent errors below the bound; outside, one of them is ten times above it."""
        values = self.tolerance * 10 ** -generator.uniform(0.01, 4, 10 * seeds)
        if offset > 0:
            values[generator.integers(len(values))] = 10 * self.tolerance
        return pd.DataFrame({"seed": np.arange(len(values)) % seeds, "value": values})


# --- One figure per seed, averaged over seeds: on its own scale, or by logarithms, where margins are shares.
#
# linear   value ± margin                log   value/(1 + margin) … value·(1 + margin)


TOGETHER = {"mean": "mean", "least": "min", "largest": "max"}


class AbstractAverage(AbstractExpectation):
    """Rows of a seed are put together into its figure: their mean, the least, or the largest of them.

    Figures that lie `within` two ends, as shares and correlations do, have an interval that lies there too.
    """

    strict: ClassVar[bool] = (
        False  # whether a figure at the edge of what is expected is none that was expected
    )
    margin: float = Field(ge=0)
    scale: Literal["linear", "log"] = "linear"
    rows: Literal["mean", "least", "largest"] = "mean"
    within: tuple[float, float] | None = None

    @model_validator(mode="after")
    def refuse_ends(self) -> Self:
        """The ends are a lower and an upper one, of figures as they are."""
        if self.within is not None and (self.scale == "log" or not self.within[0] < self.within[1]):
            raise Mistake(
                f"within={list(self.within)}: give the lower end, then the upper one, with scale: linear"
            )
        return self

    @property
    @abstractmethod
    def expected(self) -> Expected:
        """The range that is expected, on the scale."""

    def contains(self, figure: float) -> bool:
        if self.scale == "log" and figure <= 0:
            return self.expected.low == -math.inf
        return self.expected.low < self.scaled(figure) < self.expected.high

    def figures(self, table: pd.DataFrame) -> list[float]:
        return self.per_seed(table).tolist()

    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        """Make a table in which seeds have these figures."""
        return pd.DataFrame({"seed": range(len(figures)), "value": figures})

    def evidence(self, table: pd.DataFrame) -> Interval:
        figures = self.figures(table)
        if self.within is not None and figures:
            beyond = next(
                (figure for figure in figures if not self.within[0] <= figure <= self.within[1]),
                None,
            )
            if beyond is not None:
                raise Mistake(
                    f"within={list(self.within)}: a seed's figure is {short(beyond)}; give ends that hold it"
                )
        estimate = replace(mean_of(figures), within=self.within)
        return Interval(estimate, self.expected, strict=self.strict, log=self.scale == "log")

    def scaled(self, value: float) -> float:
        """A number of the configuration, on the scale."""
        if self.scale == "log" and value <= 0:
            raise Mistake(f"{value} has no logarithm; it takes numbers above 0 with scale: log")
        return math.log(value) if self.scale == "log" else value

    @property
    def reach(self) -> float:
        return math.log1p(self.margin) if self.scale == "log" else self.margin

    def per_seed(self, table: pd.DataFrame) -> pd.Series[float]:
        """Put the rows of each seed together."""
        values = table["value"].astype(float)
        if self.scale == "log":
            if (values <= 0).any():
                raise Mistake(
                    "scale: log takes figures above 0, and some are not; write scale: linear"
                )
            values = values.map(math.log)
        found: pd.Series[float] = values.groupby(table["seed"]).agg(TOGETHER[self.rows])
        return found

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        figures = np.array(self.figures(table))
        shown = np.exp(figures) if self.scale == "log" else figures
        mean = math.exp(figures.mean()) if self.scale == "log" else figures.mean()
        axes.plot(range(len(shown)), shown, "o", color=colour, zorder=3)
        axes.axhline(mean, color=colour, linewidth=0.8, zorder=2)

    def mark(self, axes: Axes) -> None:
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        if self.scale == "log":
            log_axis(axes, "y")
        low, high = axes.get_ylim()
        ends = [
            math.exp(end) if self.scale == "log" else end
            for end in (self.expected.low, self.expected.high)
        ]
        # An open end of the band lies at the edge of the picture, or at the band's other end if that is farther out.
        finite = [end for end in ends if math.isfinite(end) and end != 0]
        band = np.clip(ends, min([low, *finite]), max([high, *finite]))
        axes.axhspan(*band, color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
        axes.set(xlabel="seed", ylabel=self.label, xticks=[])

    @property
    def label(self) -> str:
        return "figure of a seed"

    def invent(
        self, offset: float, generator: np.random.Generator, seeds: int = SEEDS
    ) -> pd.DataFrame:
        """Invent figures of seeds; the unit is the margin, or 1 where there is none."""
        expected, unit = self.expected, self.reach or 1.0
        edge, outwards = (expected.low, -1.0) if expected.bound == "lower" else (expected.high, 1.0)
        truth = (
            expected.value
            if offset < 0 and expected.bound is None
            else edge + outwards * offset * unit
        )
        figures = truth + 0.4 * unit * generator.standard_normal(seeds)
        return self.table_of(np.exp(figures) if self.scale == "log" else figures)


class Bound(AbstractAverage):
    """Bound: the mean over seeds is at most, or at least, a limit, and the margin is allowed for.

    The mean of the figures lies on one side of `limit`: `upper` bounds it from above.

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
        return Expected(self.scaled(self.limit), self.reach, self.side)

    @property
    def words(self) -> str:
        margin = percent(self.margin) if self.scale == "log" else short(self.margin)
        return f"{'≤' if self.side == 'upper' else '≥'} {short(self.limit)} ± {margin}"


class Equality(AbstractAverage):
    """Equality: the mean over seeds is a value, to within a margin (equivalence by two one-sided tests).

    The mean of the figures equals `value`.

    >>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [2.01, 1.99, 2.0]})
    >>> from ntkexp.claim.judge import judge_part
    >>> [judge_part(Equality(value=value, margin=0.1), table).verdict for value in (2.0, 3.0)]
    ['supported', 'refuted']
    """

    value: float
    margin: float = Field(gt=0)

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled(self.value), self.reach)

    @property
    def words(self) -> str:
        return f"{short(self.value)} ± {percent(self.margin) if self.scale == 'log' else short(self.margin)}"


class Order(AbstractAverage):
    """Order: figures at one level lie above those at another of the same seed, by more than the margin.

    Where the column `along` is `above`, figures are larger than where it is `below`: as large is not enough.

        linear   above − below > margin        log   above/below > 1 + margin

    >>> table = pd.DataFrame({"rule": ["left", "secant"] * 3, "seed": [0, 0, 1, 1, 2, 2], "value": [5, 1, 6, 1, 5, 2]})
    >>> from ntkexp.claim.judge import judge_part
    >>> judge_part(Order(along="rule", above="left", below="secant", margin=1.0), table).verdict
    'supported'
    """

    strict: ClassVar[bool] = True
    along: str
    above: Any
    below: Any

    null: ClassVar[float | None] = 0.0  # with logarithms, no ratio is so far from what is expected

    @property
    def expected(self) -> Expected:
        return Expected(self.reach, 0.0, "lower")

    @property
    def words(self) -> str:
        if self.scale == "log":
            return f"{self.above} > {short(1 + self.margin)} × {self.below}"
        return f"{self.above} − {self.below} > {short(self.margin)}"

    @property
    def label(self) -> str:
        return f"{self.above} {'/' if self.scale == 'log' else '−'} {self.below}"

    def figures(self, table: pd.DataFrame) -> list[float]:
        find_column(table, self.along, "along")
        above, below = (
            self.per_seed(select_rows(table, {self.along: one})) for one in (self.above, self.below)
        )
        differences = (above - below).dropna()
        if len(differences) < max(len(above), len(below)):
            raise Mistake(
                f"along={self.along}: some seeds are at {self.above} or {self.below} alone, and have no pair"
            )
        return differences.tolist()

    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        base = np.ones_like(figures)
        above = base * figures if self.scale == "log" else base + figures
        seeds = [*range(len(figures))] * 2
        levels = [self.above] * len(figures) + [self.below] * len(figures)
        return pd.DataFrame({self.along: levels, "seed": seeds, "value": [*above, *base]})


PLACES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Slope(AbstractExpectation):
    """Slope: a figure is a power of an axis, with this exponent, to within a margin; or bounded by it from one side.

    The slope of log figure against log `along` is `value`; with a bound, at most (upper) or at least (lower).

    Seeds have an exponent each (`ntkexp.report.analysis.estimate`). A line that bends has a slope over its range
    alone, which is said.

    >>> widths = [1.0, 2.0, 4.0] * 2
    >>> table = pd.DataFrame({"width": widths, "seed": [0, 0, 0, 1, 1, 1], "value": [1 / w for w in widths]})
    >>> from ntkexp.claim.judge import judge_part
    >>> judge_part(Slope(along="width", value=-1.0, margin=0.1), table).verdict
    'supported'
    """

    null: ClassVar[float | None] = 0.0
    along: str
    value: float
    margin: float = Field(gt=0)
    bound: Literal["upper", "lower"] | None = None

    def contains(self, figure: float) -> bool:
        return self.expected.low < figure < self.expected.high

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
        values = np.asarray(table["value"], dtype=np.float64)
        if (values <= 0).any():
            none = "some figures are not above 0, and have no logarithm"
            return Interval(Estimate(math.nan), self.expected, note=none)
        law = power_law(
            np.asarray(positions, dtype=np.float64), values, table["seed"].to_numpy(dtype=np.int64)
        )
        bends = (
            f"the line bends, by {short(law.curvature.value)} per factor e" if law.curved else ""
        )
        return Interval(law.exponent, self.expected, note=bends)

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        draw_seeds(axes, table, self.along, colour)
        positive = table[table["value"] > 0]
        logs = positive["value"].astype(float).map(math.log).groupby(positive[self.along]).mean()
        axes.plot(logs.index, logs.map(math.exp), "o", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        """Draw the slope that is expected through the middle of the picture."""
        from ntkexp.report.plots.style import VERMILION, End, log_axis, name_ends, tick  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "x")
        log_axis(axes, "y")
        for line in axes.get_lines():
            tick(axes, sorted({float(x) for x in np.asarray(line.get_xdata(), dtype=float)}))
        points = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
        if points:
            x = np.asarray(points[-1].get_xdata(), dtype=float)
            y = np.asarray(points[-1].get_ydata(), dtype=float)
            heights = np.exp(np.log(y).mean()) * (x / np.exp(np.log(x).mean())) ** self.value
            axes.plot(x, heights, "--", color=VERMILION, linewidth=0.8, zorder=2)
            name_ends(
                axes, [End(f"expected {limit(self.expected)}", float(heights[-1]), VERMILION)]
            )
        axes.set(xlabel=self.along, ylabel="figure")

    def invent(
        self, offset: float, generator: np.random.Generator, seeds: int = SEEDS
    ) -> pd.DataFrame:
        """Invent seeds with slopes of their own, and noise at each place."""
        sign = -1.0 if self.bound == "lower" else 1.0
        middle = self.value if self.bound is None else self.value - sign * self.margin
        truth = middle if offset < 0 else self.value + sign * self.margin * (1 + 1.5 * offset)
        slopes = truth + 0.3 * self.margin * generator.standard_normal((seeds, 1))
        heights = generator.standard_normal((seeds, 1))
        noise = 0.3 * self.margin * generator.standard_normal((seeds, len(PLACES)))
        values = np.exp(heights + slopes * np.log(PLACES) + noise)
        rows = {self.along: [*PLACES] * seeds, "seed": np.repeat(np.arange(seeds), len(PLACES))}
        return pd.DataFrame({**rows, "value": values.ravel()})


def draw_seeds(axes: Axes, table: pd.DataFrame, along: str, colour: str) -> None:
    for _, seed in table.sort_values(along).groupby("seed"):
        axes.plot(seed[along], seed["value"], color=colour, alpha=0.25, linewidth=0.8, zorder=1)


def as_number(value: object) -> float:
    """Take a value on an axis as a number; NaN if it is none."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else float("nan")
    )


def refuse_several(table: pd.DataFrame, along: str) -> None:
    """Refuse rows among which one seed lies twice at a place: they belong to several lines."""
    if table.duplicated([along, "seed"]).any():
        raise Mistake(
            f"along={along}: a seed has several rows at one place; choose a line by `where`"
        )


class Location(AbstractExpectation):
    """Location: where along an axis a figure is largest (or least), as a share of where it should be.

    The figure has its extreme along `along` at `value`, up to the share `margin`.

        log place of seed = the top of the parabola through the extreme point and its neighbours, in log axis
        expected: value/(1 + margin) … value·(1 + margin)

    A seed whose extreme lies at an end of the axis has not been located, and then nothing is decided.
    """

    along: str
    value: float = Field(gt=0)
    margin: float = Field(gt=0)
    extreme: Literal["largest", "least"] = "largest"

    def contains(self, figure: float) -> bool:
        return figure > 0 and self.expected.low < math.log(figure) < self.expected.high

    @property
    def expected(self) -> Expected:
        return Expected(math.log(self.value), math.log1p(self.margin))

    @property
    def words(self) -> str:
        return f"{self.extreme} at {short(self.value)} ± {percent(self.margin)}"

    def evidence(self, table: pd.DataFrame) -> Interval:
        find_column(table, self.along, "along")
        refuse_several(table, self.along)
        locations = [self.locate(rows) for _, rows in table.groupby("seed", sort=True)]
        finite = [location for location in locations if not math.isnan(location)]
        lost = len(locations) - len(finite)
        doubt = f"{lost} of {len(locations)} seeds have it at an end of the axis" if lost else ""
        return Interval(mean_of(finite), self.expected, log=True, doubt=doubt)

    def locate(self, rows: pd.DataFrame) -> float:
        """Locate the extreme of one seed, as the logarithm of its place; NaN at an end."""
        ordered = rows.sort_values(self.along)
        x = ordered[self.along].to_numpy(dtype=float)
        if len(x) < 3 or (x <= 0).any():
            raise Mistake(
                f"along={self.along}: an extreme is located among three positive places or more"
            )
        y = ordered["value"].to_numpy(dtype=float) * (1 if self.extreme == "largest" else -1)
        top = int(np.argmax(y))
        return (
            math.nan
            if top in {0, len(y) - 1}
            else vertex(np.log(x[top - 1 : top + 2]), y[top - 1 : top + 2])
        )

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        draw_seeds(axes, table, self.along, colour)
        means = table.set_index(self.along)["value"].astype(float).groupby(level=0).mean()
        axes.plot(means.index, means, "o-", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "x")
        low, high = math.exp(self.expected.low), math.exp(self.expected.high)
        axes.axvspan(low, high, color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
        axes.set(xlabel=self.along, ylabel="figure")

    def invent(
        self, offset: float, generator: np.random.Generator, seeds: int = SEEDS
    ) -> pd.DataFrame:
        """Invent a hump for each seed, somewhere around the truth."""
        centre, reach = self.expected.value, self.expected.margin
        truth = centre if offset < 0 else centre + reach * (1 + 1.5 * offset)
        tops = truth + 0.4 * reach * generator.standard_normal((seeds, 1))
        x = centre + reach * np.arange(-6, 11)
        sign = 1 if self.extreme == "largest" else -1
        values = sign * np.exp(-(((x - tops) / (3 * reach)) ** 2))
        rows = {self.along: np.tile(np.exp(x), seeds), "seed": np.repeat(np.arange(seeds), len(x))}
        return pd.DataFrame({**rows, "value": values.ravel()})


def vertex(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Find the vertex of the parabola through three points, of which the middle one is highest.

    >>> round(vertex(np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, -3.0])), 6)  # y = 2x − x²
    1.0
    """
    before, after = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if before == after:
        return float(x[1])
    share = before / (before - after)
    return float((x[0] + x[1]) / 2 + share * (x[2] - x[0]) / 2)
