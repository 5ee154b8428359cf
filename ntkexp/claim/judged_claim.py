"""What pictures of a claim are drawn from: the claim, what was found, and the tables that were judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ntkexp.claim.claim import MAIN, Claim
from ntkexp.claim.expectation.base import column
from ntkexp.records.claim import ClaimRecord


@dataclass(frozen=True)
class JudgedClaim:
    """A claim was judged so, by the tables of its looks."""

    claim: Claim
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The first look, which is the claim's own, was judged by this table."""
        return self.tables[MAIN]

    def rows(self, *columns: str, look: str = MAIN) -> pd.DataFrame:
        """Find the rows that have all of these columns, each once, though several of its numbers may be judged."""
        table = self.tables[look]
        for name in columns:
            column(table, name, "picture")
        once = table.drop(columns=["value", "quantity"], errors="ignore").drop_duplicates()
        return once.dropna(subset=list(columns)).reset_index(drop=True)
