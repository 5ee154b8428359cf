"""Quantities: the numbers that a claim measures,
computed from its runs or from its trial.

A quantity returns a table with a row per number and the columns `seed` and `value`. The
rules of a claim (`ntkexp.claim.expectation`) judge such tables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ntkexp.claim.trial import refuse_unnamed
from ntkexp.component import Component
from ntkexp.mistake import Mistake, nearest
from ntkexp.report.analysis.quantities import describe
from ntkexp.report.run import Run

HEAD_COLUMNS = ("runs", "run", "seed", "state", "reason")
"""Columns that hold no measurement. The column `runs` holds the name
of the sweep, or `trial`."""

DIGEST_DIGITS = 10
"""The number of hexadecimal digits that identify an example. Two of 1,000 examples have
the same digits with probability 5e-7."""


@dataclass(frozen=True)
class Measured:
    """The measurements for one statistical test (look) of a claim.

    Attributes:
        table: A row per run or per row of the trial. Its columns are `runs`, `seed`,
            the axes of the sweeps, and the measured numbers.
        known: The finished runs, by the names of their folders.
        axes: The axes of the sweeps.
        draws: A text that says what a seed draws at random, such as data or weights.
    """

    table: pd.DataFrame
    known: Mapping[str, Run]
    axes: tuple[str, ...] = ()
    draws: str = ""

    @property
    def numbers(self) -> list[str]:
        """The columns that hold measured numbers."""
        names = [
            str(name) for name in self.table if name not in (*HEAD_COLUMNS, *self.axes)
        ]
        return [
            name for name in names if pd.api.types.is_numeric_dtype(self.table[name])
        ]

    @property
    def runs(self) -> list[Run | None]:
        """The run of each row of the table, or None if the run has no result."""
        return [self.known.get(folder) for folder in self.table["run"]]

    def per_run(self, measure: Callable[[Run], float]) -> pd.DataFrame:
        """Apply `measure` to each run, and return the table with its results. A missing
        run gives NaN."""
        values = [math.nan if run is None else measure(run) for run in self.runs]
        return self.table.assign(value=values)

    def by_run(
        self, measure: Callable[[Run], Mapping[str, float]], names: Sequence[str]
    ) -> pd.DataFrame:
        """Apply `measure` to each run, and return a table with a row for each run and
        each of the `names`. A missing run gives NaN."""
        missing = dict.fromkeys(names, math.nan)
        numbers = [missing if run is None else measure(run) for run in self.runs]
        parts = []
        for name in names:
            values = [row[name] for row in numbers]
            parts.append(self.table.assign(quantity=name, value=values))
        return pd.concat(parts, ignore_index=True)


def example_ids(inputs: NDArray[np.generic]) -> list[int]:
    """Return a number for each example, for the column `example` of a table.

    The numbers are digests of the inputs, which must not be standardised yet. So an
    example of a fixed data set has the same number for every seed, and generated
    examples have different numbers.

    >>> example_ids(np.array([[0.0, 1.0], [2.0, 3.0]])) == example_ids(np.array([[0.0, 1.0], [2.0, 4.0]]))
    False
    """
    rows = np.ascontiguousarray(inputs)
    return [int(sha256(row.tobytes()).hexdigest()[:DIGEST_DIGITS], 16) for row in rows]


class AbstractQuantity(Component, ABC):
    """A function from the measurements to a table of numbers."""

    role: ClassVar[str] = "ntkexp.claim.quantity"
    """The module name that digests contain for classes of `ntkexp.claim.papers`. The
    name stays the same if a class moves to another file."""

    @abstractmethod
    def of(self, measured: Measured) -> pd.DataFrame:
        """Return a table with the columns `seed` and `value`,
        and columns that label the rows.

        If a number is missing, it is NaN, and the look is undecided. If the quantity is
        not defined for a run, the run has no row. An optional column `bound` holds the
        rounding error of each row."""

    def refuse_early(self) -> None:
        """Raise before any run starts, if the runs cannot yield the quantity."""


class Column(AbstractQuantity):
    """A column of the table: a number of each run (`report.analysis.quantities`) or of
    a trial.

    The result has the rows of the table, and this number as `value`.

    In the file of a claim, `quantity: kernel_change` is short for
    `quantity: {_target_: ntkexp.claim.quantity.Column, column: kernel_change}`.
    """

    column: str

    def refuse_early(self) -> None:
        describe(self.column)

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(value=column_numbers(measured, self.column))


def column_numbers(measured: Measured, name: str) -> pd.Series[float]:
    columns = measured.numbers
    if name not in columns:
        raise Mistake(
            f"quantity: the runs yield no {name}; they yield {', '.join(columns)}"
            f"{nearest(name, columns)}"
        )
    return measured.table[name].astype(float)


def stacked(tables: Mapping[str, pd.DataFrame], measured: Measured) -> pd.DataFrame:
    """Stack tables. The column `quantity` holds the name of the table of each row.

    If a quantity is NaN in all rows of a sweep, omit these rows, because the sweep does
    not measure it. Keep them if the sweep has no number at all, because its runs
    diverged.
    """
    named = [table.assign(quantity=name) for name, table in tables.items()]
    table = pd.concat(named, ignore_index=True)
    has_values = table.groupby(["runs", "quantity"])["value"].transform("count") > 0
    counts = measured.table.groupby("runs")[measured.numbers].count().sum(axis=1)
    is_empty = table["runs"].isin(counts.index[counts == 0])
    return table[has_values | is_empty].reset_index(drop=True)


class Columns(AbstractQuantity):
    """Several columns, stacked. The column `quantity` holds the name of each.

    There is a row for each run and column. A sweep that does not measure a column has
    no rows for it. For example, a sweep with one path rule has no
    error of other path rules."""

    columns: tuple[str, ...] = Field(min_length=2)

    def refuse_early(self) -> None:
        for name in self.columns:
            describe(name)

    def of(self, measured: Measured) -> pd.DataFrame:
        tables = {name: Column(column=name).of(measured) for name in self.columns}
        return stacked(tables, measured)


class Together(AbstractQuantity):
    """Several quantities, stacked. The column `quantity` holds the name of each.

    A sweep that does not measure a quantity has no rows for it."""

    names: tuple[str, ...] = Field(min_length=1)
    parts: tuple[AbstractQuantity, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        refuse_unnamed("quantity.names", self.names, "parts", self.parts)
        return self

    def of(self, measured: Measured) -> pd.DataFrame:
        named = zip(self.names, self.parts, strict=True)
        return stacked({name: part.of(measured) for name, part in named}, measured)

    def refuse_early(self) -> None:
        for part in self.parts:
            part.refuse_early()


class Crossing(AbstractQuantity):
    """The position along an axis where a measured number crosses a level.

    There is one row for each sweep, each seed and each value of the column `by`. It
    holds the position x on the axis `along` where the value y of `column` crosses
    `level`. The position is interpolated between its neighbours x₀ and x₁ with the
    values y₀ and y₁, linearly in logarithms:

        log x = log x₀ + (log level − log y₀) (log x₁ − log x₀)/(log y₁ − log y₀)

    The position is NaN if y never crosses the level, or crosses it more than once, or
    if some x or y is not positive."""

    column: str
    along: str
    by: str
    level: float = Field(1.0, gt=0)

    def of(self, measured: Measured) -> pd.DataFrame:
        table = measured.table
        for key, name in (("along", self.along), ("by", self.by)):
            if name not in table:
                raise Mistake(
                    f"quantity.{key}: the table has no column {name}"
                    f"{nearest(name, map(str, table))}"
                )
        figures = table.assign(figure=column_numbers(measured, self.column))
        figures = figures[figures[self.along].notna()]
        curves = figures.groupby(["runs", "seed", self.by], sort=True)
        rows = [
            {"runs": runs, "seed": seed, self.by: by, "value": self.position(curve)}
            for (runs, seed, by), curve in curves
        ]
        return pd.DataFrame(rows)

    def position(self, curve: pd.DataFrame) -> float:
        ordered = curve.sort_values(self.along)
        x = ordered[self.along].to_numpy(dtype=np.float64)
        y = ordered["figure"].to_numpy(dtype=np.float64)
        if (x <= 0).any() or not (y > 0).all():
            return math.nan
        return crossing(x, y, self.level)


def crossing(x: NDArray[np.float64], y: NDArray[np.float64], level: float) -> float:
    """Return the x where y crosses the level,
    or NaN unless there is exactly one such x.

    >>> round(crossing(np.array([1.0, 2.0, 8.0]), np.array([4.0, 2.0, 0.5]), 1.0), 12)  # y = 4/x
    4.0
    """
    log_x = np.log(x)
    log_y = np.log(y / level)
    changes = np.flatnonzero((log_y[:-1] >= 0) != (log_y[1:] >= 0))
    if len(changes) != 1:
        return math.nan
    k = int(changes[0])
    run = log_x[k + 1] - log_x[k]
    rise = log_y[k + 1] - log_y[k]
    return float(np.exp(log_x[k] - log_y[k] * run / rise))
