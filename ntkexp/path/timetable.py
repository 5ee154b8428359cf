"""The steps at which kernels are taken: planned before the first step, or as the kernel is seen to change.

An adaptive timetable measures δ = ‖K_s − K_r‖/‖K_r‖, K among the training examples, from one kernel to the next, and
goes `change`/δ times as far to the one after, at most four times, at least a quarter. It goes no less far than what
remains of `count` would, log-spaced, so that these are not used up before the end.

Where training switches from one phase to the next, a kernel is due as well, whatever the timetable says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from jaxtyping import Float
from torch import Tensor

FARTHEST = 4.0
MOST_KERNELS = 10**5  # each is a file


class AbstractTimetable(ABC):
    """When a kernel is due. The first is taken at step 0, the last when training is over."""

    @property
    @abstractmethod
    def room(self) -> int:
        """How many kernels there are at most."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether a kernel is taken at this step."""

    @abstractmethod
    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        """Take note of a kernel that was taken."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""


@dataclass(frozen=True)
class Planned(AbstractTimetable):
    """Steps that are known in advance, in order."""

    steps: tuple[int, ...]

    @property
    def room(self) -> int:
        return len(self.steps)

    def due(self, step: int) -> bool:
        place = bisect_left(self.steps, step)
        return place < len(self.steps) and self.steps[place] == step

    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        pass

    @property
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class Adaptive(AbstractTimetable):
    """Steps after which the kernel is expected to have changed by a given share."""

    steps: int
    count: int
    change: float
    ahead: int = 0  # from the latest kernel to the next
    next: int = 0
    taken: int = 0
    latest: Float[Tensor, "train out train out_"] | None = None

    @property
    def room(self) -> int:
        return min(self.count, self.steps + 1)

    def due(self, step: int) -> bool:
        return step == self.next

    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        self.taken += 1
        wanted = step + (1 if self.latest is None else round(self.ahead * self.stretch(kernel, self.latest)))
        self.next = max(step + 1, wanted, self.soonest(step))
        self.ahead = self.next - step
        self.latest = kernel.clone()

    def stretch(self, kernel: Tensor, before: Tensor) -> float:
        """How many times as far the next kernel may be."""
        changed = float((kernel - before).norm() / before.norm())
        if not isfinite(changed):
            return 1 / FARTHEST
        return min(max(self.change / changed, 1 / FARTHEST), FARTHEST) if changed else FARTHEST

    def soonest(self, step: int) -> int:
        """Where the next kernel would be if all that remain were log-spaced; the last of them is at the end.

        >>> Adaptive(steps=1000, count=5, change=0.1, taken=2).soonest(1)
        10
        """
        left = self.count - self.taken
        if left <= 1:
            return self.steps
        return ceil(step * (self.steps / step) ** (1 / left) - 1e-9) if step else 1

    @property
    def state(self) -> dict[str, Any]:
        return {"ahead": self.ahead, "next": self.next, "taken": self.taken, "latest": self.latest}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ahead, self.next, self.taken = state["ahead"], state["next"], state["taken"]
        self.latest = state["latest"]


@dataclass(frozen=True)
class AtSwitches(AbstractTimetable):
    """Some steps more; of what is seen there the timetable learns nothing."""

    timetable: AbstractTimetable
    switches: tuple[int, ...]

    @property
    def room(self) -> int:
        return self.timetable.room + len(self.switches)

    def due(self, step: int) -> bool:
        return step in self.switches or self.timetable.due(step)

    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        if self.timetable.due(step):
            self.timetable.saw(step, kernel)

    @property
    def state(self) -> dict[str, Any]:
        return self.timetable.state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.timetable.restore(state)
