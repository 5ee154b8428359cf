"""Phases of training: stretches of steps, in each of which some of the training examples alone carry gradient.

>>> first, second = phases_of((300, 200), (20, 30))
>>> second
Phase(start=300, stop=500, examples=slice(20, 50, None))
>>> second.count, phase_at((first, second), 299) is first, phase_at((first, second), 500) is second
(30, True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """These training examples are learned from step `start` until before step `stop`."""

    start: int
    stop: int
    examples: slice

    @property
    def count(self) -> int:
        """How many examples these are."""
        return int(self.examples.stop - self.examples.start)


def phases_of(steps: Sequence[int], examples: Sequence[int]) -> tuple[Phase, ...]:
    """Phases one after the other, with so many steps and so many examples each."""
    found: list[Phase] = []
    step = example = 0
    for taken, learned in zip(steps, examples, strict=True):
        found.append(Phase(step, step + taken, slice(example, example + learned)))
        step, example = step + taken, example + learned
    return tuple(found)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase that a step belongs to; what comes after the last step belongs to the last phase."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])
