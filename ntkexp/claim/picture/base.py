"""How a claim is drawn, from the tables that were judged: it decides nothing, and the claim's digest knows none of it.

picture: {_target_: ntkexp.claim.picture.ScalarStep, published: what the paper's own figure shows}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.claim.picture.published_number import PublishedNumber
from ntkexp.component import Component

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim


class AbstractPicture(Component, ABC):
    """A picture has a caption: what the paper's figure shows, which is `published`, and what the rows show here."""

    published: str = ""
    numbers: tuple[PublishedNumber, ...] = ()

    @abstractmethod
    def figure(self, judged: JudgedClaim) -> Figure:
        """Draw the picture."""

    def here(self, judged: JudgedClaim) -> str:
        """Say in whole sentences what the rows show; nothing where the picture's title says it."""
        return ""

    def table(self, judged: JudgedClaim) -> pd.DataFrame | None:
        """Make the table that the paper has, if it has one: its numbers, and beside them those found here."""
        return pd.DataFrame([one.row(judged.table) for one in self.numbers]) if self.numbers else None

    def caption(self, judged: JudgedClaim) -> str:
        """Say what the paper shows, and what is shown here."""
        here = self.here(judged)
        said = [f"Published: {self.published}" if self.published else "", f"Here: {here}" if here else ""]
        return " ".join(filter(None, said))
