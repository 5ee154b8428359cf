"""The sum backwards, for optimizers with memory: from the last step to the first, for a run whose steps were recorded,
and, in its core, for any stream of steps that are linear in their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.optimizer.base import IDLE, AbstractOptimizer, Coefficient, LinearStep, spread
from ntkexp.path.forward_sum import AbstractAccumulator, Error
from ntkexp.path.integrals import Integrals, Mark, StepTotals, Tally, contract, mark_of, marks_from, states
from ntkexp.path.points import Domain, Points, StepBlock, cut
from ntkexp.path.recording import Halves, Playback, Recording
from ntkexp.path.step import Step
from ntkexp.shapes import Weights

# --- The sum backwards: from the last step to the first, with one vector U of weight space for each output.
#
# Step s took gradients in as `optimizer.base` has it, p = g + λθ, m ← βm + αp, θ ← (1 − d)θ − S ⊙ m − N ⊙ p, with
# coefficients of its own, and J̄(s) is the secant Jacobian of the outputs along it, or what another rule reads. Then
#
#     U_s = S_s ⊙ J̄(s) + β_{s+1} U_{s+1}        what an element of m_s does to the outputs in the end
#     V_s = α_s U_s + N_s ⊙ J̄(s)                what an element of p_s does
#
#     kernel     K_s(x, xᵢ) = ⟨V_s(x), c_s Jᵢ⟩        contribution of example i at step s: −K_s(x, xᵢ) ℓ′ᵢ
#     decay      −V_s·λθ_s − J̄(s)·dθ_s
#
# where c is a factor between the gradient of the examples and what was taken in, such as clipping. Contributions and
# decay add up to Σ_s J̄(s)Δθ_s = f_T − f_0, exactly, for secants.


@dataclass(frozen=True, kw_only=True)
class StepBack:
    """A step as the sum backwards takes it in, whoever trained."""

    start: Weights  # θ_s
    difference: Weights  # θ_{s+1} − θ_s
    linear: Mapping[str, LinearStep]  # of every parameter that was moved
    right: Sequence[Jacobian]  # J of examples, or of what ℓ′ mixes of their outputs, at the weights they were called at
    factor: Mapping[str, float] | None = None  # c; None where it is in ℓ′ already
    beside: Weights = field(default_factory=dict)  # what was taken in beside the gradients of examples


class TakenBack(NamedTuple):
    """What came of a step."""

    kernel: Float[Tensor, "probe out train out_"]  # ⟨V, c J⟩
    decay: Float[Tensor, "probe out"]
    pushed: Float[Tensor, "probe out"]  # J̄Δθ, which is the change of the outputs if J̄ closes the step
    beside: Float[Tensor, "probe out"]  # −⟨V, ·⟩ of what was taken in beside


@dataclass(kw_only=True)
class BackwardSum:
    """U as it stands after the steps that were taken back, and the β by which the latest of them carried memory on."""

    adjoint: Adjoint | None = None  # made when the first features are seen, and filled with `saved`
    carry: Mapping[str, float] = field(default_factory=dict)
    saved: Sequence[Tensor] = ()  # U of a checkpoint

    def take(self, step: StepBack, pieces: Iterable[tuple[float, Jacobian]]) -> TakenBack:
        """Take one step back. J̄ is the sum of the pieces, each a Jacobian and its weight."""
        linear = {name: step.linear.get(name, IDLE) for name in step.start}
        now = self.take_jacobian(step, linear, pieces)
        assert self.adjoint is not None

        # V = α U + N ⊙ J̄; where α, or αc, is one number for all parameters, it multiplies what U gives
        intake = {name: each.intake for name, each in linear.items()}
        factor = step.factor or {}
        into = {name: each * factor.get(name, 1.0) for name, each in intake.items()}
        alike = common(into)
        found = [self.adjoint.kernel(each if alike is not None else each.scaled(into)) for each in step.right]
        kernel = now.kernel + (1.0 if alike is None else alike) * side_by_side(found, now.pushed)
        decay, beside = now.decay, now.beside
        if coupled := times({name: each.coupled for name, each in linear.items()}, step.start):
            decay = decay - self.through(coupled, intake)
        if step.beside:
            beside = beside - self.through(step.beside, intake)
        return TakenBack(kernel, decay.expand_as(now.pushed), now.pushed, beside.expand_as(now.pushed))

    def take_jacobian(
        self, step: StepBack, linear: Mapping[str, LinearStep], pieces: Iterable[tuple[float, Jacobian]]
    ) -> TakenBack:
        """Let U take in the Jacobian of the step, U ← S ⊙ J̄ + β U; what comes of J̄ itself, without U."""
        scale = {name: spread(each.scale, step.start[name]) for name, each in linear.items()}
        coupled = times({name: each.coupled for name, each in linear.items()}, step.start)  # λθ
        lost = times({name: each.lost for name, each in linear.items()}, step.start)  # dθ
        ahead = {name: float(each.ahead) for name, each in linear.items()}  # N, one number a parameter
        carry = common(self.carry)
        if carry is None and self.adjoint is not None:
            self.adjoint.shrink(self.carry)
        kernel = decay = pushed = beside = next(iter(step.start.values())).new_zeros(())
        for weight, features in pieces:
            self.adjoint = self.adjoint or self.begun(features)
            scaled = {name: weight * each for name, each in scale.items()}
            self.adjoint.accumulate(features, scaled, 1.0 if carry is None else carry)
            carry = 1.0
            pushed = torch.add(pushed, features.applied(step.difference), alpha=weight)
            if lost:
                decay = decay - weight * features.applied(lost)
            if any(ahead.values()):
                into = taking = features.scaled(ahead)
                if step.factor is not None:
                    into = features.scaled({name: each * step.factor[name] for name, each in ahead.items()})
                kernel = kernel + weight * side_by_side([gram(into, each) for each in step.right], pushed)
                decay = decay - weight * taking.applied(coupled) if coupled else decay
                beside = beside - weight * taking.applied(step.beside) if step.beside else beside
        self.carry = {name: each.carry for name, each in linear.items()}
        return TakenBack(kernel, decay, pushed, beside)

    def through(self, vector: Weights, intake: Mapping[str, float]) -> Float[Tensor, "probe out"]:
        """⟨αU, v⟩."""
        assert self.adjoint is not None
        if (alike := common(intake)) is not None:
            return alike * self.adjoint.applied(vector)
        return self.adjoint.applied({name: intake[name] * part for name, part in vector.items()})

    def begun(self, features: Jacobian) -> Adjoint:
        """U before the first step back, or that of the checkpoint."""
        adjoint = zero_adjoint(features)
        for part, total in zip(adjoint.parts.values(), self.saved, strict=False):
            part.total.copy_(total)
        self.saved = ()
        return adjoint

    @property
    def state(self) -> list[Tensor]:
        """U, for a checkpoint."""
        return [part.total for part in self.adjoint.parts.values()] if self.adjoint else list(self.saved)


def times(factors: Mapping[str, Coefficient], weights: Weights) -> Weights:
    """Each weight times its factor; nothing, if all of these are zero."""
    if not any(isinstance(factor, Tensor) or factor for factor in factors.values()):
        return {}
    return {name: weight * factors[name] for name, weight in weights.items()}


def common(numbers: Mapping[str, float]) -> float | None:
    """The number that all parameters have in common; None, if they have none.

    >>> common({"a": 0.9, "b": 0.9}), common({"a": 0.9, "b": 1.0}), common({})
    (0.9, None, 1.0)
    """
    first = next(iter(numbers.values()), 1.0)
    return first if all(number == first for number in numbers.values()) else None


def side_by_side(
    kernels: Sequence[Float[Tensor, "probe out _ out_"]], like: Float[Tensor, "probe out"]
) -> Float[Tensor, "probe out train out_"]:
    """Kernels with blocks of examples as one with all of them."""
    return torch.cat(list(kernels), dim=2) if kernels else like.new_zeros(*like.shape, 0, 1)


# --- The sum of a run, by one rule, at a chunk of its points, and how well the parts are known that it finds: by the
# same pass with twice the pieces, at a sample of points.
#
#     path kernel     𝒦(x, xᵢ) = Σ_s K_s(x, xᵢ)            [probe, out, train, out_]
#     contributions   𝒮(x, xᵢ) = −Σ_s K_s(x, xᵢ) ℓ′ᵢ(s)     [probe, out, train]
#     e(x, ·) = (𝒮_2n(x, ·) − 𝒮_n(x, ·)) · 4/3,        ‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ_{m of Q points} ‖e(x, ·)‖²
#
# What a step's Jacobian is off by enters U, and through it the parts of every step before: a sample of steps would
# need a U for each. A point has a U of its own, so points are sampled, and each is measured over the whole path.


@dataclass(kw_only=True)
class ChunkSum:
    """What a rule has added up at some of the points: `place` says which of those that `integrals` is about."""

    integrals: Integrals
    place: Int[Tensor, " probe"]
    sum: BackwardSum

    def take(
        self, step: Step, linear: Mapping[str, LinearStep], block: StepBlock, tally: Tally
    ) -> tuple[Float[Tensor, "probe out train"], Float[Tensor, "probe out"]]:
        """Take one step back; what its gradients contributed, and what decay did."""
        back = StepBack(start=step.view.weights, difference=step.segment.difference, linear=linear, right=step.right)
        pieces = ((piece.weight, block.features(piece)) for piece in self.integrals.pieces)
        kernel, decay, pushed, _ = self.sum.take(back, pieces)
        parts = contract(kernel, step.output_gradient).neg_()
        tally.close(block, pushed)
        tally.add(parts, kernel)
        self.integrals.kernel[self.place] += kernel
        self.integrals.contributions[self.place] += parts
        self.integrals.decay[self.place] += decay
        return parts, decay


@dataclass(kw_only=True)
class Doubled:
    """The integrals with twice the pieces at the points of a sample, which are some of those attributed."""

    rule: str  # whose error is measured
    integrals: Integrals
    sample: Int[Tensor, " sample"]
    gain: float
    points: Points | None = None  # those of the chunk at work, if the sample has any there
    sum: ChunkSum | None = None

    def begin(self, chunk: slice, points: Points, before: BackwardSum) -> None:
        """Begin with the points of the sample in a chunk, of which this was summed up before."""
        (here,) = torch.where((self.sample >= chunk.start) & (self.sample < chunk.stop))
        self.points = self.sum = None
        if len(here):
            inputs = points.inputs[self.sample[here] - chunk.start]
            self.points = replace(points, inputs=inputs, block=len(inputs), shelves=[])
            self.sum = ChunkSum(integrals=self.integrals, place=here, sum=before)

    def take(self, step: Step, linear: Mapping[str, LinearStep]) -> None:
        """Take one step back, if any point of the sample is at work."""
        if self.points is not None and self.sum is not None:
            block = StepBlock(self.points, step.segment, slice(0, len(self.points.inputs)))
            self.sum.take(step, linear, block, Tally())

    def error(self, contributions: Float[Tensor, "attributed out train"]) -> float:
        """‖𝒮 − 𝒮_integral‖ over all points that are attributed."""
        difference = self.integrals.contributions - contributions[self.sample]
        return self.gain * float(difference.norm()) * sqrt(len(contributions) / len(self.sample))


def sample_points(points: int, count: int) -> Int[Tensor, " sample"]:
    """So many of the points, evenly spread, as those of every split stand together.

    >>> sample_points(10, 4).tolist(), sample_points(2, 4).tolist()
    ([1, 3, 6, 8], [0, 1])
    """
    few = min(count, points)
    return (torch.arange(few) * points + points // 2) // max(few, 1)


# --- The second pass over a path whose optimizer remembers, from its last step to its first.
#
# The attributed points are taken a chunk at a time, so many that what is held of them, U by every rule, fits into the
# memory; every chunk goes over the whole recording.


DOUBLED = "doubled"  # no rule's name


@dataclass(kw_only=True)
class RuleBack:
    """All that a rule finds on the way back: sums over steps, by step, by stretch of the path; and U of the chunk."""

    integrals: Integrals
    totals: StepTotals
    tallies: list[Tally]  # for every step
    halves: Halves  # at the attributed points
    sum: ChunkSum | None = None


@dataclass(kw_only=True)
class SecondPass:
    """Where the second pass stands: `done` steps back, over all chunks."""

    steps: Playback
    optimizer: AbstractOptimizer
    domain: Domain
    rules: dict[str, RuleBack]
    doubled: Doubled | None
    done: int = 0
    points: Points | None = None  # of the chunk at work
    saved: dict[str, list[Tensor]] = field(default_factory=dict)  # U of a checkpoint, by rule

    @property
    def length(self) -> int:
        """How many steps the path has."""
        return len(self.steps.step_sizes)

    @property
    def chunks(self) -> list[slice]:
        """The attributed points, cut so that what is held of a chunk fits into the memory."""
        return cut(0, len(self.domain.attributed), self.domain.chunk)

    @property
    def integrals(self) -> dict[str, Integrals]:
        """𝒦 and 𝒮, by rule."""
        return {name: rule.integrals for name, rule in self.rules.items()}

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Take those that are left, one at a time; how many are done of how many."""
        chunks, end = self.chunks, None
        while self.done < len(chunks) * self.length:
            number, turn = divmod(self.done, self.length)
            index = self.length - 1 - turn
            if turn == 0 or self.points is None:
                self.points, end = self.begin_chunk(chunks[number], index), None
            step = self.steps.step(index, end=end)
            self.take(step, self.points, chunks[number])
            end = step.view.weights  # where the next step back leads to
            self.done += 1
            yield self.done, len(chunks) * self.length

    def begin_chunk(self, chunk: slice, index: int) -> Points:
        """The points of a chunk, with nothing summed up; or what a checkpoint has, before this step is taken back."""
        carry = {}
        if index + 1 < self.length:  # the step after it was taken back before the checkpoint
            carry = {name: each.carry for name, each in self.linear(self.steps.step(index + 1)).items()}
        points = self.domain.points
        inputs = points.inputs[self.domain.attributed[chunk]]
        few = replace(points, inputs=inputs, train=0, block=len(inputs), keep=True, shelves=[])
        for name, rule in self.rules.items():
            before = BackwardSum(carry=carry, saved=self.saved.get(name, ()))
            rule.sum = ChunkSum(integrals=rule.integrals, place=self.domain.rows[chunk], sum=before)
        if self.doubled is not None:
            self.doubled.begin(chunk, few, BackwardSum(carry=carry, saved=self.saved.get(DOUBLED, ())))
        self.saved = {}
        return few

    def linear(self, step: Step) -> Mapping[str, LinearStep]:
        """How the step took gradients in."""
        return self.optimizer.linear_steps(step.index, step.sizes, step.memory)

    def take(self, step: Step, points: Points, chunk: slice) -> None:
        """Take one step back at the points of a chunk, by every rule."""
        linear, block = self.linear(step), StepBlock(points, step.segment, slice(0, len(points.inputs)))
        for rule in self.rules.values():
            assert rule.sum is not None
            parts, decay = rule.sum.take(step, linear, block, rule.tallies[step.index])
            rule.halves.add(step.index, chunk, parts)
            rule.totals.add(step.index, self.domain.rows[chunk], parts.sum(2) + decay)
        if self.doubled is not None:
            self.doubled.take(step, linear)

    def half_by(self, rule: str) -> Float[Tensor, "point out train"]:
        """When half of each contribution was done; NaN where the path is not integrated."""
        found = self.domain.like.new_full(self.domain.shape[:3], torch.nan)
        found[self.domain.rows] = self.rules[rule].halves.by(self.steps.step_sizes)
        return found

    def error(self, rule: str) -> float | None:
        """How far off the parts are, of the rule of which that is measured."""
        if self.doubled is None or rule != self.doubled.rule:
            return None
        return self.doubled.error(self.rules[rule].integrals.contributions[self.domain.rows])

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        doubled, rules = self.doubled, self.rules.items()
        brackets = {name: rule.sum.sum.state for name, rule in rules if rule.sum is not None}
        of_sample = [] if doubled is None or doubled.sum is None else doubled.sum.sum.state
        return {
            "done": self.done,
            "integrals": {name: rule.integrals.state for name, rule in rules},
            "brackets": brackets,
            "totals": {name: rule.totals.state for name, rule in rules},
            "halves": {name: rule.halves.state for name, rule in rules},
            "doubled": None if doubled is None else {"integrals": doubled.integrals.state, "bracket": of_sample},
            "tallies": {name: [asdict(tally) for tally in rule.tallies] for name, rule in rules},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.done = state["done"]
        for name, rule in self.rules.items():
            rule.integrals.restore(state["integrals"][name])
            rule.tallies = [Tally(**tally) for tally in state["tallies"][name]]
            rule.totals.restore(state["totals"][name])
            rule.halves.restore(state["halves"][name])
        brackets = dict(state["brackets"])
        if self.doubled is not None:
            self.doubled.integrals.restore(state["doubled"]["integrals"])
            brackets[DOUBLED] = state["doubled"]["bracket"]
        self.saved = brackets if self.done % self.length else {}


# --- A run that is understood in two passes: steps are recorded as they come, and gone over from the last when the
# sizes of all that come after are known. Where there are phases, one more pass goes back from the end of each, over
# the steps until then.


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
        if self.second is None:
            return None
        rules = self.second.rules.items()
        return [{name: rule.tallies[step] for name, rule in rules} for step in range(self.second.length)]

    def recorded(self) -> Recording:
        return self.recording

    def error(self, rule: str, steps: int) -> Error | None:
        found = None if self.second is None else self.second.error(rule)
        return None if found is None else Error(found)

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        return None if self.second is None else self.second.half_by(rule)

    def by_step(self, rule: str) -> StepTotals:
        assert self.second is not None, "no step is understood before the second pass"
        return self.second.rules[rule].totals

    @property
    def state(self) -> dict[str, Any]:
        return {"second": None if self.second is None else self.second.state, "marks": states(self.noted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state["second"]
        self.noted = marks_from(state["marks"], self.recording.pull)
