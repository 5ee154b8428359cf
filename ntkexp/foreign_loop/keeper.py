"""Who keeps the steps that are seen: in memory, or on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps, StepsInMemory
from ntkexp.kernel.record.inputs import tensors
from ntkexp.mistake import Mistake
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
    def consumed(self, gradient: Tensor) -> Tensor:
        """What is given to it of a gradient: a copy, if it holds on to that."""

    @abstractmethod
    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        """Watching begins, at these weights; parameters go by their names."""

    @abstractmethod
    def take(self, step: FollowedStep, which: int, after: Weights) -> None:
        """Keep a step that one of the optimizers took."""

    @abstractmethod
    def end(self, *, whole: bool) -> None:
        """Watching ends, if it has begun, with the loop or in the midst of it."""

    @abstractmethod
    def steps_of(self, module: nn.Module) -> AbstractSteps:
        """The steps that are kept, of a module of the kind that is watched."""


def joins(step: FollowedStep, moved: frozenset[str], index: int) -> bool:
    """Whether a step belongs to the last one, which had this index and moved these parameters: several optimizers that
    take in the same gradients make one step."""
    return not moved & step.linear.keys() and all(call.at <= index for call in step.calls)


@dataclass
class KeeperInMemory(AbstractKeeper):
    """All steps are held, up to `memory_gb`."""

    memory_gb: float
    kept: StepsInMemory = field(default_factory=StepsInMemory)
    held: float = 0.0  # bytes

    @property
    def folder(self) -> RunFolder | None:
        return None

    @property
    def count(self) -> int:
        return len(self.kept.steps)

    def consumed(self, gradient: Tensor) -> Tensor:
        return gradient.detach().clone()

    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.kept.latest = weights

    def take(self, step: FollowedStep, which: int, after: Weights) -> None:
        self.refuse_too_much(step)
        steps = self.kept.steps
        if steps and joins(step, frozenset(steps[-1].linear), steps[-1].index):
            step = steps.pop().joined(step)
        steps.append(step)
        self.kept.latest = after

    def end(self, *, whole: bool) -> None:
        """Nothing is left to do."""

    def steps_of(self, module: nn.Module) -> AbstractSteps:
        return self.kept

    def refuse_too_much(self, step: FollowedStep) -> None:
        """Refuse to hold more than was allowed."""
        self.held += bytes_of(step)
        if self.held > 1e9 * self.memory_gb:
            raise Mistake(
                f"step {step.index}: the steps followed so far take more than memory_gb={self.memory_gb:g}, about "
                f"{self.held / 1e6 / (self.count + 1):.3g} MB each; raise it, follow fewer, or give a folder, to=…"
            )


def bytes_of(step: FollowedStep) -> int:
    """What a step takes in memory: its weights, its gradient, scales of elements, and what its calls hold."""
    held = [*step.start.values(), *step.gradient.values()]
    held += [each.scale for each in step.linear.values() if isinstance(each.scale, Tensor)]
    for call in step.calls:
        held += [*tensors(call.inputs), *([] if call.gradient is None else [call.gradient]), *call.how.states.values()]
    return sum(part.nbytes for part in held)
