"""The second pass over a path whose optimizer remembers, from its last step to its first.

The attributed points are taken a chunk at a time, so many that their brackets fit into the memory; every chunk goes
over the whole recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.backward.backward_sum import BackwardSum, StepBack
from ntkexp.path.backward.doubled import Doubled
from ntkexp.path.backward.half_times import Halves
from ntkexp.path.backward.playback import Playback
from ntkexp.path.domain import Domain
from ntkexp.path.points import Points, StepBlock, cut
from ntkexp.path.step import Step
from ntkexp.shapes import Weights

DOUBLED = "doubled"  # no rule's name


@dataclass(kw_only=True)
class SecondPass:
    """Where the second pass stands: `done` steps back, over all chunks."""

    steps: Playback
    optimizer: AbstractOptimizer
    domain: Domain
    integrals: dict[str, Integrals]
    totals: dict[str, StepTotals]
    tallies: dict[str, list[Tally]]  # for every step
    halves: dict[str, Halves]  # at the attributed points
    doubled: Doubled | None
    done: int = 0
    points: Points | None = None  # of the chunk at work
    end: Weights | None = None  # where the next step back comes from, if it is known
    sums: dict[str, BackwardSum] = field(default_factory=dict)
    saved: dict[str, list[Tensor]] = field(default_factory=dict)  # brackets of a checkpoint

    @property
    def length(self) -> int:
        """How many steps the path has."""
        return len(self.steps.step_sizes)

    @property
    def chunks(self) -> list[slice]:
        """The attributed points, cut so that the brackets of a chunk fit into the memory."""
        return cut(0, len(self.domain.attributed), self.domain.chunk)

    @property
    def whole(self) -> int:
        """How many steps back there are."""
        return len(self.chunks) * self.length

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Take those that are left, one at a time; how many are done of how many."""
        while self.done < self.whole:
            chunk, turn = divmod(self.done, self.length)
            if turn == 0 or self.points is None:
                self.points, self.end = self.begin_chunk(self.chunks[chunk]), None
            self.end = self.take(self.steps.step(self.length - 1 - turn, end=self.end), self.points)
            self.done += 1
            yield self.done, self.whole

    def begin_chunk(self, chunk: slice) -> Points:
        """Empty brackets (or those of a checkpoint), for the points of a chunk."""
        points = self.domain.points
        self.sums = {
            name: BackwardSum(integrals=integrals, place=self.domain.rows[chunk], saved=self.saved.get(name, []))
            for name, integrals in self.integrals.items()
        }
        inputs = points.inputs[self.domain.attributed[chunk]]
        few = replace(points, inputs=inputs, train=0, block=len(inputs), keep=True, shelves=[])
        if self.doubled is not None:
            self.doubled.begin(chunk, few, self.saved.get(DOUBLED, []))
        self.saved = {}
        return few

    def take(self, step: Step, points: Points) -> Weights:
        """One step back, towards the weights that it began at."""
        recursion = self.optimizer.recursion(step.index, step.view.weights, step.sizes, step.memory)
        back = StepBack(step=step, recursion=recursion, decouples=self.optimizer.decouples)
        block = StepBlock(points, step.segment, slice(0, len(points.inputs)))
        chunk = self.chunks[self.done // self.length]
        for name, backward in self.sums.items():
            parts, lost = backward.add(back, block, self.tallies[name][step.index])
            self.halves[name].add(step.index, chunk, parts)
            self.totals[name].add(step.index, self.domain.rows[chunk], parts.sum(2) - lost)
        if self.doubled is not None:
            self.doubled.add(back)
        return step.view.weights

    def half_by(self, rule: str) -> Float[Tensor, "point out train"]:
        """When half of each contribution was done; NaN where the path is not integrated."""
        found = self.domain.like.new_full(self.domain.shape[:3], torch.nan)
        found[self.domain.rows] = self.halves[rule].by(self.steps.step_sizes)
        return found

    def error(self, rule: str) -> float | None:
        """How far off the parts are, of the rule of which that is measured."""
        if self.doubled is None or rule != self.doubled.rule:
            return None
        return self.doubled.error(self.integrals[rule].contributions[self.domain.rows])

    def tallies_of(self, step: int) -> dict[str, Tally]:
        """What the gradients of a step did, by rule."""
        return {name: tallies[step] for name, tallies in self.tallies.items()}

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "done": self.done,
            "integrals": {name: integrals.state for name, integrals in self.integrals.items()},
            "brackets": {name: backward.state for name, backward in self.sums.items()},
            "totals": {name: totals.state for name, totals in self.totals.items()},
            "halves": {name: halves.state for name, halves in self.halves.items()},
            "doubled": None if self.doubled is None else self.doubled.state,
            "tallies": {name: [asdict(tally) for tally in tallies] for name, tallies in self.tallies.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.done = state["done"]
        for name, integrals in self.integrals.items():
            integrals.restore(state["integrals"][name])
            self.tallies[name] = [Tally(**tally) for tally in state["tallies"][name]]
            self.totals[name].restore(state["totals"][name])
            self.halves[name].restore(state["halves"][name])
        brackets = dict(state["brackets"])
        if self.doubled is not None:
            brackets[DOUBLED] = self.doubled.restore(state["doubled"])
        self.saved = brackets if self.done % self.length else {}
