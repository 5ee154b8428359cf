"""The steps of a loop that was followed, wherever they are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.shapes import Weights


class AbstractSteps(ABC):
    """Steps that can be walked in both directions; `end` are the weights after the last."""

    @property
    @abstractmethod
    def end(self) -> Weights:
        """The weights after the last step."""

    def refresh(self) -> None:
        """Look again at what is kept, to which steps may have come."""
        return

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def start(self, index: int) -> Weights:
        """The weights at which a step began."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of the examples of all steps, in order of their use."""

    @property
    def outside(self) -> Outside:
        """What changed after the last step, and was none."""
        return Outside()

    @property
    def processes(self) -> int:
        """How many took these steps together, over whose losses gradients were averaged."""
        return 1

    @property
    def autocast(self) -> Autocast | None:
        """The first autocast in which a call was made."""
        found = (call.how.autocast for step, _ in self.forwards() for call in step.calls)
        return next((each for each in found if each is not None), None)

    @abstractmethod
    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        """Each step, and the weights after it."""

    @abstractmethod
    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        """The same from the last step to the first; or from the last one before some step."""
