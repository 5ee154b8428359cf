"""A trial of a claim's own, where sweeps of runs do not do: its fields say what and how large, a seed draws it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ntkexp.component import Component
from ntkexp.records.sweep import Level


class AbstractTrial(Component, ABC):
    """A function of a seed."""

    @abstractmethod
    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        """Carry the trial out: rows of named numbers, and of words that tell rows apart; the same for the same seed."""
