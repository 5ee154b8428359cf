"""The interface through which long computations report their progress to a display."""

# ruff: noqa: B027  callbacks do nothing unless they are overridden

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["step", "tile", "training", "run"]
"""The units of a task: many short steps, tiles of a kernel or trainings, or a few long
runs. Each run has its own line on the display."""


class AbstractProgress(ABC):
    """A display of one task at a time.

    Call `start`, then `step`, `say` and `warn` any number of times, then `stop`. If the
    units are runs, `show_part` displays the steps of each active run.
    """

    hint: str = ""
    """Advice that is added to the remark that a result already exists."""

    def start(
        self, name: str, steps: int, done: int, unit: Unit = "step", note: str = ""
    ) -> None:
        """Begin a task of `steps` units. `done` units are already complete."""

    def step(self, done: int, note: str = "") -> None:
        """Report that `done` steps are complete. The note may state the loss,
        for example."""

    def after_steps(self, note: str) -> None:
        """Report work of unknown duration that follows the last step."""

    def show_part(self, name: str, done: int | None, steps: int | None) -> None:
        """Report the progress of an active run, if it is known."""

    def drop_part(self, name: str) -> None:
        """Remove a run from the display when it has ended."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a remark in one line."""

    def warn(self, text: str) -> None:
        """Show a warning. Quiet displays show it too."""
        self.say(text)

    def found(self, path: Path) -> None:
        """Report that the result already exists, so nothing is computed."""
        self.say(f"{path} is finished{self.hint}")

    def stop(self) -> None:
        """End the task, whether it is complete or not."""


class Silent(AbstractProgress):
    """A display that shows nothing.

    >>> Silent().say("nothing is printed")
    """

    def say(self, text: str) -> None:
        pass
