"""What two runs differ in: their configurations, and what came out of them."""

from __future__ import annotations

import pandas as pd

from ntkexp.report.configuration import differing, flat
from ntkexp.report.quantity import quantities
from ntkexp.report.run import Run


def of_config(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each key whose value differs; a key that one of them lacks has none there."""
    one, other = flat(first.config), flat(second.config)
    rows = [(key, one.get(key), other.get(key)) for key in differing([one, other])]
    return pd.DataFrame(rows, columns=["key", "first", "second"], dtype=object)


def of_results(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each number that both yield, with their ratio."""
    one, other = quantities(first), quantities(second)
    rows = [(name, one[name], other[name], ratio(other[name], one[name])) for name in one if name in other]
    return pd.DataFrame(rows, columns=["quantity", "first", "second", "second/first"])


def of_one_alone(first: Run, second: Run) -> tuple[list[str], list[str]]:
    """Find the numbers that only one of them yields."""
    one, other = quantities(first), quantities(second)
    return [name for name in one if name not in other], [name for name in other if name not in one]


def ratio(above: float, below: float) -> float:
    """Divide above by below, NaN where there is none."""
    return above / below if below else float("nan")
