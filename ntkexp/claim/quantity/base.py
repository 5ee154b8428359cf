"""What a claim measures of its runs: rows with a `value` each, from which an expectation is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pandas as pd

from ntkexp.claim.measured import Measured
from ntkexp.component import Component


class AbstractQuantity(Component, ABC):
    """A named function of what was measured."""

    @abstractmethod
    def of(self, measured: Measured) -> pd.DataFrame:
        """Make a table with the columns `seed` and `value`, and those by which rows are told apart.

        A row that should have a number and has none is NaN, and then nothing is decided; what does not apply is left
        out. A column `bound` is what rounding alone explains of a row's error.
        """

    def refuse_early(self) -> None:
        """Refuse what can be known to be no number of a run, before any is begun."""
