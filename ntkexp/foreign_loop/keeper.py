"""Who keeps the steps that are seen: in memory, or on disk; or nothing but their ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from ntkexp.foreign_loop.kept.signature import Signed
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights


class AbstractKeeper(ABC):
    """Takes in steps as they happen; `optimizers` are those that take them."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder | None:
        """Where the steps are kept, if on disk."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many steps there are so far."""

    @abstractmethod
    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        """Watching begins, at these weights, which may be written to later; parameters go by their names."""

    @abstractmethod
    def take(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        """Keep a step that one of the optimizers took; its tensors, and those after it, may be written to
        later, its signatures not."""

    @abstractmethod
    def end(self, outside: Outside, *, whole: bool) -> None:
        """Watching ends, if it has begun, with the loop, after whose last step this changed, or in the midst of it."""

    @abstractmethod
    def steps_of(self, module: nn.Module) -> AbstractSteps:
        """The steps that are kept, of a module of the kind that is watched."""


def placed(step: FollowedStep, moved: frozenset[str], count: int) -> tuple[int, frozenset[str]]:
    """The index of what an optimizer did, after so many steps of which the last moved these parameters, and all that
    the step moved by now: several optimizers that take in the same gradients make one step."""
    if count and not moved & step.linear.keys() and all(call.at < count for call in step.calls):
        return count - 1, moved | step.linear.keys()
    return count, frozenset(step.linear)
