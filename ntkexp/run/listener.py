"""What a run tells of itself while it goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ntkexp.records.trajectory import Trajectory
from ntkexp.run.metrics import Row
from ntkexp.run.second_pass import Retrace
from ntkexp.run.state import Walk


class AbstractJournal(ABC):
    """Whoever listens to a run."""

    @abstractmethod
    def row(self, row: Row) -> None:
        """The numbers of a step."""

    @abstractmethod
    def snapshot(
        self, step: int, kernel: Float[Tensor, "point out train out_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        """The tangent kernel at a step, and ℓ′ of all training examples, whatever the batch."""

    @abstractmethod
    def trajectory(self, rows: int, size: int) -> Trajectory:
        """Room for so many rows of so many numbers, for a run that is walked again from its end."""

    @abstractmethod
    def walked(self) -> None:
        """The path is behind, there and back; looking back at it keeps no checkpoints."""

    @abstractmethod
    def retraced(self, retrace: Retrace) -> None:
        """A step back is complete: the moment for a checkpoint."""

    @abstractmethod
    def attributed(self, rows: Sequence[Row]) -> None:
        """What the gradients of every step did, as the second pass has found."""

    @abstractmethod
    def stepped(self, walk: Walk, loss: float) -> None:
        """A step is complete: the moment for a checkpoint."""
