"""What a claim measures of its runs, rows with a `value` each: columns of a table, alone or together, and crossings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

# --- What was measured for one look at a claim: a table with a row for each run, or for each row of a trial.
#
# runs    the name of the runs among those of the claim; of a trial: `trial` run     the folder of the run
# seed, and the axes of the runs, and every number that a run yields


HEAD = ("runs", "run", "seed", "state", "reason")


@dataclass(frozen=True)
class Measured:
    """The table, the runs behind it that could be read, by the names of their folders, and what a seed draws."""

    table: pd.DataFrame
    known: Mapping[str, Run]
    axes: tuple[str, ...] = ()
    draws: str = ""

    @property
    def numbers(self) -> list[str]:
        names = [str(name) for name in self.table if name not in (*HEAD, *self.axes)]
        return [name for name in names if pd.api.types.is_numeric_dtype(self.table[name])]

    def by_run(
        self, measure: Callable[[Run], Mapping[str, float]], names: Sequence[str]
    ) -> pd.DataFrame:
        """Measure each run; a row for each of these numbers, told apart by the column `quantity`, NaN of no run."""
        runs = [self.known.get(name) for name in self.table["run"]]
        numbers = [dict.fromkeys(names, math.nan) if run is None else measure(run) for run in runs]
        parts = [
            self.table.assign(quantity=name, value=[row[name] for row in numbers]) for name in names
        ]
        return pd.concat(parts, ignore_index=True)


# --- What a claim measures of its runs: rows with a `value` each, from which an expectation is judged.


class AbstractQuantity(Component, ABC):
    """A named function of what was measured."""

    role: ClassVar[str] = "ntkexp.claim.quantity"
    """Digests know a quantity of this package by its role and its class, in whichever file that stands."""

    @abstractmethod
    def of(self, measured: Measured) -> pd.DataFrame:
        """Make a table with the columns `seed` and `value`, and those by which rows are told apart.

        A row that should have a number and has none is NaN, and then nothing is decided; what does not apply is left
        out. A column `bound` is what rounding alone explains of a row's error.
        """

    def refuse_early(self) -> None:
        """Refuse what can be known to be no number of a run, before any is begun."""


class Column(AbstractQuantity):
    """A column of the table, as it stands: a number of each run (`report.analysis.quantities`), or of a trial's rows.

    Rows have the number that stands in this column.

    quantity: drift        is short for        quantity: {_target_: ntkexp.claim.quantity.Column, column: drift}
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
            f"quantity: the runs yield no {name}; they yield {', '.join(columns)}{nearest(name, columns)}"
        )
    return measured.table[name].astype(float)


def stacked(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Tables below each other, told apart by `quantity`; runs that were not asked for a quantity have no row of it."""
    table = pd.concat(
        [each.assign(quantity=name) for name, each in tables.items()], ignore_index=True
    )
    has_values = table.groupby(["runs", "quantity"])["value"].transform("count") > 0
    return table[has_values].reset_index(drop=True)


class Columns(AbstractQuantity):
    """Several columns below each other: a row for each, told apart by the column `quantity`.

    Rows have the numbers of these columns, one after the other.

    Runs that were not asked for a number, such as the errors of a machine that reads another rule, have no row of
    it.
    """

    columns: tuple[str, ...] = Field(min_length=2)

    def refuse_early(self) -> None:
        for name in self.columns:
            describe(name)

    def of(self, measured: Measured) -> pd.DataFrame:
        table = measured.table
        return stacked(
            {
                name: table.assign(quantity=name, value=column_numbers(measured, name))
                for name in self.columns
            }
        )


class Together(AbstractQuantity):
    """Several quantities below each other, told apart by the column `quantity`, which holds the name that each is
    given.

    Rows have the numbers of these quantities, each of the runs that have any of it.
    """

    names: tuple[str, ...] = Field(min_length=1)
    parts: tuple[AbstractQuantity, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every part has a name of its own."""
        refuse_unnamed("quantity.names", self.names, "parts", self.parts)
        return self

    def of(self, measured: Measured) -> pd.DataFrame:
        return stacked(
            {name: part.of(measured) for name, part in zip(self.names, self.parts, strict=True)}
        )

    def refuse_early(self) -> None:
        for part in self.parts:
            part.refuse_early()


class Crossing(AbstractQuantity):
    """Where along an axis a figure crosses a level: the place on the straight line, in logarithms, between the
    neighbours around it. Rows have one place for each seed and each value of the column `by`.

    Rows have the place along `along` where the column is `level`.

        log place = log x₀ + (log level − log y₀) (log x₁ − log x₀)/(log y₁ − log y₀)

    A figure that does not cross the level, or more than once, has no place: the row is NaN.
    """

    column: str
    along: str
    by: str
    level: float = Field(1.0, gt=0)

    def of(self, measured: Measured) -> pd.DataFrame:
        table = measured.table
        for key, name in (("along", self.along), ("by", self.by)):
            if name not in table:
                raise Mistake(
                    f"quantity.{key}: the table has no column {name}{nearest(name, map(str, table))}"
                )
        figures = table.assign(figure=column_numbers(measured, self.column))
        figures = figures[figures[self.along].notna()]
        rows = [
            {"runs": runs, "seed": seed, self.by: by, "value": self.place(group)}
            for (runs, seed, by), group in figures.groupby(["runs", "seed", self.by], sort=True)
        ]
        return pd.DataFrame(rows)

    def place(self, group: pd.DataFrame) -> float:
        """The place of one seed at one value of `by`."""
        ordered = group.sort_values(self.along)
        x, y = (ordered[name].to_numpy(dtype=np.float64) for name in (self.along, "figure"))
        return math.nan if (x <= 0).any() or not (y > 0).all() else crossing(x, y, self.level)


def crossing(x: NDArray[np.float64], y: NDArray[np.float64], level: float) -> float:
    """Find the place.

    >>> round(crossing(np.array([1.0, 2.0, 8.0]), np.array([4.0, 2.0, 0.5]), 1.0), 12)  # y = 4/x
    4.0
    """
    log_x, log_y = np.log(x), np.log(y / level)
    changes = np.flatnonzero((log_y[:-1] >= 0) != (log_y[1:] >= 0))
    if len(changes) != 1:
        return math.nan
    k = int(changes[0])
    return float(
        np.exp(log_x[k] - log_y[k] * (log_x[k + 1] - log_x[k]) / (log_y[k + 1] - log_y[k]))
    )
