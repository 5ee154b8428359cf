"""What a run tells of itself while it goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from ntkexp.records.trajectory import Trajectory
from ntkexp.run.row import Row
from ntkexp.run.state import RunState


class AbstractListener(ABC):
    """Whoever listens to a run."""

    @abstractmethod
    def on_row(self, row: Row) -> None:
        """The numbers of a step."""

    @abstractmethod
    def on_snapshot(
        self, step: int, kernel: Float[Tensor, "point kept train kept_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        """The tangent kernel at a step, and ℓ′ of all training examples, whatever the batch."""

    @abstractmethod
    def on_step(self, state: RunState, loss: float) -> None:
        """A step is complete: the moment for a checkpoint."""

    @abstractmethod
    def on_step_back(self, state: RunState, done: int, whole: int) -> None:
        """A step of the way back is complete, so many of so many: the moment for a checkpoint."""

    @abstractmethod
    def on_sweep(self, state: RunState, done: int, whole: int) -> None:
        """A step of the sweep for effects is complete, so many of so many: the moment for a checkpoint."""

    @abstractmethod
    def on_remark(self, text: str) -> None:
        """The run says a sentence of what it is about to do."""

    @abstractmethod
    def on_late_rows(self, rows: Sequence[Row]) -> None:
        """What the gradients of every step did, as the way back has found."""

    @abstractmethod
    def on_end(self) -> None:
        """The path is behind, there and back; what follows keeps no checkpoints."""

    @property
    @abstractmethod
    def scratch(self) -> Path:
        """A folder for what does not fit into the memory."""

    @abstractmethod
    def trajectory(self, rows: int, size: int) -> Trajectory:
        """Room for so many rows of so many numbers, for a path that is gone over again from its end."""
