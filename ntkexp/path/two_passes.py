"""The path kernel 𝒦 and the contributions 𝒮 for an optimizer with momentum, in two
passes over the path.

During training, each step is recorded. Then the backward sum goes over the recording
from the last step to the first. It computes

    path kernel     𝒦(x, xᵢ) = Σ_s K_s(x, xᵢ)            [query, out, train, out_]
    contributions   𝒮(x, xᵢ) = −Σ_s K_s(x, xᵢ) ℓ′ᵢ(s)     [query, out, train]

K_s is the kernel of `backward_sum`, and ℓ′ᵢ(s) the derivative of the loss by the outputs
of example i. The attributed points are processed in chunks, so that their adjoints fit
into memory. Each chunk requires a pass over the whole recording. If training has
phases, each phase requires separate passes, which begin at the end of the phase.

Let 𝒮_n be the contributions with n substeps per step. To estimate the error of 𝒮_n,
𝒮_2n is also computed, at a sample of m of the Q points x. As in `forward_sum`,

    e(x, ·) = (𝒮_2n(x, ·) − 𝒮_n(x, ·)) · 4/3,  ‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ_{m of Q points} ‖e(x, ·)‖²

The forward sum uses a sample of steps instead of points. This is not possible here,
because an error of the Jacobian at one step enters the adjoint, and so the contributions
of all earlier steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import split_range
from ntkexp.kernel.features.cancellation import credit, term_sizes
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.backward_sum import BackwardStep, BackwardSum, StepResult
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import AbstractAccumulator, Error
from ntkexp.path.integrals import (
    Integrals,
    PhaseEnd,
    StepTotals,
    Tally,
    contract,
    integrals_at_zero,
    phase_end_of,
    phase_end_states,
    restore_phase_ends,
    totals_at_zero,
)
from ntkexp.path.points import Points, total_gradient
from ntkexp.path.recording import Halves, Playback, Recording, halves_at_zero
from ntkexp.path.rule.base import AbstractRule
from ntkexp.path.settings import Path
from ntkexp.path.step import Step
from ntkexp.path.step_kernel import StepBlock
from ntkexp.shapes import Weights


@dataclass(kw_only=True)
class RulePass(Resumable):
    """The path integrals for one quadrature rule, and the backward sum for the current
    chunk of points."""

    integrals: Integrals
    totals: StepTotals
    tallies: list[Tally]  # norms of the terms of each step
    halves: Halves  # magnitudes of contributions by time, at the attributed points
    sum: BackwardSum = field(default_factory=BackwardSum)

    def add(
        self,
        step: Step,
        back: BackwardStep,
        block: StepBlock,
        rows: Int[Tensor, " chunk"],
        chunk: slice,
    ) -> None:
        """Add one step at the points of a chunk."""
        result, parts = add_step(self.integrals, self.sum, step, back, block, rows)
        terms = result.terms
        summed_parts = parts.sum(2)
        change = summed_parts + terms.decay + terms.rounding
        tally = self.tallies[step.index]
        tally.add(block, terms.kernel, parts, summed_parts, expected=result.change)
        self.halves.add(step.index, chunk, parts)
        self.totals.add(step.index, rows, change)

    @property
    def state(self) -> dict[str, Any]:
        """The sums and the adjoint U, for a checkpoint."""
        return {
            "integrals": self.integrals.state,
            "totals": self.totals.state,
            "tallies": [asdict(tally) for tally in self.tallies],
            "halves": self.halves.state,
            "adjoint": self.sum.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.integrals.restore(state["integrals"])
        self.totals.restore(state["totals"])
        self.tallies = [Tally(**tally) for tally in state["tallies"]]
        self.halves.restore(state["halves"])
        self.sum.saved = state["adjoint"]


@dataclass(kw_only=True)
class FinerPass(Resumable):
    """The sums with twice the substeps, at a sample of the attributed points."""

    rule: str  # the rule whose error is measured
    integrals: Integrals
    # positions of the sample in the list of attributed points
    sample: Int[Tensor, " sample"]
    richardson_factor: float  # 4/3: the error is 4/3 (𝒮_2n − 𝒮_n)
    # positions in `sample` of the points that belong to the current chunk
    rows: Int[Tensor, " chosen"] | None = None
    points: Points | None = None  # the points at `rows`
    sum: BackwardSum = field(default_factory=BackwardSum)

    def begin_chunk(self, points: Points, chunk: slice) -> None:
        """Select the points of the sample that belong to a chunk."""
        inside = (self.sample >= chunk.start) & (self.sample < chunk.stop)
        (self.rows,) = torch.where(inside)
        self.points = None
        if len(self.rows):
            self.points = points.select(self.sample[self.rows] - chunk.start)

    def add(self, step: Step, back: BackwardStep) -> None:
        """Add one step at the selected points."""
        if self.points is None or self.rows is None:
            return
        block = StepBlock(self.points, step.segment, slice(0, len(self.points.inputs)))
        add_step(self.integrals, self.sum, step, back, block, self.rows)

    @property
    def state(self) -> dict[str, Any]:
        """The sums and the adjoint U, for a checkpoint."""
        return {"integrals": self.integrals.state, "adjoint": self.sum.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.integrals.restore(state["integrals"])
        self.sum.saved = state["adjoint"]


def add_step(
    integrals: Integrals,
    backward_sum: BackwardSum,
    step: Step,
    back: BackwardStep,
    block: StepBlock,
    rows: Int[Tensor, " chosen"],
) -> tuple[StepResult, Float[Tensor, "chosen out train"]]:
    """Add one step to the rows `rows` of the integrals.

    Return the terms of the step in the backward sum, and its contributions −K_s ℓ′.
    """
    substeps = (
        (substep.weight, block.jacobian(substep)) for substep in integrals.substeps
    )
    result = backward_sum.add(back, substeps)
    parts = contract(result.terms.kernel, step.output_gradient).neg_()

    integrals.kernel[rows] += result.terms.kernel
    integrals.contributions[rows] += parts
    integrals.decay[rows] += result.terms.decay
    if integrals.rounding is not None:
        integrals.rounding[rows] += result.terms.rounding
    if integrals.by_component is not None:
        shares = []
        for terms in result.by_component:
            contributions = contract(terms.kernel, step.output_gradient).neg_()
            shares.append((contributions, terms.decay))
        rounding = [terms.rounding for terms in result.by_component]
        integrals.by_component.add(step.index, rows, shares, rounding)
    return result, parts


def rounding_of(step: Step) -> tuple[Weights, Weights]:
    """Find the elements of a step's gradient that are only rounding error. Return the
    credit of all elements (0 for rounding errors, else 1), and the gradient with zeros
    in place of the other elements.

    Return two empty dicts if there are no such elements."""
    weights = step.view.weights
    pulled = list(step.view.loss_gradients(step.output_gradient))
    gradient = total_gradient(pulled, weights)
    credited = credit(gradient, term_sizes(pulled, weights))
    if not credited:
        return {}, {}
    rounding = {}
    for name, part in gradient.items():
        rounding[name] = torch.zeros_like(part)
        if name in credited:
            rounding[name] = part * (1 - credited[name])
    return credited, rounding


@dataclass(kw_only=True)
class SecondPass(Resumable):
    """The passes from the last step to the first, one for each chunk of points. `done`
    is the number of completed steps in all passes."""

    steps: Playback
    optimizer: AbstractOptimizer
    domain: Domain
    rules: dict[str, RulePass]
    finer: FinerPass | None
    done: int = 0
    points: Points | None = None  # points of the current chunk

    checkpointed: ClassVar[tuple[str, ...]] = ("done", "rules", "finer")

    @property
    def length(self) -> int:
        return len(self.steps.step_sizes)

    @property
    def chunks(self) -> list[slice]:
        """The attributed points, cut into chunks that fit into memory."""
        return split_range(0, len(self.domain.attributed), self.domain.chunk)

    @property
    def integrals(self) -> dict[str, Integrals]:
        return {name: rule.integrals for name, rule in self.rules.items()}

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Add the remaining steps.

        After each step, yield the number of completed steps and the number
        of all steps."""
        chunks = self.chunks
        total = len(chunks) * self.length
        end = None
        while self.done < total:
            number, turn = divmod(self.done, self.length)
            index = self.length - 1 - turn
            if turn == 0 or self.points is None:
                self.points = self.begin_chunk(chunks[number], index)
                end = None
            step = self.steps.step(index, end=end)
            self.add(step, self.points, chunks[number])
            end = step.view.weights  # the end of the previous step
            self.done += 1
            yield self.done, total

    def begin_chunk(self, chunk: slice, index: int) -> Points:
        """Prepare the backward sums of a chunk at step `index`,
        and return the points of the chunk.

        At the last step the adjoint U is zero.
        At an earlier step it is restored from the checkpoint."""
        points = self.domain.explained.select(self.domain.attributed[chunk])
        if self.finer is not None:
            self.finer.begin_chunk(points, chunk)
        resumed = index + 1 < self.length
        momentum_decay = {}
        if resumed:
            later = self.steps.step(index + 1)
            linear = self.optimizer.linear_steps(later.index, later.sizes, later.memory)
            momentum_decay = {name: one.momentum_decay for name, one in linear.items()}

        components = tuple(self.domain.components.values())

        def new_sum(
            before: BackwardSum, components: tuple[frozenset[str], ...] = ()
        ) -> BackwardSum:
            saved = before.saved if resumed else ()
            return BackwardSum(
                momentum_decay=momentum_decay, saved=saved, components=components
            )

        for rule in self.rules.values():
            rule.sum = new_sum(rule.sum, components)
        if self.finer is not None:
            self.finer.sum = new_sum(self.finer.sum)
        return points

    def add(self, step: Step, points: Points, chunk: slice) -> None:
        """Add one step at the points of a chunk, for all quadrature rules."""
        credited: Weights = {}
        rounding: Weights = {}
        if self.optimizer.divides:
            credited, rounding = rounding_of(step)
        back = BackwardStep(
            start=step.view.weights,
            difference=step.segment.difference,
            linear=self.optimizer.linear_steps(step.index, step.sizes, step.memory),
            right=step.view.train_jacobians,
            rounding=rounding,
            credit=credited,
        )
        block = StepBlock(points, step.segment, slice(0, len(points.inputs)))
        for rule in self.rules.values():
            rule.add(step, back, block, self.domain.rows[chunk], chunk)
        if self.finer is not None:
            self.finer.add(step, back)


def sample_points(points: int, count: int) -> Int[Tensor, " sample"]:
    """Pick `count` evenly spaced indices, so that every split is sampled.

    >>> sample_points(10, 4).tolist(), sample_points(2, 4).tolist()
    ([1, 3, 6, 8], [0, 1])
    """
    few = min(count, points)
    return (torch.arange(few) * points + points // 2) // max(few, 1)


@dataclass(kw_only=True)
class TwoPasses(AbstractAccumulator):
    """A recording of all steps, and the backward passes after the last step."""

    path: Path
    optimizer: AbstractOptimizer
    domain: Domain
    recording: Recording
    second: SecondPass | None = None
    # state of the backward pass, from a checkpoint
    saved: Mapping[str, Any] | None = None
    finished_phases: list[PhaseEnd] = field(default_factory=list)

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        if self.second is None:
            return {}
        return self.second.integrals

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        self.recording.write(step)
        return {}

    def steps_back(
        self, end: Weights, step_sizes: Sequence[float]
    ) -> Iterator[tuple[int, int]]:
        length = len(step_sizes)
        self.recording.close(length, end)
        ends = [switch for switch in self.domain.switches if switch < length]
        ends.append(length)
        for number in range(len(self.finished_phases), len(ends)):
            is_last = number + 1 == len(ends)
            second = self.begin_pass(step_sizes[: ends[number]], measures_error=is_last)
            self.second = second
            # If the chunks have another size (because of another memory_gb), the
            # completed steps belong to other points. The pass then starts again.
            if self.saved is not None and self.saved.get("chunk") == self.domain.chunk:
                second.restore(self.saved)
            self.saved = None
            chunks = len(second.chunks)
            for done, _ in second.steps_back():
                yield chunks * sum(ends[:number]) + done, chunks * sum(ends)
            if not is_last:
                self.finished_phases.append(phase_end_of(second.integrals))

    def begin_pass(
        self, step_sizes: Sequence[float], *, measures_error: bool
    ) -> SecondPass:
        """Prepare a backward pass over these steps,
        with an error estimate if `measures_error`."""
        steps = Playback(
            recording=self.recording,
            points=self.domain.points,
            step_sizes=step_sizes,
            factors=self.optimizer.factors(self.recording.like),
            weight_decay=self.optimizer.weight_decay,
        )
        passes = {
            rule.option: self.rule_pass(rule, len(step_sizes))
            for rule in self.path.rule
        }
        return SecondPass(
            steps=steps,
            optimizer=self.optimizer,
            domain=self.domain,
            rules=passes,
            finer=self.finer_pass() if measures_error else None,
        )

    def rule_pass(self, rule: AbstractRule, steps: int) -> RulePass:
        """Return sums of zero for one quadrature rule and a path of `steps` steps."""
        domain = self.domain
        rules = len(self.path.rule)
        totals = totals_at_zero(domain, rules)
        totals.cover(steps)
        integrals = integrals_at_zero(self.path.quadrature(rule), domain, rules)
        if self.optimizer.divides:
            integrals = replace(integrals, rounding=domain.sums(2))
        parts = domain.like.new_zeros(len(domain.attributed), *domain.shape[1:3])
        return RulePass(
            integrals=integrals,
            totals=totals,
            tallies=[Tally() for _ in range(steps)],
            halves=halves_at_zero(steps, parts),
        )

    def finer_pass(self) -> FinerPass | None:
        """Return the sums for the error estimate, which start at zero.

        Return None if no error estimate is requested, or if no quadrature rule closes
        the steps (gives the exact change of the outputs)."""
        path = self.path
        domain = self.domain
        if path.closing_rule is None or not path.finer_quadrature:
            return None
        sample = sample_points(len(domain.attributed), path.error_samples)
        zeros = (
            domain.like.new_zeros(len(sample), *domain.shape[1:axes])
            for axes in (4, 3, 2)
        )
        return FinerPass(
            rule=path.closing_rule.option,
            integrals=Integrals(path.finer_quadrature, *zeros),
            sample=sample.to(domain.attributed.device),
            richardson_factor=path.richardson_factor,
        )

    @property
    def phase_ends(self) -> Sequence[PhaseEnd]:
        return self.finished_phases

    @property
    def backward_tallies(self) -> Sequence[dict[str, Tally]] | None:
        if self.second is None:
            return None
        rules = self.second.rules
        by_step = zip(*(rule.tallies for rule in rules.values()), strict=True)
        return [dict(zip(rules, tallies, strict=True)) for tallies in by_step]

    def recorded(self) -> Recording:
        return self.recording

    def error(self, rule: str, steps: int) -> Error | None:
        if self.second is None:
            return None
        finer = self.second.finer
        if finer is None or finer.rule != rule:
            return None
        integrals = self.second.rules[rule].integrals
        contributions = integrals.contributions[self.domain.rows]

        # The error of 𝒮 with n substeps, ‖𝒮_2n − 𝒮_n‖ · 4/3 · √(Q/m), estimated at m of
        # the Q points. 4/3 is Richardson's factor without Romberg extrapolation.
        difference = finer.integrals.contributions - contributions[finer.sample]
        points = len(contributions) / len(finer.sample)
        return Error(finer.richardson_factor * float(difference.norm()) * sqrt(points))

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        if self.second is None:
            return None
        halves = self.second.rules[rule].halves
        times = self.domain.like.new_full(self.domain.shape[:3], torch.nan)
        times[self.domain.rows] = halves.half_times(self.second.steps.step_sizes)
        return times

    def by_step(self, rule: str) -> StepTotals:
        assert self.second is not None, "the second pass has not begun"
        return self.second.rules[rule].totals

    @property
    def state(self) -> dict[str, Any]:
        return {
            "second": None
            if self.second is None
            else {**self.second.state, "chunk": self.domain.chunk},
            "marks": phase_end_states(self.finished_phases),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state["second"]
        self.finished_phases = restore_phase_ends(
            state["marks"], self.recording.output_gradient_like
        )
