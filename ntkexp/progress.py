"""Progress of long computations: what is reported, independent of how it is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class AbstractProgress(ABC):
    """One task goes on at a time: `start`, any number of `step`s and remarks, `stop`."""

    @abstractmethod
    def start(self, name: str, steps: int, done: int) -> None:
        """A task of `steps` steps begins, some of them already done."""

    @abstractmethod
    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        """`step` steps are done; the training loss and how far the kernel has moved are given where they are known."""

    @abstractmethod
    def found(self, path: Path) -> None:
        """The result is there already, and nothing is computed unless that is forced."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Make a remark of one line."""

    def warn(self, text: str) -> None:
        """A remark of consequence, such as that work was lost: it is shown where other remarks are not."""
        self.say(text)

    @abstractmethod
    def stop(self) -> None:
        """The task has ended, whether or not it came to its last step."""


class Silent(AbstractProgress):
    """Progress that is not shown.

    >>> Silent().say("nothing is printed")
    """

    def start(self, name: str, steps: int, done: int) -> None:
        pass

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        pass

    def found(self, path: Path) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass
