"""A column of the table, as it stands: a number of each run (`ntkexp.report.quantity`), or of a trial's rows.

quantity: drift        is short for        quantity: {_target_: ntkexp.claim.quantity.Column, column: drift}
"""

from __future__ import annotations

import pandas as pd

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.mistake import Mistake, nearest
from ntkexp.report.quantity import describe


class Column(AbstractQuantity):
    """Rows have the number that stands in this column."""

    column: str

    def refuse_early(self) -> None:
        describe(self.column)

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(value=numbers(measured, self.column))


def numbers(measured: Measured, name: str) -> pd.Series[float]:
    """Find a column of numbers."""
    known = measured.numbers
    if name not in known:
        raise Mistake(f"quantity: the runs yield no {name}; they yield {', '.join(known)}{nearest(name, known)}")
    return measured.table[name].astype(float)
