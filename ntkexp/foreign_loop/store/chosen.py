"""Some steps of a loop, those that were chosen or the last n: each run of consecutive ones is stored, and the others
are passed over.

    f_T − f_0 = Σ contributions + decay + carried + other_steps        the first three are what these steps did

`carried` is what the optimizer remembered when a run of steps began, from gradients before: βm of each parameter,
through the steps of the run. `other_steps` is f after less f before the steps that were passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import AbstractSteps, AbstractStore, FollowedStep
from ntkexp.foreign_loop.store.memory import MemoryStore, cloned
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.mistake import Mistake, in_short
from ntkexp.shapes import Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

Steps: TypeAlias = int | Iterable[int]
"""The last n, or the numbers of some, from 0."""


def chosen_steps(steps: Steps) -> int | frozenset[int]:
    """Those that were chosen, or the number of last ones.

    >>> chosen_steps(5), sorted(chosen_steps(range(3, 5)))
    (5, [3, 4])
    >>> chosen_steps([-1])
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=[-1]: give a number, for the last n steps, or the numbers of some, counted from 0
    """
    if isinstance(steps, Iterable) and not isinstance(steps, str):
        numbers = list(steps)
        if numbers and all(
            isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers
        ):
            return frozenset(numbers)
    elif isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        return steps
    raise Mistake(
        f"steps={in_short(steps)}: give a number, for the last n steps, or the numbers of some, counted from 0"
    )


@dataclass
class ChosenStore(AbstractStore):
    """Holds runs of chosen steps in memory, and the weights at both ends of the loop. Of the last n steps two runs of n
    are held: where the loop ends, they hold the last n."""

    known: Sequence[KnownOptimizer]
    output: str | int | None
    every: int | None
    memory_gb: float
    chosen: int | frozenset[int]
    runs: list[MemoryStore] = field(default_factory=list)
    taken: int = 0
    chooses: bool = True
    first: Weights = field(default_factory=dict)
    latest: Weights = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.taken

    @property
    def takes_next(self) -> bool:
        return isinstance(self.chosen, int) or self.taken in self.chosen

    @property
    def indices(self) -> range | list[int]:
        """The chosen steps that the loop has taken."""
        if isinstance(self.chosen, int):
            return range(max(0, self.taken - self.chosen), self.taken)
        return sorted(index for index in self.chosen if index < self.taken)

    def begin(
        self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
    ) -> None:
        self.optimizers, self.names = optimizers, names
        self.first = self.latest = cloned(weights)
        if self.takes_next:
            self.begin_run(weights)

    def begin_run(self, weights: Weights) -> None:
        """The next step is taken at these weights, and was chosen."""
        if isinstance(self.chosen, int):
            self.runs = self.runs[-1:]
        held = sum(run.loop.nbytes for run in self.runs)
        held += sum(weight.nbytes for weight in self.first.values())
        self.runs.append(
            MemoryStore(
                self.known, self.output, self.every, self.memory_gb, before=self.taken, held=held
            )
        )
        self.runs[-1].begin(weights, self.optimizers, self.names)

    def add(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        run = self.runs[-1]
        run.add(step, which, after, signed)
        self.taken, self.latest = run.count, after
        full = isinstance(self.chosen, int) and self.taken - run.before == self.chosen
        if full or not self.takes_next:
            run.end(Outside(), whole=True)
        if full:
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
        self.outside, self.latest = outside, cloned(self.latest)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return ChosenSteps(self, module, same_kernels)


@dataclass
class ChosenSteps(AbstractSteps):
    """The steps of such a store, by their numbers in the loop."""

    store: ChosenStore
    module: nn.Module
    same_kernels: bool = False

    def __post_init__(self) -> None:
        self.known = self.store.known

    def refresh(self) -> None:
        vars(self).pop("runs", None)

    @cached_property
    def runs(self) -> list[ReplayedSteps]:
        """Those of them that have steps, each with what was remembered where it begins."""
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
        return getattr(self.store, "outside", Outside())

    def start(self, index: int) -> Weights:
        if index == 0:
            return self.store.first
        run = next((run for run in self.runs if run.first <= index < run.first + len(run)), None)
        if run is None:
            raise Mistake(
                f"a gradient was taken at the weights of step {index}, which is none of steps=; add it to them"
            )
        return run.start(index)

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        found = (
            (run.first + place, calls)
            for run in self.runs
            for place, calls in enumerate(run.calls())
        )
        return (calls for index, calls in found if index in self.indices)

    def names(self) -> Iterator[str]:
        return (name for calls in self.calls() for call in calls for name in call.names)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        found = (each for run in self.runs for each in run.forwards())
        return (each for each in found if each[0].index in self.indices)

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        found = (each for run in reversed(self.runs) for each in run.backwards())
        return (
            each
            for each in found
            if each[0].index in self.indices and (before is None or each[0].index < before)
        )


def share_sentence(found: xr.Dataset) -> str:
    """The sentence on how much of the change came of these steps; none, if all were followed.

    share = ⟨Σ_s Δf(s), f_T − f_0⟩ / ‖f_T − f_0‖²        which adds up to 1 over all steps
    """
    if "share" not in found.attrs:
        return ""
    return (
        f"{found.sizes['step']} of {found.attrs['taken']} steps are explained, which did "
        f"{short(float(found.attrs['share']))} of what training changed"
    )
