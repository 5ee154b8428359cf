"""What the text of a cell means.

>>> number("1e3"), number("TRUE"), number("1_000"), number("inf")
(1000.0, 1.0, nan, nan)
>>> missing("N/A"), missing("none")
(True, False)
"""

from __future__ import annotations

from math import isfinite, nan

TRUTH = {"false": 0.0, "true": 1.0}
MISSING = frozenset({"", "?", "na", "n/a", "<na>", "nan", "null"})


def number(cell: str) -> float:
    """The number a cell holds, NaN if it holds none; infinity is none, and Python's 1_000 is text elsewhere."""
    word = cell.lower()
    if word in TRUTH:
        return TRUTH[word]
    try:
        value = float(word)
    except ValueError:
        return nan
    return value if isfinite(value) and "_" not in word else nan


def missing(cell: str) -> bool:
    """Whether a cell holds nothing, in one of the usual spellings."""
    return cell.lower() in MISSING
