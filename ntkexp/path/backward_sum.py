"""The sum backwards, for optimizers with memory: from the last step to the first, for a run whose steps were recorded,
and, in its core, for any stream of steps that are linear in their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.blocks import Block, Rows
from ntkexp.kernel.features.cancellation import credit, term_sizes
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.optimizer.base import IDLE, AbstractOptimizer, Coefficient, LinearStep, Mixing, spread
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import AbstractAccumulator, Error
from ntkexp.path.integrals import (
    Integrals,
    Mark,
    StepTotals,
    Tally,
    contract,
    integrals_at_zero,
    mark_of,
    marks_from,
    states,
    totals_at_zero,
)
from ntkexp.path.points import Points, cut, summed
from ntkexp.path.recording import Halves, Playback, Recording, halves_at_zero
from ntkexp.path.settings import Path
from ntkexp.path.step import Step
from ntkexp.path.step_kernel import StepBlock, kernel_between
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
#
# Where M mixes the weights of a matrix, as in θ ← (1 − d)θ − M(S ⊙ m + N ⊙ p) − r, MᵀJ̄ stands in for J̄ in U and V;
# −J̄r is a part that no gradient has. V is formed where α or N differ between the weights of a parameter, or M mixes
# them; else its two terms are multiplied one by one.


@dataclass(frozen=True, kw_only=True)
class StepBack:
    """A step as the backward sum needs it, of a run or of a followed loop."""

    start: Weights  # θ_s
    difference: Weights  # θ_{s+1} − θ_s
    linear: Mapping[str, LinearStep]  # of every parameter that was moved
    right: Sequence[
        Jacobian
    ]  # J of examples, or of what ℓ′ mixes of their outputs, at the weights they were called at
    factor: Mapping[str, float] | None = None  # c; None where it is in ℓ′ already
    beside: Weights = field(
        default_factory=dict
    )  # what was taken in beside the gradients of examples
    credit: Weights = field(
        default_factory=dict
    )  # 0 where a gradient is rounding, of parameters that have any


class TakenBack(NamedTuple):
    """What came of a step."""

    kernel: Float[Tensor, "probe out train out_"]  # ⟨V, c J⟩
    decay: Float[Tensor, "probe out"]
    pushed: Float[
        Tensor, "probe out"
    ]  # J̄Δθ, which is the change of the outputs if J̄ closes the step
    beside: Float[Tensor, "probe out"]  # −⟨V, ·⟩ of what was taken in beside
    shares: Sequence[
        ComponentShare
    ] = ()  # of each component in all this but `pushed`, where components are told apart


class ComponentShare(NamedTuple):
    """The terms of these inner products that the parameters of one component make."""

    kernel: Float[Tensor, "probe out train out_"]
    decay: Float[Tensor, "probe out"]
    beside: Float[Tensor, "probe out"]


@dataclass(kw_only=True)
class BackwardSum:
    """U after the steps taken back so far, and β of the one taken back last, which is the earliest in time.

    Where `components` are told apart, each the names of its parameters, what came of a step is the sum of their shares.
    """

    adjoint: Adjoint | None = None  # made when the first Jacobian is seen, and filled with `saved`
    carry: Mapping[str, float] = field(default_factory=dict)
    mixed: set[str] = field(
        default_factory=set
    )  # the parameters that some of these steps mixed, whose U are vectors
    saved: Sequence[Tensor] = ()  # U of a checkpoint
    components: Sequence[Collection[str]] = ()

    def take(self, step: StepBack, pieces: Iterable[tuple[float, Jacobian]]) -> TakenBack:
        """Take one step back. J̄ is the sum of the pieces, each a Jacobian and its weight."""
        linear = {name: step.linear.get(name, IDLE) for name in step.start}
        scale = {
            name: spread(each.momentum_scale, step.start[name]) for name, each in linear.items()
        }  # S
        ahead = {name: each.gradient_scale for name, each in linear.items()}  # N
        intake = {name: each.momentum_gain for name, each in linear.items()}  # α
        mixings = {
            name: each.mixing for name, each in linear.items() if each.mixing is not None
        }  # M
        self.mixed |= mixings.keys()
        forms_v = bool(self.mixed) or needs_v(ahead, intake, step.credit)
        rest = rests(linear, step.start)  # r
        straight: Adjoint | None = None  # N ⊙ J̄, where V is formed
        ahead_in_numbers = not forms_v and any(ahead.values())
        coupled = times({name: each.l2 for name, each in linear.items()}, step.start)  # λθ
        lost = times(
            {name: each.decoupled_decay for name, each in linear.items()}, step.start
        )  # dθ
        factor = step.factor or {}

        def right_of(names: Collection[str] | None) -> Iterator[Jacobian]:
            """J of examples, of some parameters; one after another, as all at once may be more than memory holds."""
            return (each.of(names) for each in step.right)

        # U ← S ⊙ J̄ + β U, piece by piece; and what comes of J̄ itself: J̄Δθ, −J̄·dθ, and the part of N ⊙ J̄ in V
        carry = common(self.carry)
        if carry is None and self.adjoint is not None:
            self.adjoint.shrink(self.carry)
        pushed = next(iter(step.start.values())).new_zeros(())
        parts = self.components or (None,)  # one, of all parameters, where they are not told apart
        kernel, decay, beside = ([pushed] * len(parts) for _ in range(3))
        for weight, whole in pieces:
            jacobian = (
                whole if not self.mixed else mixed_back(whole, self.mixed, mixings, step.start)
            )
            self.adjoint = self.adjoint or self.begun(jacobian, step.start)
            self.adjoint.accumulate(
                jacobian,
                {name: weight * each for name, each in scale.items()},
                1.0 if carry is None else carry,
            )
            carry = 1.0
            pushed = torch.add(pushed, whole.applied(step.difference), alpha=weight)
            if forms_v:
                straight = straight or zero_adjoint(jacobian, step.start)
                each_ahead = (
                    (name, spread(each, step.start[name])) for name, each in ahead.items()
                )
                straight.accumulate(
                    jacobian, {name: weight * each for name, each in each_ahead}, 1.0
                )
            for k, (names, some) in enumerate((names, whole.of(names)) for names in parts):
                decay[k] = decay[k] - weight * some.applied(lost) if lost else decay[k]
                beside[k] = beside[k] - weight * some.applied(rest) if rest else beside[k]
                if ahead_in_numbers:
                    part = some.scaled(in_numbers(ahead))
                    into = part if step.factor is None else part.scaled(factor)
                    kernel[k] = kernel[k] + weight * kernel_between(into, right_of(names), pushed)
                    decay[k] = decay[k] - weight * part.applied(coupled) if coupled else decay[k]
                    beside[k] = (
                        beside[k] - weight * part.applied(step.beside) if step.beside else beside[k]
                    )
        self.carry = {name: each.momentum_decay for name, each in linear.items()}
        assert self.adjoint is not None

        # V = α U + N ⊙ J̄, or U, which α multiplies below
        felt, numbers_in = formed(self.adjoint, intake, straight, step.start)

        # ⟨α U, c J⟩; where αc is one number for all parameters, it multiplies what U gives. And −⟨α U, λθ⟩, and the
        # same of what was taken in beside
        scales = {name: each * factor.get(name, 1.0) for name, each in numbers_in.items()}
        alike = common(scales)
        felt_of_examples = (
            felt.scaled(step.credit) if step.credit else felt
        )  # V where gradients are those of examples
        for k, names in enumerate(parts):
            into_v = (
                right_of(names)
                if alike is not None
                else (each.scaled(scales) for each in right_of(names))
            )
            share = kernel_between(felt_of_examples.of(names), into_v, pushed)
            kernel[k] = kernel[k] + (1.0 if alike is None else alike) * share
            for sums, vector in ((decay, coupled), (beside, step.beside)):
                if vector and felt.of(names).parts:
                    sums[k] = sums[k] - through(felt.of(names), vector, numbers_in)
        return summed_shares(kernel, decay, beside, pushed, told_apart=bool(self.components))

    def begun(self, jacobian: Jacobian, weights: Weights) -> Adjoint:
        """U before the first step back, or that of the checkpoint."""
        adjoint = zero_adjoint(jacobian, weights)
        for part, total in zip(adjoint.parts.values(), self.saved, strict=False):
            part.copy_(total)
        self.saved = ()
        return adjoint

    @property
    def state(self) -> list[Tensor]:
        """U, for a checkpoint."""
        return list(self.adjoint.parts.values()) if self.adjoint else list(self.saved)


def needs_v(
    ahead: Mapping[str, Coefficient], intake: Mapping[str, Coefficient], credit: Weights
) -> bool:
    """Whether V has to be formed: α or N differ between the weights of a parameter, or some gradients are rounding."""
    if any(isinstance(coefficient, Tensor) for coefficient in (*ahead.values(), *intake.values())):
        return True
    return bool(credit) and any(ahead.values())


def formed(
    adjoint: Adjoint, intake: Mapping[str, Coefficient], straight: Adjoint | None, weights: Weights
) -> tuple[Adjoint, dict[str, float]]:
    """Return V = α U + N ⊙ J̄ and factors of 1; or where V needs not be formed, U and the factors α."""
    if straight is None:
        return adjoint, in_numbers(intake)
    whole = adjoint.scaled({name: spread(each, weights[name]) for name, each in intake.items()})
    whole.add(straight)
    return whole, dict.fromkeys(intake, 1.0)


def summed_shares(
    kernel: Sequence[Tensor],
    decay: Sequence[Tensor],
    beside: Sequence[Tensor],
    pushed: Tensor,
    *,
    told_apart: bool,
) -> TakenBack:
    """What came of a step is the sum of what came of it by each component."""
    shares = [
        ComponentShare(products, shrunk.expand_as(pushed), other.expand_as(pushed))
        for products, shrunk, other in zip(kernel, decay, beside, strict=True)
    ]
    whole = ComponentShare(*(sum(terms[1:], start=terms[0]) for terms in zip(*shares, strict=True)))
    return TakenBack(whole.kernel, whole.decay, pushed, whole.beside, shares if told_apart else ())


def times(factors: Mapping[str, Coefficient], weights: Weights) -> Weights:
    """Each weight times its factor; nothing, if all of these are zero."""
    if not any(isinstance(factor, Tensor) or factor for factor in factors.values()):
        return {}
    return {name: weight * factors[name] for name, weight in weights.items()}


def mixed_back(
    jacobian: Jacobian, names: Set[str], mixings: Mapping[str, Mixing], weights: Weights
) -> Jacobian:
    """MᵀJ̄, in which the parameters that were ever mixed have rows."""

    def mixed(block: Block) -> Block:
        if not isinstance(block, Rows) or block.name not in mixings:
            return block
        matrices = block.rows.view(*block.rows.shape[:2], *weights[block.name].shape)
        return Rows(mixings[block.name].adjoint(matrices).flatten(2), block.name)

    return replace(jacobian, blocks=tuple(map(mixed, jacobian.with_rows(names, weights).blocks)))


def rests(linear: Mapping[str, LinearStep], weights: Weights) -> Weights:
    """r of every parameter; nothing, if none has any."""
    if all(each.residual is None for each in linear.values()):
        return {}
    return {
        n: torch.zeros_like(weights[n]) if each.residual is None else each.residual
        for n, each in linear.items()
    }


def in_numbers(coefficients: Mapping[str, Coefficient]) -> dict[str, float]:
    """Those of the coefficients that are one number for their parameter."""
    return {name: each for name, each in coefficients.items() if not isinstance(each, Tensor)}


def through(
    adjoint: Adjoint, vector: Weights, intake: Mapping[str, float]
) -> Float[Tensor, "probe out"]:
    """⟨αU, v⟩."""
    if (alike := common(intake)) is not None:
        return alike * adjoint.applied(vector)
    return adjoint.applied({name: intake[name] * part for name, part in vector.items()})


def common(numbers: Mapping[str, float]) -> float | None:
    """The number that all parameters have in common; None, if they have none.

    >>> common({"a": 0.9, "b": 0.9}), common({"a": 0.9, "b": 1.0}), common({})
    (0.9, None, 1.0)
    """
    first = next(iter(numbers.values()), 1.0)
    return first if all(number == first for number in numbers.values()) else None


# --- The second pass over a path whose optimizer remembers, from its last step to its first.
#
#     path kernel     𝒦(x, xᵢ) = Σ_s K_s(x, xᵢ)            [probe, out, train, out_]
#     contributions   𝒮(x, xᵢ) = −Σ_s K_s(x, xᵢ) ℓ′ᵢ(s)     [probe, out, train]
#
# The attributed points are taken in chunks, such that their U, by every rule, fits into the
# memory; every chunk goes over the whole recording.
#
# How well the parts are known is measured by the same pass with twice the pieces, at a sample of points:
#
#     e(x, ·) = (𝒮_2n(x, ·) − 𝒮_n(x, ·)) · 4/3,        ‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ_{m of Q points} ‖e(x, ·)‖²
#
# What a step's Jacobian is off by enters U, and through it the parts of every step before: a sample of steps would
# need a U for each. A point has a U of its own, so points are sampled, and each is measured over the whole path.


DOUBLED = "doubled"  # no rule's name


@dataclass(kw_only=True)
class RuleBack:
    """What a rule gives on the way back: sums over steps, by step, by stretch of the path; and U of the chunk."""

    integrals: Integrals
    totals: StepTotals
    tallies: list[Tally]  # for every step
    halves: Halves  # at the attributed points
    sum: BackwardSum = field(default_factory=BackwardSum)


@dataclass(kw_only=True)
class Doubled:
    """The integrals with twice the pieces at the points of a sample, which are some of those attributed."""

    rule: str  # whose error is measured
    integrals: Integrals
    sample: Int[Tensor, " sample"]
    gain: float
    place: Int[Tensor, " chosen"] | None = None  # those of the sample that are in the chunk at work
    points: Points | None = None  # these, if there are any
    sum: BackwardSum = field(default_factory=BackwardSum)


def sample_points(points: int, count: int) -> Int[Tensor, " sample"]:
    """So many of the points, evenly spread, as those of every split stand together.

    >>> sample_points(10, 4).tolist(), sample_points(2, 4).tolist()
    ([1, 3, 6, 8], [0, 1])
    """
    few = min(count, points)
    return (torch.arange(few) * points + points // 2) // max(few, 1)


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
            step = self.steps.step(index + 1)
            linear = self.optimizer.linear_steps(step.index, step.sizes, step.memory)
            carry = {name: each.momentum_decay for name, each in linear.items()}
        few = self.domain.explained.some(self.domain.attributed[chunk])
        for name, rule in self.rules.items():
            components = tuple(self.domain.components.values())
            rule.sum = BackwardSum(
                carry=carry, saved=self.saved.get(name, ()), components=components
            )
        if (doubled := self.doubled) is not None:
            (doubled.place,) = torch.where(
                (doubled.sample >= chunk.start) & (doubled.sample < chunk.stop)
            )
            doubled.sum, doubled.points = (
                BackwardSum(carry=carry, saved=self.saved.get(DOUBLED, ())),
                None,
            )
            if len(doubled.place):
                doubled.points = few.some(doubled.sample[doubled.place] - chunk.start)
        self.saved = {}
        return few

    def take(self, step: Step, points: Points, chunk: slice) -> None:
        """Take one step back at the points of a chunk, by every rule."""
        linear = self.optimizer.linear_steps(step.index, step.sizes, step.memory)
        start, difference = step.view.weights, step.segment.difference
        credited, rounding = told_from_rounding(step) if self.optimizer.divides else ({}, {})
        back = StepBack(
            start=start,
            difference=difference,
            linear=linear,
            right=step.view.right,
            beside=rounding,
            credit=credited,
        )
        block, rows = (
            StepBlock(points, step.segment, slice(0, len(points.inputs))),
            self.domain.rows[chunk],
        )
        for rule in self.rules.values():
            taken, parts = taken_back(rule.sum, back, rule.integrals, rows, step, block)
            summed = parts.sum(2)
            rule.tallies[step.index].add(block, taken.kernel, parts, summed, expected=taken.pushed)
            rule.halves.add(step.index, chunk, parts)
            rule.totals.add(step.index, rows, summed + taken.decay + taken.beside)
        if (
            (doubled := self.doubled) is not None
            and doubled.points is not None
            and doubled.place is not None
        ):
            block = StepBlock(doubled.points, step.segment, slice(0, len(doubled.points.inputs)))
            taken_back(doubled.sum, back, doubled.integrals, doubled.place, step, block)

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        doubled, rules = self.doubled, self.rules.items()
        return {
            "done": self.done,
            "integrals": {name: rule.integrals.state for name, rule in rules},
            "brackets": {name: rule.sum.state for name, rule in rules},
            "totals": {name: rule.totals.state for name, rule in rules},
            "halves": {name: rule.halves.state for name, rule in rules},
            "doubled": doubled
            and {"integrals": doubled.integrals.state, "bracket": doubled.sum.state},
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
        adjoints = dict(state["brackets"])
        if self.doubled is not None:
            self.doubled.integrals.restore(state["doubled"]["integrals"])
            adjoints[DOUBLED] = state["doubled"]["bracket"]
        self.saved = adjoints if self.done % self.length else {}


def taken_back(
    backward_sum: BackwardSum,
    back: StepBack,
    integrals: Integrals,
    rows: Int[Tensor, " probe"],
    step: Step,
    block: StepBlock,
) -> tuple[TakenBack, Float[Tensor, "probe out train"]]:
    """Take a step back by the rule of some integrals, at these rows of them; what came of it, and −K_s ℓ′."""
    taken = backward_sum.take(
        back, ((piece.weight, block.jacobian(piece)) for piece in integrals.pieces)
    )
    parts = contract(taken.kernel, step.output_gradient).neg_()
    integrals.kernel[rows] += taken.kernel
    integrals.contributions[rows] += parts
    integrals.decay[rows] += taken.decay
    if integrals.rounding is not None:
        integrals.rounding[rows] += taken.beside
    if integrals.by_component is not None:
        shares = [
            (contract(each.kernel, step.output_gradient).neg_(), each.decay)
            for each in taken.shares
        ]
        integrals.by_component.add(step.index, rows, shares, [each.beside for each in taken.shares])
    return taken, parts


def told_from_rounding(step: Step) -> tuple[Weights, Weights]:
    """Return where the gradient of a step is that of examples (1) or rounding (0), and the part that is rounding."""
    weights = step.view.weights
    pulled = list(step.view.pulled(step.output_gradient))
    gradient = summed(pulled, weights)
    credited = credit(gradient, term_sizes(pulled, weights))
    if not credited:
        return {}, {}
    rounding = {
        name: part * (1 - credited[name]) if name in credited else torch.zeros_like(part)
        for name, part in gradient.items()
    }
    return credited, rounding


# --- A run that is understood in two passes: steps are recorded as they come, and gone over from the last when the
# sizes of all that come after are known. Where there are phases, one more pass goes back from the end of each, over
# the steps until then.


@dataclass(kw_only=True)
class TwoPasses(AbstractAccumulator):
    """A recording, and the second pass over it, which is made when the sizes of all steps are known."""

    path: Path
    optimizer: AbstractOptimizer
    domain: Domain
    recording: Recording
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
        ends = [
            *(switch for switch in self.domain.switches if switch < len(step_sizes)),
            len(step_sizes),
        ]
        for number in range(len(self.noted), len(ends)):
            second = self.second = self.begin_pass(step_sizes[: ends[number]])
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

    def begin_pass(self, step_sizes: Sequence[float]) -> SecondPass:
        """A pass over these steps, before its first step back."""
        path, domain, rules = self.path, self.domain, {}
        zeros = domain.like.new_zeros
        for rule in path.rule:
            totals = totals_at_zero(domain, len(path.rule))
            totals.reach(len(step_sizes))
            integrals = integrals_at_zero(path.quadrature(rule), domain, len(path.rule))
            if self.optimizer.divides:
                integrals = replace(integrals, rounding=domain.sums(2))
            rules[rule.option] = RuleBack(
                integrals=integrals,
                totals=totals,
                tallies=[Tally() for _ in step_sizes],
                halves=halves_at_zero(
                    len(step_sizes), zeros(len(domain.attributed), *domain.shape[1:3])
                ),
            )
        doubled = None
        if path.closing is not None and path.finer:
            sample = sample_points(len(domain.attributed), path.error_samples).to(
                domain.attributed.device
            )
            integrals = Integrals(
                path.finer, *(zeros(len(sample), *domain.shape[1:axes]) for axes in (4, 3, 2))
            )
            doubled = Doubled(
                rule=path.closing.option, integrals=integrals, sample=sample, gain=path.gain
            )
        steps = Playback(
            recording=self.recording,
            points=domain.points,
            step_sizes=step_sizes,
            factors=self.optimizer.factors(self.recording.like),
            weight_decay=self.optimizer.weight_decay,
        )
        return SecondPass(
            steps=steps, optimizer=self.optimizer, domain=domain, rules=rules, doubled=doubled
        )

    @property
    def marks(self) -> Sequence[Mark]:
        return self.noted

    @property
    def late_tallies(self) -> Sequence[dict[str, Tally]] | None:
        if self.second is None:
            return None
        rules = self.second.rules.items()
        return [
            {name: rule.tallies[step] for name, rule in rules} for step in range(self.second.length)
        ]

    def recorded(self) -> Recording:
        return self.recording

    def error(self, rule: str, steps: int) -> Error | None:
        if self.second is None or (doubled := self.second.doubled) is None or rule != doubled.rule:
            return None
        contributions = self.second.rules[rule].integrals.contributions[self.domain.rows]
        difference = doubled.integrals.contributions - contributions[doubled.sample]
        return Error(
            doubled.gain * float(difference.norm()) * sqrt(len(contributions) / len(doubled.sample))
        )

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        if self.second is None:
            return None
        times = self.domain.like.new_full(self.domain.shape[:3], torch.nan)
        times[self.domain.rows] = self.second.rules[rule].halves.by(self.second.steps.step_sizes)
        return times

    def by_step(self, rule: str) -> StepTotals:
        assert self.second is not None, "no step is understood before the second pass"
        return self.second.rules[rule].totals

    @property
    def state(self) -> dict[str, Any]:
        return {
            "second": None if self.second is None else self.second.state,
            "marks": states(self.noted),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state["second"]
        self.noted = marks_from(state["marks"], self.recording.pull)
