"""Sources that make as many examples as the splits ask for.

What is to be learned is drawn before the inputs, so that more examples of one seed are examples of the same function.
"""

from __future__ import annotations

from ntkexp.component import CountOrNone
from ntkexp.data.base import AbstractSource
from ntkexp.data.scale import Standardise


class AbstractSynthetic(AbstractSource):
    """A source without a rest to test on, so that `test` is a number."""

    test: CountOrNone = 256
    standardise: Standardise = "none"

    @property
    def size(self) -> int:
        """The examples of all splits together."""
        return self.train + self.probe + self.test
