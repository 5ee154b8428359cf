"""A store for a loop that runs again: it stores only the weights at both ends, and the
names of the examples of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.foreign_loop.step import (
    AbstractSteps,
    AbstractStore,
    FollowedStep,
    step_index,
)
from ntkexp.foreign_loop.store.checkpoints import cloned
from ntkexp.shapes import Weights


@dataclass
class EndpointSteps(AbstractSteps):
    """The steps of a loop that ran again. They cannot be replayed, because only their
    examples are stored."""

    # examples of each step
    examples: list[tuple[str, ...]] = field(default_factory=list)
    first: Weights = field(default_factory=dict)
    latest: Weights = field(default_factory=dict)

    @property
    def end(self) -> Weights:
        return self.latest

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def autocast(self) -> Autocast | None:
        return None  # not stored here; the trace of the first loop holds it

    def start(self, index: int) -> Weights:
        if index:
            raise ValueError(f"the weights before step {index} were not stored")
        return self.first

    def names(self) -> Iterator[str]:
        return (name for names in self.examples for name in names)

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        raise ValueError("these steps were not stored")

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("these steps were not stored")

    def backwards(
        self, before: int | None = None
    ) -> Iterator[tuple[FollowedStep, Weights]]:
        raise ValueError("these steps were not stored")


@dataclass
class EndpointStore(AbstractStore):
    """A store for the weights at both ends of a loop that runs again."""

    known: Sequence[KnownOptimizer]
    steps: EndpointSteps = field(default_factory=EndpointSteps)
    # parameters that the latest step has moved so far
    moved: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.steps)

    def begin(
        self,
        weights: Weights,
        optimizers: Sequence[torch.optim.Optimizer],
        names: dict[int, str],
    ) -> None:
        copies = cloned(weights)
        self.steps.known = self.known
        self.steps.first = copies
        self.steps.latest = copies
        # the next event begins a new step
        self.moved = frozenset(weights)

    def add(
        self, step: FollowedStep, which: int, after: Weights, signed: Signed
    ) -> None:
        index, self.moved = step_index(step, self.moved, self.count)
        # weights that the loop adds to an optimizer still have their initial values
        self.steps.first = cloned(step.admitted) | self.steps.first
        if index == self.count:
            names = tuple(name for call in step.calls for name in call.names)
            self.steps.examples.append(names)
        self.steps.latest = after

    def end(self, outside: Outside, *, whole: bool) -> None:
        return

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return self.steps
