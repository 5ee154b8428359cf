"""Several runs side by side, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ntkexp.report.configuration import differing, flat
from ntkexp.report.ladder import main_split
from ntkexp.report.run import Run
from ntkexp.text import aligned, as_cell, short


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """Tabulate a row per run: its name, where its configuration differs from the others', and each machine's relative
    error.
    """
    configs = [flat(run.config) for run in runs]
    keys = differing(configs)
    rows = [
        {"run": run.name} | {key: config.get(key) for key in keys} | errors(run)
        for run, config in zip(runs, configs, strict=True)
    ]
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
    return table.assign(outcome=[run.outcome for run in runs])


def errors(run: Run) -> dict[str, str | float | None]:
    """Find the split a run is judged by, and the relative error of each machine there."""
    split = main_split(run.ladder)
    here = [row for row in run.ladder if row.split == split and row.relative_error is not None]
    return {"split": split} | {row.machine: row.relative_error for row in here}


def frame_as_text(table: pd.DataFrame) -> str:
    """Lay out a data frame as aligned text."""
    right = [pd.api.types.is_numeric_dtype(table[name]) for name in table]
    rows = [[written(value) for value in row] for row in table.itertuples(index=False)]
    return aligned(list(map(str, table)), rows, right)


def written(value: object) -> str:
    """Write a cell of a table; whole numbers keep every digit."""
    return short(value) if value is None or isinstance(value, float) else str(value)


def as_csv(table: pd.DataFrame) -> str:
    """Write a table with every digit, in which no text is a formula to a spreadsheet.

    >>> print(as_csv(pd.DataFrame({"name": ["=1+1", "a"], "value": [-0.5, 2.0]})), end="")
    name,value
    '=1+1,-0.5
    a,2.0
    """
    safe = table.copy(deep=False)
    for place, kind in enumerate(table.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            cells = [as_cell(value) if isinstance(value, str) else value for value in table.iloc[:, place]]
            safe.isetitem(place, np.array([*cells, None], dtype=object)[:-1])  # as they are: of one type or several
    safe.columns = [as_cell(str(name)) for name in table.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))
