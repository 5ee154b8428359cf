"""How like the network a machine is, by a row of the ladder: it is the network, misses it, or cannot be compared.

>>> [str(likeness(Result("probe", "left", relative_error=error, floor=1e-13))) for error in (0.12, 1e-14, math.nan)]
['misses', 'exact', 'broken']
"""

from __future__ import annotations

import math
from enum import StrEnum

from ntkexp.records.results import Result


class Likeness(StrEnum):
    """A row says one of these."""

    EXACT = "exact"  # rounding explains the error
    MISSES = "misses"
    BROKEN = "broken"  # what the machine says is not finite
    LOST = "lost"  # what the network says is not
    STILL = "still"  # the network moved by no more than rounding, which explains any error
    SILENT = "silent"  # nothing was compared


COMPARED = frozenset({Likeness.EXACT, Likeness.MISSES})


def likeness(row: Result) -> Likeness:
    """What this row says. The floor is measured on the network alone: where it is no number, the network is none."""
    if row.relative_error is None:
        return Likeness.SILENT if row.max_error is None else Likeness.STILL
    if row.floor is not None and math.isnan(row.floor):
        return Likeness.LOST
    if not math.isfinite(row.relative_error):
        return Likeness.BROKEN
    if row.tolerance >= 1:
        return Likeness.STILL
    return Likeness.EXACT if row.exact else Likeness.MISSES
