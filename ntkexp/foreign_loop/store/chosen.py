"""A store in memory for some steps of a loop: chosen steps, or the last n.

    f_T − f_0 = Σ contributions + decay + carried + other_steps

The chosen steps form one or more runs, which are sequences of consecutive steps.
`carried` is the change of f during a run by momentum from before the run.
`other_steps` is the change of f in the steps that are not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.foreign_loop.step import AbstractSteps, AbstractStore, FollowedStep
from ntkexp.foreign_loop.store.checkpoints import cloned
from ntkexp.foreign_loop.store.memory import MemoryStore
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.mistake import Mistake, in_short
from ntkexp.model.functional import Output
from ntkexp.shapes import Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

Steps: TypeAlias = int | Iterable[int]
"""An integer n for the last n steps, or indices of steps, counted from 0."""


def chosen_steps(steps: Steps) -> int | frozenset[int]:
    """Return n for the last n steps, or a set of indices. Raise if `steps` is neither.

    >>> chosen_steps(5), sorted(chosen_steps(range(3, 5)))
    (5, [3, 4])
    >>> chosen_steps([-1])
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=[-1]: give a number n for the last n steps, or indices of steps, counted from 0
    """
    if isinstance(steps, Iterable) and not isinstance(steps, str):
        indices = list(steps)
        if indices and all(is_count(index) and index >= 0 for index in indices):
            return frozenset(indices)
    elif is_count(steps) and steps > 0:
        return steps
    raise Mistake(
        f"steps={in_short(steps)}: give a number n for the last n steps, or indices of "
        "steps, counted from 0"
    )


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class ChosenStore(AbstractStore):
    """A store in memory for runs of chosen steps, and for the weights at both ends of
    the loop.

    If the user asks for the last n steps, the end of the loop is not known in advance.
    The steps are then divided into runs of n steps, and only the latest two runs are
    stored. They always contain the last n steps."""

    known: Sequence[KnownOptimizer]
    output: Output
    every: int | None
    budget: MemoryBudget
    chosen: int | frozenset[int]
    runs: list[MemoryStore] = field(default_factory=list)
    taken: int = 0  # number of steps of the loop
    chooses: bool = True
    first: Weights = field(default_factory=dict)
    latest: Weights = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)

    @property
    def count(self) -> int:
        return self.taken

    @property
    def takes_next(self) -> bool:
        return isinstance(self.chosen, int) or self.taken in self.chosen

    @property
    def indices(self) -> range | list[int]:
        """The indices of all chosen steps that the loop has taken so far."""
        if isinstance(self.chosen, int):
            return range(max(0, self.taken - self.chosen), self.taken)
        return sorted(index for index in self.chosen if index < self.taken)

    def begin(
        self,
        weights: Weights,
        optimizers: Sequence[torch.optim.Optimizer],
        names: dict[int, str],
    ) -> None:
        self.optimizers = optimizers
        self.names = names
        self.first = cloned(weights)
        self.latest = self.first
        if self.takes_next:
            self.begin_run(weights)

    def begin_run(self, weights: Weights) -> None:
        """Begin a run of stored steps at these weights,
        and drop old runs if the last n steps are chosen."""
        if isinstance(self.chosen, int):
            self.runs = self.runs[-1:]
        held = sum(run.loop.nbytes for run in self.runs)
        held += sum(weight.nbytes for weight in self.first.values())
        budget = self.budget.holding(held)
        run = MemoryStore(
            self.known, self.output, self.every, budget, before=self.taken
        )
        run.begin(weights, self.optimizers, self.names)
        self.runs.append(run)

    def add(
        self, step: FollowedStep, which: int, after: Weights, signed: Signed
    ) -> None:
        run = self.runs[-1]
        run.add(step, which, after, signed)
        self.taken = run.count
        self.latest = after
        is_full = (
            isinstance(self.chosen, int) and self.taken - run.before == self.chosen
        )
        if is_full or not self.takes_next:
            run.end(Outside(), whole=True)
        if is_full:
            self.begin_run(after)

    def pass_over(self) -> None:
        self.taken += 1

    def go_on(self, weights: Weights) -> None:
        self.latest = weights
        if self.takes_next:
            self.begin_run(weights)

    def end(self, outside: Outside, *, whole: bool) -> None:
        for run in self.runs[-1:]:
            run.end(outside, whole=whole)
        self.outside = outside
        self.latest = cloned(self.latest)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return ChosenSteps(self, module, same_kernels)


@dataclass
class ChosenSteps(AbstractSteps):
    """The steps of a `ChosenStore`, by their indices in the loop."""

    store: ChosenStore
    module: nn.Module
    same_kernels: bool = False

    def __post_init__(self) -> None:
        self.known = self.store.known

    def refresh(self) -> None:
        vars(self).pop("runs", None)

    @cached_property
    def runs(self) -> list[ReplayedSteps]:
        """The stored runs of consecutive steps. The first step of each run includes the
        momentum from the steps before it."""
        begins = frozenset(
            index for index in self.store.indices if index - 1 not in self.store.indices
        )
        return [
            ReplayedSteps(
                run.loop,
                self.module,
                self.store.output,
                self.known,
                self.same_kernels,
                begins=begins,
            )
            for run in self.store.runs
            if run.loop.events
        ]

    @property
    def indices(self) -> Sequence[int]:
        return self.store.indices

    @property
    def count(self) -> int:
        return self.store.taken

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def end(self) -> Weights:
        return self.store.latest

    @property
    def outside(self) -> Outside:
        return self.store.outside

    def start(self, index: int) -> Weights:
        if index == 0:
            return self.store.first
        for run in self.runs:
            if run.first <= index < run.first + len(run):
                return run.start(index)
        raise Mistake(
            f"a gradient was computed at the weights of step {index}, which is not "
            "among steps=; add this step"
        )

    @property
    def began_with_momentum(self) -> bool:
        first_steps = (step for run in self.runs[:1] for step, _ in run.segment(0)[:1])
        return any(step.remembered for step in first_steps)

    def uses_setting(self, name: str) -> bool:
        return any(run.uses_setting(name) for run in self.runs)

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        for run in self.runs:
            for index, calls in enumerate(run.calls(), run.first):
                if index in self.indices:
                    yield calls

    def names(self) -> Iterator[str]:
        return (name for calls in self.calls() for call in calls for name in call.names)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        for run in self.runs:
            for step, after in run.forwards():
                if step.index in self.indices:
                    yield step, after

    def backwards(
        self, before: int | None = None
    ) -> Iterator[tuple[FollowedStep, Weights]]:
        for run in reversed(self.runs):
            for step, after in run.backwards():
                if step.index in self.indices and (
                    before is None or step.index < before
                ):
                    yield step, after


def share_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on the share of the stored steps in the change of f, or an
    empty string if all steps are stored.

    share = ⟨Σ_s Δf(s), f_T − f_0⟩ / ‖f_T − f_0‖²        summed over the stored steps s

    Δf(s) is the change of the outputs in step s. Summed over all steps of the loop, the
    share is 1.
    """
    if "share" not in attribution.attrs:
        return ""
    share = short(float(attribution.attrs["share"]))
    return (
        f"{attribution.sizes['step']} of {attribution.attrs['taken']} steps are "
        f"explained; they caused {share} of the change of the outputs"
    )
