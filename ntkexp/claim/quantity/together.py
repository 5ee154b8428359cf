"""Several quantities below each other, told apart by the column `quantity`, which holds the name that each is given."""

from __future__ import annotations

from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from ntkexp.claim.measured import Measured
from ntkexp.claim.named import refuse_unnamed
from ntkexp.claim.quantity.base import AbstractQuantity


class Together(AbstractQuantity):
    """Rows have the numbers of these quantities, each of the runs that have any of it."""

    names: tuple[str, ...] = Field(min_length=1)
    parts: tuple[AbstractQuantity, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every part has a name of its own."""
        refuse_unnamed("quantity.names", self.names, "parts", self.parts)
        return self

    def of(self, measured: Measured) -> pd.DataFrame:
        found = [part.of(measured).assign(quantity=name) for name, part in zip(self.names, self.parts, strict=True)]
        table = pd.concat(found, ignore_index=True)
        asked = table.groupby(["runs", "quantity"])["value"].transform("count") > 0
        return table[asked].reset_index(drop=True)

    def refuse_early(self) -> None:
        for part in self.parts:
            part.refuse_early()
