"""The interface through which a long computation reports its progress, however it is displayed."""

# ruff: noqa: B027  callbacks do nothing unless they are overridden

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["step", "run"]
"""The parts of a task: many short steps, or a few long runs that deserve a line each."""


class AbstractProgress(ABC):
    """Display of one task at a time: `start`, then any number of `step`s and remarks, then `stop`.

    A task of runs also shows the runs at work, each as a part with steps of its own.
    """

    hint: str = ""
    """Advice that follows the remark that a result exists already."""

    def start(self, name: str, steps: int, done: int, unit: Unit = "step", note: str = "") -> None:
        """Begin a task of `steps` steps (or runs), some of them already done."""

    def step(self, done: int, note: str = "") -> None:
        """Report that `done` steps are complete; the note holds numbers such as the loss."""

    def show_part(self, name: str, done: int | None, steps: int | None) -> None:
        """Report how far a run at work is, if it is known."""

    def drop_part(self, name: str) -> None:
        """Remove a run that has ended from the display."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a remark of one line."""

    def warn(self, text: str) -> None:
        """Show a remark of consequence, such as lost work; quiet commands show it too."""
        self.say(text)

    def found(self, path: Path) -> None:
        """Report that the result exists already, so that nothing is computed."""
        self.say(f"{path} is finished{self.hint}")

    def stop(self) -> None:
        """End the task, complete or not."""


class Silent(AbstractProgress):
    """A display of nothing.

    >>> Silent().say("nothing is printed")
    """

    def say(self, text: str) -> None:
        pass
