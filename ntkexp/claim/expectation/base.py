"""What is expected of figures: which rows it speaks of, and what they say of it, for `ntkexp.claim.judge` to judge.

A rule makes a table's rows, which have a `seed`, a `value` and where they lie, into evidence: a figure with its
interval over seeds beside the range where it should lie, or errors beside their bounds. It decides nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.component import Component
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.sweep import Expected, level
from ntkexp.report.analysis.estimate import Estimate
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SEEDS = 5
"""Seeds of an invented table."""


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
    """A rule says which figures support a claim; `where` chooses the rows it speaks of, by their columns."""

    where: dict[str, Any] = Field(default_factory=dict)

    @abstractmethod
    def evidence(self, table: pd.DataFrame) -> Interval | Errors:
        """What rows that all have a number say of what is expected."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What is expected, in a few words."""

    @property
    def whole_words(self) -> str:
        """What is expected of which rows."""
        rows = ", ".join(f"{key}={value}" for key, value in self.where.items())
        return f"{self.words} where {rows}" if rows else self.words

    @abstractmethod
    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent a table whose truth is at this place: −1 well inside what is expected, 0 at its edge, 1 outside."""

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
    for key, wanted in where.items():
        known = find_column(table, key, "where")
        values = [level(value) for value in (wanted if isinstance(wanted, list) else [wanted])]
        if not known.isin(values).any():
            raise Mistake(f"where: no row has {key}={wanted}; there are {listing(known)}")
        table = table[known.isin(values)]
    return table


def find_column(table: pd.DataFrame, key: str, field: str) -> pd.Series[Any]:
    """Find a column that a field names."""
    names = [str(name) for name in table if name != "value"]
    if key not in names:
        raise Mistake(f"{field}: the table has no column {key}; it has {', '.join(names)}{nearest(key, names)}")
    return table[key]


def listing(values: pd.Series[Any]) -> str:
    """List the values of a column."""
    return ", ".join(map(str, dict.fromkeys(values.tolist())))


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
    """

    tolerance: float = Field(1e-12, gt=0)

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
        return Errors(int((errors > bounds).sum()), len(table), float(worst.min()), float(worst.max()))

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        errors = np.sort(np.maximum(table["value"].abs().to_numpy(dtype=float), ZERO))
        axes.plot(np.arange(1, len(errors) + 1) / len(errors), errors, "o", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        """Draw the tolerance."""
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "y")
        axes.axhline(self.tolerance, color=VERMILION, linewidth=0.8, linestyle="--")
        axes.set(xlabel="share of rows with a smaller error", ylabel="error")

    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent errors below the bound; outside, one of them is ten times above it."""
        values = self.tolerance * 10 ** -generator.uniform(0.01, 4, 10 * SEEDS)
        if place > 0:
            values[generator.integers(len(values))] = 10 * self.tolerance
        return pd.DataFrame({"seed": np.arange(len(values)) % SEEDS, "value": values})
