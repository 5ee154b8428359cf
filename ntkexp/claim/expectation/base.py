"""What is expected of figures: a pure function of a table, whose rows have a `seed`, a `value`, and where they lie."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.claim.finding import Finding
from ntkexp.component import Component
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.sweep import level

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS = 5
"""Seeds of an invented table."""


class AbstractExpectation(Component, ABC):
    """A rule says which figures support a claim; `where` chooses the rows it speaks of, by their columns."""

    where: dict[str, Any] = Field(default_factory=dict)

    def judge(self, table: pd.DataFrame) -> Finding:
        """Judge a table; one without all its numbers decides nothing."""
        rows = chosen(table, self.where)
        missing = int((~np.isfinite(rows["value"].to_numpy(dtype=float))).sum())
        whole = rows[np.isfinite(rows["value"].to_numpy(dtype=float))]
        if not missing:
            return self.decide(whole)
        try:
            found = self.decide(whole)
        except Mistake:  # what is left may be no whole table
            found = Finding("undecided", math.nan)
        return found.doubted(f"{missing} of {len(rows)} rows have no number")

    @abstractmethod
    def decide(self, table: pd.DataFrame) -> Finding:
        """Judge rows that all have a number."""

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


def chosen(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Choose the rows with these values; a list of values chooses all of them.

    >>> chosen(pd.DataFrame({"depth": [1, 2, 3], "value": [4.0, 5.0, 6.0]}), {"depth": [1, 3]})["value"].tolist()
    [4.0, 6.0]
    """
    for key, wanted in where.items():
        known = column(table, key, "where")
        values = [level(value) for value in (wanted if isinstance(wanted, list) else [wanted])]
        if not known.isin(values).any():
            raise Mistake(f"where: no row has {key}={wanted}; there are {listing(known)}")
        table = table[known.isin(values)]
    return table


def column(table: pd.DataFrame, key: str, field: str) -> pd.Series[Any]:
    """Find a column that a field names."""
    names = [str(name) for name in table if name != "value"]
    if key not in names:
        raise Mistake(f"{field}: the table has no column {key}; it has {', '.join(names)}{nearest(key, names)}")
    return table[key]


def listing(values: pd.Series[Any]) -> str:
    """List the values of a column."""
    return ", ".join(map(str, dict.fromkeys(values.tolist())))
