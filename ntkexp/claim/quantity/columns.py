"""Several columns below each other: a row for each, told apart by the column `quantity`.

Runs that were not asked for a number, such as the errors of a machine that reads another rule, have no row of it.
"""

from __future__ import annotations

import pandas as pd
from pydantic import Field

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.claim.quantity.column import numbers
from ntkexp.report.quantity import describe


class Columns(AbstractQuantity):
    """Rows have the numbers of these columns, one after the other."""

    columns: tuple[str, ...] = Field(min_length=2)

    def refuse_early(self) -> None:
        for name in self.columns:
            describe(name)

    def of(self, measured: Measured) -> pd.DataFrame:
        found = [measured.table.assign(quantity=name, value=numbers(measured, name)) for name in self.columns]
        table = pd.concat(found, ignore_index=True)
        asked = table.groupby(["runs", "quantity"])["value"].transform("count") > 0
        return table[asked].reset_index(drop=True)
