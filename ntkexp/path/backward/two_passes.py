"""The first pass records the steps, the second goes back over them and sums what they did.

An optimizer that remembers is understood from the end of its path: what a gradient does is known when all steps after
it are. Where there are phases, one more pass goes back from the end of each, over the steps until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.base import AbstractAccumulator, Error
from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.mark import Mark, mark_of, marks_from, states
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.backward.recording import Recording
from ntkexp.path.backward.second_pass import SecondPass
from ntkexp.path.step import Step
from ntkexp.shapes import Weights


@dataclass(kw_only=True)
class TwoPasses(AbstractAccumulator):
    """A recording, and the second pass over it, which is made when the sizes of all steps are known."""

    recording: Recording
    turn: Callable[[Recording, Sequence[float]], SecondPass]
    switches: tuple[int, ...] = ()  # where phases end, but for the last
    second: SecondPass | None = None
    saved: Mapping[str, Any] | None = None  # of a checkpoint on the way back
    noted: list[Mark] = field(default_factory=list)

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return {} if self.second is None else self.second.integrals

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        self.recording.write(step)
        return {}

    def steps_back(self, end: Weights, step_sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
        self.recording.close(len(step_sizes), end)
        ends = [*(switch for switch in self.switches if switch < len(step_sizes)), len(step_sizes)]
        for number in range(len(self.noted), len(ends)):
            second = self.second = self.turn(self.recording, step_sizes[: ends[number]])
            if number + 1 < len(ends):
                second.doubled = None  # the parts are measured over the whole path
            if self.saved is not None:
                second.restore(self.saved)
                self.saved = None
            chunks = len(second.chunks)
            for done, _ in second.steps_back():
                yield chunks * sum(ends[:number]) + done, chunks * sum(ends)
            if number + 1 < len(ends):
                self.noted.append(mark_of(second.integrals))

    @property
    def marks(self) -> Sequence[Mark]:
        return self.noted

    @property
    def late_tallies(self) -> Sequence[dict[str, Tally]] | None:
        return None if self.second is None else [self.second.tallies_of(step) for step in range(self.second.length)]

    def recorded(self) -> Recording:
        return self.recording

    def error(self, rule: str, steps: int) -> Error | None:
        found = None if self.second is None else self.second.error(rule)
        return None if found is None else Error(found)

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        return None if self.second is None else self.second.half_by(rule)

    def by_step(self, rule: str) -> StepTotals:
        assert self.second is not None, "no step is understood before the second pass"
        return self.second.totals[rule]

    @property
    def state(self) -> dict[str, Any]:
        return {"second": None if self.second is None else self.second.state, "marks": states(self.noted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state["second"]
        self.noted = marks_from(state["marks"], self.recording.pull)
