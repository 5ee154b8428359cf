"""The steps of a loop that was followed, wherever they are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.shapes import Weights


class AbstractSteps(ABC):
    """Steps that can be walked in both directions; `end` are the weights after the last."""

    @property
    @abstractmethod
    def end(self) -> Weights:
        """The weights after the last step."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def start(self, index: int) -> Weights:
        """The weights at which a step began."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of the examples of all steps, in order of their use."""

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


@dataclass
class StepsInMemory(AbstractSteps):
    """All of them at once."""

    steps: list[FollowedStep] = field(default_factory=list)
    latest: Weights = field(default_factory=dict)

    @property
    def end(self) -> Weights:
        return self.latest

    def __len__(self) -> int:
        return len(self.steps)

    def start(self, index: int) -> Weights:
        return self.steps[index].start if index < len(self) else self.end

    def names(self) -> Iterator[str]:
        return (name for step in self.steps for call in step.calls for name in call.names)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        return zip(self.steps, self.ends, strict=True)

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        return zip(reversed(self.steps[:before]), reversed(self.ends[:before]), strict=True)

    @property
    def ends(self) -> Sequence[Weights]:
        """The weights after each step."""
        return [*(step.start for step in self.steps[1:]), self.end][: len(self)]
