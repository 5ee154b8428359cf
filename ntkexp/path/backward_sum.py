"""The sum backwards, for optimizers with memory: a first pass records the steps, a second one sums from the last to
the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.optimizer.base import AbstractOptimizer, Recursion
from ntkexp.path.forward_sum import AbstractAccumulator, Error
from ntkexp.path.integrals import Integrals, Mark, StepTotals, Tally, contract, mark_of, marks_from, states
from ntkexp.path.points import Domain, ExactSide, Points, StepBlock, cut
from ntkexp.path.recording import Halves, Playback, Recording
from ntkexp.path.step import Step, decay, sizes_of
from ntkexp.shapes import Weights

# --- Which points are attributed where each costs a pass backwards: the first ones of every split, as many of each as
# of the others where it has so many.


def shares(count: int, sizes: Sequence[int]) -> list[int]:
    """How many of each group are taken.

    >>> shares(64, [128, 128, 101])
    [22, 21, 21]
    >>> shares(64, [8, 100, 100]), shares(64, [8, 8])
    ([8, 28, 28], [8, 8])
    """
    taken = [0] * len(sizes)
    while (left := count - sum(taken)) > 0 and (open_ := [k for k in range(len(sizes)) if taken[k] < sizes[k]]):
        for turn, k in enumerate(open_):
            fair = left // len(open_) + (turn < left % len(open_))
            taken[k] += min(fair, sizes[k] - taken[k])
    return taken


# --- The sum backwards, for optimizers with memory: from the last step to the first, one bracket U for each output.
#
#     path kernel     𝒦(x, xᵢ) = Σ_r ⟨V_r(x), Jᵢ(r)⟩            [probe, out, train, out_]
#     contributions   𝒮(x, xᵢ) = −Σ_r ⟨V_r(x), Jᵢ(r)⟩ ℓ′ᵢ(r)     [probe, out, train]
#     decay           𝒟(x)     = −Σ_r λ V_r(x)·θ_r, or −Σ_r λ (η_r ⊙ J̄(r))·θ_r where it passes the memory by
#
# with U and V as in `optimizer.base`. Then f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x), exactly, for secants.


@dataclass(frozen=True, kw_only=True)
class StepBack:
    """One step, seen from its end: how it enters the sum, and whether weights decay past the memory."""

    step: Step
    recursion: Recursion
    decouples: bool

    @property
    def through_memory(self) -> Weights | None:
        """λθ_r, which the gradient holds."""
        weights = self.step.view.weights
        return None if self.decouples else decay(weights, self.step.weight_decay, sizes_of(weights, {}, 1.0))

    @property
    def past_memory(self) -> Weights | None:
        """λη_r ⊙ θ_r, which the weights lose by themselves."""
        return self.step.decay if self.decouples else None


@dataclass(kw_only=True)
class BackwardSum:
    """The sum by one rule, at some of the points: `place` says which of those that `integrals` is about.

    The bracket is made when the first features are seen, and filled with `saved`, if there is a checkpoint.
    """

    integrals: Integrals
    place: Int[Tensor, " probe"]
    saved: list[Tensor]
    bracket: Adjoint | None = None

    def add(self, back: StepBack, block: StepBlock, tally: Tally) -> tuple[Tensor, Tensor]:
        """Take one step back; what its gradients contributed [probe, out, train], and what decay took away."""
        kernel, lost = self.take(back, block, tally)
        bracket, past = self.bracket, back.recursion.past
        assert bracket is not None
        kernel = kernel + past * torch.cat([bracket.kernel(part) for part in back.step.right], dim=2)
        if (shrinking := back.through_memory) is not None:
            lost = lost + past * bracket.applied(shrinking)
        parts = contract(kernel, back.step.output_gradient).neg_()
        tally.add(parts, kernel)
        self.integrals.kernel[self.place] += kernel
        self.integrals.contributions[self.place] += parts
        self.integrals.decay[self.place] -= lost
        return parts, lost

    def take(self, back: StepBack, block: StepBlock, tally: Tally) -> tuple[Tensor, Tensor]:
        """Let U take in J̄(r); what `now` ⊙ J̄(r) adds to the kernel, and to the decay."""
        pushed = torch.zeros_like(block.change())
        step, recursion, carry = back.step, back.recursion, back.recursion.carry
        kernel, lost = step.output_gradient.new_zeros(()), step.output_gradient.new_zeros(())
        for piece in self.integrals.pieces:
            features = block.features(piece)
            self.bracket = self.bracket or self.bracket_before(features)
            self.bracket.accumulate(
                features, {name: piece.weight * part for name, part in recursion.scale.items()}, carry
            )
            carry = 1.0
            pushed.add_(features.applied(step.segment.difference), alpha=piece.weight)
            if recursion.now is not None:
                ahead = features.scaled(recursion.now)
                kernel = kernel + piece.weight * ExactSide(step.right).between(ahead)
                if (shrinking := back.through_memory) is not None:
                    lost = lost + piece.weight * ahead.applied(shrinking)
            if (shrinking := back.past_memory) is not None:
                lost = lost + piece.weight * features.applied(shrinking)
        tally.close(block, pushed)
        return kernel, lost

    def bracket_before(self, features: Jacobian) -> Adjoint:
        """The bracket before this step."""
        bracket = zero_adjoint(features)
        for part, total in zip(bracket.parts.values(), self.saved, strict=False):
            part.total.copy_(total)
        return bracket

    @property
    def state(self) -> list[Tensor]:
        """The bracket, for a checkpoint."""
        return [part.total for part in self.bracket.parts.values()] if self.bracket else self.saved


# --- How well the parts are known that a pass backwards finds: the same pass with twice the pieces, at a sample of
# points.
#
#     e(x, ·) = (𝒮_2n(x, ·) − 𝒮_n(x, ·)) · 4/3,        ‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ_{m of Q points} ‖e(x, ·)‖²
#
# What a step's Jacobian is off by enters the bracket, and through it the parts of every step before: a sample of
# steps would need a bracket for each. A point has a bracket of its own, so points are sampled, and each is
# measured over the whole path.


@dataclass(kw_only=True)
class Doubled:
    """The integrals with twice the pieces at the points of a sample, which are some of those attributed."""

    rule: str  # whose error is measured
    integrals: Integrals
    sample: Int[Tensor, " sample"]
    gain: float
    points: Points | None = None  # those of the chunk at work, if the sample has any there
    backward: BackwardSum | None = None

    def begin(self, chunk: slice, points: Points, saved: list[Tensor]) -> None:
        """An empty bracket (or that of a checkpoint) for the points of the sample in a chunk."""
        (here,) = torch.where((self.sample >= chunk.start) & (self.sample < chunk.stop))
        self.points = self.backward = None
        if len(here):
            inputs = points.inputs[self.sample[here] - chunk.start]
            self.points = replace(points, inputs=inputs, block=len(inputs), shelves=[])
            self.backward = BackwardSum(integrals=self.integrals, place=here, saved=saved)

    def add(self, back: StepBack) -> None:
        """Take one step back, if any point of the sample is at work."""
        if self.points is not None and self.backward is not None:
            block = StepBlock(self.points, back.step.segment, slice(0, len(self.points.inputs)))
            self.backward.add(back, block, Tally())

    def error(self, contributions: Float[Tensor, "attributed out train"]) -> float:
        """‖𝒮 − 𝒮_integral‖ over all points that are attributed."""
        difference = self.integrals.contributions - contributions[self.sample]
        return self.gain * float(difference.norm()) * sqrt(len(contributions) / len(self.sample))

    @property
    def state(self) -> dict[str, Any]:
        """The accumulators and the bracket, for a checkpoint."""
        return {"integrals": self.integrals.state, "bracket": self.backward.state if self.backward else []}

    def restore(self, state: Mapping[str, Any]) -> list[Tensor]:
        """Take the accumulators of a checkpoint; its bracket."""
        self.integrals.restore(state["integrals"])
        bracket: list[Tensor] = state["bracket"]
        return bracket


def sample_points(points: int, count: int) -> Int[Tensor, " sample"]:
    """So many of the points, evenly spread, as those of every split stand together.

    >>> sample_points(10, 4).tolist(), sample_points(2, 4).tolist()
    ([1, 3, 6, 8], [0, 1])
    """
    few = min(count, points)
    return (torch.arange(few) * points + points // 2) // max(few, 1)


# --- The second pass over a path whose optimizer remembers, from its last step to its first.
#
# The attributed points are taken a chunk at a time, so many that their brackets fit into the memory; every chunk
# goes over the whole recording.


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


# --- The first pass records the steps, the second goes back over them and sums what they did.
#
# An optimizer that remembers is understood from the end of its path: what a gradient does is known when all steps
# after it are. Where there are phases, one more pass goes back from the end of each, over the steps until then.


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
