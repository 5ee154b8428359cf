"""How a path is integrated: what that refuses, what it costs, what it starts from and what it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ntkexp.optimizer.base import Memory
from ntkexp.path.accumulate.base import AbstractAccumulator
from ntkexp.path.budget import Budget
from ntkexp.path.domain import Domain
from ntkexp.path.settings import Path
from ntkexp.records.trajectory import Trajectory
from ntkexp.shapes import Weights

Room: TypeAlias = Callable[[int, int], Trajectory]
"""Takes room for so many rows of so many numbers."""


class AbstractIntegration(ABC):
    """One of the ways; what an optimizer or the settings of a path do not go with is refused when it is made."""

    path: Path

    @property
    def passes(self) -> int:
        """How often the path is gone over."""
        return 1

    @property
    def rules(self) -> int:
        """How many rules there are, each with contributions of its own."""
        return len(self.path.rule)

    @property
    def kernels(self) -> int:
        """How many path kernels and snapshots are held at once."""
        return self.rules if self.path.keeps_kernels else 0

    @property
    def errors(self) -> int:
        """How many sums like contributions tell their error."""
        return 0

    @property
    def tapes(self) -> int:
        """The number of positions inside a step at which a block is read, both ends included."""
        return len(self.path.positions(self.path.finer))

    @property
    def doubles(self) -> bool:
        """Whether the error takes brackets of its own."""
        return False

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """How many points of each split are attributed: all, where a point more costs little."""
        return list(sizes)

    def chunk(self, budget: Budget, attributed: int) -> int:
        """How many of them at once."""
        return attributed

    @property
    def details(self) -> Mapping[str, str]:
        """The settings that concern each rule by which there will be integrals, in words."""
        return self.path.details

    def facts(self, memory: Memory) -> dict[str, float]:
        """What the optimizer's memory tells of the path when it is behind."""
        return {}

    @abstractmethod
    def begin(self, domain: Domain, weights: Weights, room: Room) -> AbstractAccumulator:
        """What takes in the steps from these weights on."""
