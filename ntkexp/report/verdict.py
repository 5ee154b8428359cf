"""What a row of the ladder says: that the machine is the network, misses it, or cannot be held against it.

>>> [str(verdict(Result("probe", "left", relative_error=error, floor=1e-13))) for error in (0.12, 1e-14, math.nan)]
['misses', 'exact', 'broken']
"""

from __future__ import annotations

import math
from enum import StrEnum

from ntkexp.records.results import Result


class Verdict(StrEnum):
    """All that a row can say."""

    EXACT = "exact"  # rounding explains the error
    MISSES = "misses"
    BROKEN = "broken"  # what the machine says is not finite
    LOST = "lost"  # what the network says is not
    STILL = "still"  # the network moved by no more than rounding, which explains any error
    SILENT = "silent"  # nothing was compared


COMPARED = frozenset({Verdict.EXACT, Verdict.MISSES})


def verdict(row: Result) -> Verdict:
    """What this row says. The floor is measured on the network alone: where it is no number, the network is none."""
    if row.relative_error is None:
        return Verdict.SILENT if row.max_error is None else Verdict.STILL
    if row.floor is not None and math.isnan(row.floor):
        return Verdict.LOST
    if not math.isfinite(row.relative_error):
        return Verdict.BROKEN
    if row.tolerance >= 1:
        return Verdict.STILL
    return Verdict.EXACT if row.exact else Verdict.MISSES
