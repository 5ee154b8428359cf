"""The ends of a loop that is carried out again are kept, and who was seen at which step; all else is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.keeper import AbstractKeeper, placed
from ntkexp.foreign_loop.kept.signature import Signed
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights


@dataclass
class ForgottenSteps(AbstractSteps):
    """Steps of which nothing is known but who was seen, and where the first began and the last ended."""

    seen: list[tuple[str, ...]] = field(default_factory=list)
    first: Weights = field(default_factory=dict)
    latest: Weights = field(default_factory=dict)

    @property
    def end(self) -> Weights:
        return self.latest

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def autocast(self) -> Autocast | None:
        return None  # it is the loop that was carried out again, which tells it

    def start(self, index: int) -> Weights:
        if index:
            raise ValueError(f"nobody kept where step {index} began")
        return self.first

    def names(self) -> Iterator[str]:
        return (name for names in self.seen for name in names)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("nobody kept these steps")

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("nobody kept these steps")


@dataclass
class KeeperOfEnds(AbstractKeeper):
    """Forgets each step once it was proved."""

    kept: ForgottenSteps = field(default_factory=ForgottenSteps)
    moved: frozenset[str] = frozenset()

    @property
    def folder(self) -> RunFolder | None:
        return None

    @property
    def count(self) -> int:
        return len(self.kept)

    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.kept.first = self.kept.latest = {name: weight.clone() for name, weight in weights.items()}
        self.moved = frozenset(weights)  # whatever comes next is a step of its own

    def take(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        index, self.moved = placed(step, self.moved, self.count)
        if index == self.count:
            self.kept.seen.append(tuple(name for call in step.calls for name in call.names))
        self.kept.latest = after

    def end(self, outside: Outside, *, whole: bool) -> None:
        """Nothing is left to do."""

    def steps_of(self, module: nn.Module) -> AbstractSteps:
        return self.kept
