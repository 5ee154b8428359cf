"""One followed step, and two interfaces: the stored steps of a loop, and the stores
that write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.example_losses import LossFunction
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class FollowedStep:
    """A step of the optimizers, with the recorded model calls whose gradients it
    used."""

    index: int
    calls: tuple[ModelCall, ...]
    start: Weights  # weights before the step
    gradient: Weights  # gradient that the optimizer used
    # linear step of every parameter that an optimizer moves
    linear: Mapping[str, LinearStep]
    without_grad: frozenset[str]  # parameters that received no gradient
    # group settings after the step, by parameter
    settings: Mapping[str, Mapping[str, Any]]
    # proof (b): relative distance of the weights after the step from the weights by the
    # update rule
    rule_error: float
    # BatchNorm's running statistics, before and after the step
    statistics: tuple[Weights, Weights] | None = None
    # momentum from before the followed steps
    remembered: Weights = field(default_factory=dict)
    # group settings before the step, by parameter; only if steps of the optimizer
    # change its settings
    settings_before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exact: bool = True  # False if `start` was replayed, so that its rounding may differ
    # True if BatchNorm coupled the calls, and `gradient` was replayed with the signatures
    # of the loop's gradient. Proof (a) then need not replay it again.
    repeats_gradient: bool = False
    # squared norm of the gradients of the optimizers' tensors outside the model
    square_outside: float = 0.0
    # weights that the loop has added to an optimizer before this step
    admitted: Weights = field(default_factory=dict)

    def joined(self, other: FollowedStep) -> FollowedStep:
        """Merge this step with the step that another optimizer took
        with the same gradients."""
        statistics = None
        if self.statistics and other.statistics:
            statistics = (self.statistics[0], other.statistics[1])
        return replace(
            self,
            linear={**self.linear, **other.linear},
            settings={**self.settings, **other.settings},
            settings_before={**self.settings_before, **other.settings_before},
            gradient=self.gradient | other.gradient,
            without_grad=self.without_grad | other.without_grad,
            rule_error=max(self.rule_error, other.rule_error),
            statistics=statistics,
            repeats_gradient=self.repeats_gradient and other.repeats_gradient,
            square_outside=self.square_outside + other.square_outside,
        )

    @property
    def with_grad(self) -> list[str]:
        """The parameters with a gradient in this step."""
        return [name for name in self.linear if name not in self.without_grad]

    @property
    def zeros(self) -> Weights:
        return {name: torch.zeros_like(part) for name, part in self.start.items()}

    @property
    def zero_gradient(self) -> Weights:
        return {name: torch.zeros_like(self.start[name]) for name in self.with_grad}

    def of(self, name: str) -> LinearStep:
        """Return the linear step of a parameter. It is the identity if no optimizer
        updates the parameter."""
        return self.linear.get(name, IDLE)


class AbstractSteps(ABC):
    """The stored steps of a loop. They can be read from the
    first or from the last step."""

    # True if this process presumably uses the same kernels as the loop did
    same_kernels: bool = False
    known: Sequence[KnownOptimizer] = ()  # the optimizers and their rules

    def refresh(self) -> None:
        """Reread the store, because a running loop may have added steps."""
        return

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def end(self) -> Weights:
        """The weights after the last step."""

    @property
    def count(self) -> int:
        """The number of steps of the loop, including steps that are not stored."""
        return len(self)

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the stored steps in the loop."""
        return range(len(self))

    @property
    def shared(self) -> str | None:
        """The name of one of the parameters that several optimizers moved, or None."""
        return None

    @property
    def outside(self) -> Outside:
        """The changes of the model after the last step."""
        return Outside()

    @property
    def processes(self) -> int:
        """The number of processes that trained together
        and averaged their gradients."""
        return 1

    @property
    def autocast(self) -> Autocast | None:
        """The autocast context of the first call that had one."""
        for step, _ in self.forwards():
            for call in step.calls:
                if call.circumstances.autocast is not None:
                    return call.circumstances.autocast
        return None

    def statistics(self, index: int) -> Weights:
        """Return BatchNorm's running statistics before step `index`. If `index` is
        `len(self)`, return the statistics at the end. Return {} if no call updates
        running statistics."""
        return {}

    @abstractmethod
    def start(self, index: int) -> Weights:
        """Return the weights before a step."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield the names of the examples of all steps, in the order of the loop."""

    @abstractmethod
    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        """Yield the recorded model calls of each step, without a replay."""

    @property
    def began_with_momentum(self) -> bool:
        """True if optimizers had momentum from before the first followed step."""
        return False

    def uses_setting(self, name: str) -> bool:
        """Return True if a stored step used this setting of a parameter group, and it was
        not zero."""
        return False

    def most_examples(self) -> int:
        """Return the largest number of examples in a step."""
        return max(
            (sum(len(call.names) for call in calls) for calls in self.calls()),
            default=0,
        )

    @abstractmethod
    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        """Yield each step and the weights after it, from the first to the last."""

    @abstractmethod
    def backwards(
        self, before: int | None = None
    ) -> Iterator[tuple[FollowedStep, Weights]]:
        """Yield each step and the weights after it, in reverse order.

        Begin at the last step, or at the step before `before`.
        """


class AbstractStore(ABC):
    """A store to which a running loop adds its steps."""

    folder: RunFolder | None = None  # folder of a store on disk
    chooses: bool = False  # True if only some steps are stored

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of steps that the loop has taken."""

    @property
    def takes_next(self) -> bool:
        """True if the next step is to be stored."""
        return True

    def store_function(self, function: LossFunction) -> None:
        """Hold a function of `trace.losses`. If the steps store only its name, a replay
        needs the function."""
        return

    def pass_over(self) -> None:
        """Count a step without storing it."""
        raise ValueError("every step is stored")

    def go_on(self, weights: Weights) -> None:
        """Set the weights before the next stored step. Call
        this after steps that were not stored."""
        raise ValueError("every step is stored")

    @abstractmethod
    def begin(
        self,
        weights: Weights,
        optimizers: Sequence[torch.optim.Optimizer],
        names: dict[int, str],
    ) -> None:
        """Begin at `weights`. Copy them, because the loop may overwrite them.

        `names` maps the `id` of each parameter to its name.
        """

    @abstractmethod
    def add(
        self, step: FollowedStep, which: int, after: Weights, signed: Signed
    ) -> None:
        """Store a step of optimizer number `which`.

        Copy all stored tensors, because the loop may overwrite them. Only `signed`, the
        signatures of gradients and weights, need no copy."""

    @abstractmethod
    def end(self, outside: Outside, *, whole: bool) -> None:
        """End the trace. `outside` holds the changes of the model after the last step.
        `whole` is False if the loop was interrupted, perhaps before its first step."""

    @abstractmethod
    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        """Return the stored steps. `module` is a copy of the followed model,
        used for replays."""


def step_index(
    step: FollowedStep, moved: frozenset[str], count: int
) -> tuple[int, frozenset[str]]:
    """Return the index of an optimizer's step, and all parameters that were moved at
    this index so far.

    If several optimizers use the gradients of the same backward pass, their steps have
    the same index. They must move different parameters. So a new index begins if an
    optimizer moves a parameter again, or uses a call that was made after the latest
    step.

    Args:
        step: step of one optimizer.
        moved: parameters that the latest step has moved so far.
        count: number of steps so far.
    """
    is_same_step = not moved & step.linear.keys() and all(
        call.at < count for call in step.calls
    )
    if count and is_same_step:
        return count - 1, moved | step.linear.keys()
    return count, frozenset(step.linear)
