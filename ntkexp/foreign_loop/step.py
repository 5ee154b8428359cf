"""A step as it was followed, the steps of a loop, and the interface of the stores that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class FollowedStep:
    """The calls whose gradients it consumed, the gradient itself, and the linear step of every parameter that some
    optimizer moved, with the optimizer's settings; those that are `without_grad` got no gradient."""

    index: int
    calls: tuple[ModelCall, ...]
    start: Weights
    gradient: Weights
    linear: Mapping[str, LinearStep]
    without_grad: frozenset[str]
    settings: Mapping[str, Mapping[str, Any]]
    rule_error: (
        float  # proof (b): how far the weights are from where the rule leads, relative to them
    )
    statistics: tuple[Weights, Weights] | None = (
        None  # the running ones after the step before, and after this one
    )
    remembered: Weights = field(
        default_factory=dict
    )  # m before the first of some steps, of others before them
    exact: bool = (
        True  # whether `start` has the loop's own bits: a replay may have rounded otherwise
    )

    def joined(self, other: FollowedStep) -> FollowedStep:
        """This step and one of another optimizer that took in the same gradients, as one."""
        return replace(
            self,
            linear={**self.linear, **other.linear},
            settings={**self.settings, **other.settings},
            gradient=self.gradient | other.gradient,
            without_grad=self.without_grad | other.without_grad,
            rule_error=max(self.rule_error, other.rule_error),
            statistics=None
            if not (self.statistics and other.statistics)
            else (self.statistics[0], other.statistics[1]),
        )

    @property
    def with_grad(self) -> list[str]:
        """Return the parameters whose gradients the step consumed."""
        return [name for name in self.linear if name not in self.without_grad]

    def of(self, name: str) -> LinearStep:
        """How a parameter moved."""
        return self.linear.get(name, IDLE)


class AbstractSteps(ABC):
    """The steps of a loop, which can be gone through in both directions."""

    same_kernels: bool = (
        False  # whether they were taken by the kernels that we have, for all that is known
    )
    known: Sequence[KnownOptimizer] = ()  # the optimizers that took them, and their rules

    def refresh(self) -> None:
        """Look again at what is stored, to which steps may have come."""
        return

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def end(self) -> Weights:
        """The weights after the last step."""

    @property
    def count(self) -> int:
        """How many steps the loop took, of which these may be some."""
        return len(self)

    @property
    def indices(self) -> Sequence[int]:
        """The numbers that these have among all steps of the loop."""
        return range(len(self))

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

    def statistics(self, index: int) -> Weights:
        """The running statistics before a step, or after the last one; none, where no call moves any."""
        return {}

    @abstractmethod
    def start(self, index: int) -> Weights:
        """The weights at which a step began."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of the examples of all steps, in order of their use."""

    @abstractmethod
    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        """The calls of each step, none of which is taken again for that."""

    def most_examples(self) -> int:
        """The most examples of a step."""
        return max((sum(len(call.names) for call in calls) for calls in self.calls()), default=0)

    @abstractmethod
    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        """Each step, and the weights after it."""

    @abstractmethod
    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        """The same from the last step to the first; or from the last one before some step."""


class AbstractStore(ABC):
    """Takes in the steps that `optimizers` take, as they happen."""

    folder: RunFolder | None = None  # of a store on disk
    chooses: bool = False  # whether it stores some of the steps

    @property
    @abstractmethod
    def count(self) -> int:
        """How many steps there are so far."""

    @property
    def takes_next(self) -> bool:
        """Whether the next step is to be stored."""
        return True

    def pass_over(self) -> None:
        """The loop took a step that is not to be stored."""
        raise ValueError("every step is stored")

    def go_on(self, weights: Weights) -> None:
        """After steps that were passed over the weights are these."""
        raise ValueError("every step is stored")

    @abstractmethod
    def begin(
        self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
    ) -> None:
        """Following begins at these weights, which may be written to later; parameters go by their names."""

    @abstractmethod
    def add(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        """Store a step of one of the optimizers; its tensors, and those after it, may be written to later, its
        signatures not."""

    @abstractmethod
    def end(self, outside: Outside, *, whole: bool) -> None:
        """The loop has come to its end, after whose last step this changed; or it was broken off, maybe before any."""

    @abstractmethod
    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        """The steps that are stored, of a module of the kind that is followed."""


def placed(step: FollowedStep, moved: frozenset[str], count: int) -> tuple[int, frozenset[str]]:
    """The index of what an optimizer did after `count` steps, the last of which moved these parameters, and all that
    the step moved by now: several optimizers that take in the same gradients make one step."""
    if count and not moved & step.linear.keys() and all(call.at < count for call in step.calls):
        return count - 1, moved | step.linear.keys()
    return count, frozenset(step.linear)


# --- Of a loop that is carried out again only the ends are stored, and which examples were seen at which step.


@dataclass
class ForgottenSteps(AbstractSteps):
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
            raise ValueError(f"the weights before step {index} were not kept")
        return self.first

    def names(self) -> Iterator[str]:
        return (name for names in self.seen for name in names)

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        raise ValueError("these steps were not kept")

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("these steps were not kept")

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("these steps were not kept")


@dataclass
class EndpointStore(AbstractStore):
    known: Sequence[KnownOptimizer]
    steps: ForgottenSteps = field(default_factory=ForgottenSteps)
    moved: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.steps)

    def begin(
        self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
    ) -> None:
        self.steps.known = self.known
        self.steps.first = self.steps.latest = {
            name: weight.clone() for name, weight in weights.items()
        }
        self.moved = frozenset(weights)  # whatever comes next is a step of its own

    def add(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        index, self.moved = placed(step, self.moved, self.count)
        if index == self.count:
            self.steps.seen.append(tuple(name for call in step.calls for name in call.names))
        self.steps.latest = after

    def end(self, outside: Outside, *, whole: bool) -> None:
        """Nothing is left to do."""

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return self.steps
