"""What a run tells of itself while it goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from ntkexp.observe import Row
from ntkexp.walk import Walk


class AbstractJournal(ABC):
    """Whoever listens to a run."""

    @abstractmethod
    def row(self, row: Row) -> None:
        """The numbers of a step."""

    @abstractmethod
    def snapshot(self, step: int, kernel: Float[Tensor, "point out train out_"]) -> None:
        """The tangent kernel at a step."""

    @abstractmethod
    def stepped(self, walk: Walk, loss: float) -> None:
        """A step is complete: the moment for a checkpoint."""
