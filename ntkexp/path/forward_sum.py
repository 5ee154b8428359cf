"""Forward sums: the path kernel 𝒦 and the contributions 𝒮 (see `path.integrals`),
summed during training, with an estimate of their error. They are sums over all steps,
or integrals over time along a gradient flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.on_disk import blocks, release_pages
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.domain import Domain
from ntkexp.path.integrals import (
    Integrals,
    PhaseEnd,
    StepTotals,
    Tally,
    phase_end_of,
    phase_end_states,
    restore_phase_ends,
)
from ntkexp.path.recording import Recording
from ntkexp.path.rule.base import Substep
from ntkexp.path.step import Step
from ntkexp.shapes import Weights

# --- The interface of all sums along a path.


class Error(NamedTuple):
    """The estimated error of the contributions 𝒮."""

    parts: float  # ‖𝒮 − 𝒮_integral‖, over all single contributions (see below)
    # error of the sums Σᵢ 𝒮(x, xᵢ); None if the sums are exact
    sums: float | None = None


class AbstractAccumulator(Resumable, ABC):
    """The base class of all sums over the steps of a path. The results 𝒦 and 𝒮 are
    complete after the last step, or after the backward pass if there is one."""

    @property
    @abstractmethod
    def integrals(self) -> Mapping[str, Integrals]:
        """The path kernel 𝒦 and the contributions 𝒮, by quadrature rule."""

    @abstractmethod
    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        """Add a step. Return the norms of its terms (a `Tally`) for each rule, or an
        empty dict if they are not computed now.

        `due` is True if a kernel snapshot is due at the step.
        """

    def close(self, step: Step) -> None:
        """Complete the sums when training ends before `step`, earlier than planned."""
        return

    def steps_back(
        self, end: Weights, step_sizes: Sequence[float]
    ) -> Iterator[tuple[int, int]]:
        """Run the backward pass, if this accumulator needs one.

        After each step, yield the number of completed steps and the number
        of all steps."""
        return iter(())

    @property
    def backward_tallies(self) -> Sequence[dict[str, Tally]] | None:
        """The tallies (norms of the terms) of all steps by rule, if the backward pass
        computes them. Otherwise None."""
        return None

    @property
    def phase_ends(self) -> Sequence[PhaseEnd]:
        """The contributions 𝒮 and the decay 𝒟 at the end
        of each phase except the last."""
        return ()

    def recorded(self) -> Recording | None:
        """Return the recorded steps, or None if the sum has no backward pass."""
        return None

    @abstractmethod
    def error(self, rule: str, steps: int) -> Error | None:
        """Return the estimated error of a quadrature rule's contributions after `steps`
        steps, or None."""

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        """Return the time, as a fraction of the path, at which half of each
        contribution has accumulated.

        Return None if it is not available.
        """
        return None

    @abstractmethod
    def by_step(self, rule: str) -> StepTotals:
        """Return the change of the outputs in each step, according to one rule."""


# --- The error of the single contributions 𝒮(x, xᵢ) by the secant rule. (Their sum over
# the examples i has no error.)
#
# Many matrices J̄ satisfy J̄Δθ = Δf. The exact contributions, 𝒮_integral, use one of
# them: the integral of the tangent Jacobian along the step. The mean secant Jacobian of
# n equal substeps differs from this integral by O(n⁻²). Let S_n be the contributions of
# one step, computed with n substeps. By Richardson's extrapolation, the error of S_n is
#
#     e = (S_2n − S_n) · 4/3        (4ᵏ⁺¹/(4ᵏ⁺¹ − 1) after k Romberg extrapolations)
#
# The error e is computed at m evenly spaced steps out of T. The errors of different
# steps may add up or cancel. With Σ over the m steps on the right side, an unbiased
# estimate of the squared norm of the sum of all T errors is
#
#     ‖Σ_s e_s‖² ≈ T/m Σ‖e‖² + T(T−1)/(m(m−1)) (‖Σe‖² − Σ‖e‖²)


@dataclass(kw_only=True)
class ErrorBar(Resumable):
    """The error of the contributions, measured on a sample of steps."""

    rule: str  # the rule whose error is measured
    coarse: tuple[Substep, ...]  # the quadrature with n substeps, for S_n
    fine: tuple[Substep, ...]  # the quadrature with 2n substeps, for S_2n
    # the error divided by S_2n − S_n: 4/3 without extrapolation
    richardson_factor: float
    every: int  # interval between the steps of the sample
    total: Float[Tensor, "query out train"]  # Σe, the errors of these steps
    squares: float = 0.0  # Σ‖e‖², over these steps

    checkpointed: ClassVar[tuple[str, ...]] = ("total", "squares")

    def measures(self, step: int) -> bool:
        """Return True if the error is measured at this step."""
        return step % self.every == self.every // 2

    def add(self, rows: slice, error: Float[Tensor, "chosen out train"]) -> None:
        """Add the error of one step, at the points in `rows`."""
        self.total[rows].add_(error)
        release_pages(self.total)
        self.squares += float(error.square().sum())

    def estimate(self, steps: int) -> float:
        """Estimate ‖𝒮 − 𝒮_integral‖ after `steps` steps. Return
        NaN if no step was measured."""
        m = sum(map(self.measures, range(steps)))
        if m == 0:
            return float("nan")
        squared_norm = sum(float(block.square().sum()) for block in blocks(self.total))
        alone = steps / m * self.squares
        if m == 1:
            return sqrt(steps * alone)
        pairs = steps * (steps - 1) / (m * (m - 1))
        crossed = pairs * (squared_norm - self.squares)
        return sqrt(max(alone + crossed, alone / steps))


@dataclass(frozen=True, kw_only=True)
class StepSum(AbstractAccumulator):
    """The sum over all steps, by several quadrature rules. The rules share the tapes
    (recorded forward passes) of each step."""

    domain: Domain
    rules: Mapping[str, Integrals]
    totals: Mapping[str, StepTotals]
    error_bar: ErrorBar | None = None

    checkpointed: ClassVar[tuple[str, ...]] = ("integrals", "totals", "error_bar")

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return self.rules

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        """Add one step at all blocks of points, for all quadrature rules."""
        tallies = {name: Tally() for name in self.rules}
        bar = self.error_bar
        for block in self.domain.blocks(step.segment):
            for name, integrals in self.rules.items():
                kernel, parts, shrunk = integrals.add(step, block)
                # Σᵢ Δ𝒮ᵢ + Δ𝒟, which is f(θ_{s+1}) − f(θ_s) if J̄ is the secant Jacobian
                summed = parts.sum(2)
                change = summed - shrunk
                tallies[name].add(block, kernel, parts, summed, expected=change)
                self.totals[name].add(step.index, block.rows, change)
            if bar is not None and bar.measures(step.index):
                # e = (S_2n − S_n) · richardson_factor
                fine, _ = block.kernel(bar.fine, step.right_factor)
                coarse, _ = block.kernel(bar.coarse, step.right_factor)
                error = self.rules[bar.rule].weighted(step, fine - coarse)
                bar.add(block.rows, error.mul_(step.step_size * bar.richardson_factor))
        return tallies

    def error(self, rule: str, steps: int) -> Error | None:
        if self.error_bar is None or rule != self.error_bar.rule:
            return None
        return Error(self.error_bar.estimate(steps))

    def by_step(self, rule: str) -> StepTotals:
        return self.totals[rule]


# --- The integrals over time along a gradient flow,
# by Gauss quadrature on each arc of length h:
#
#     𝒦 = ∫ K_t dt ≈ Σ_arcs h Σ_j w_j K(θ(t_j)),        𝒮 = −∫ K_t ℓ′(t) dt
#
# K(θ) is the tangent kernel. On a sample of steps, a quadrature with one more point per
# arc gives an estimate of the error.


RULE = "gauss"


@dataclass(frozen=True, kw_only=True)
class FlowIntegral(AbstractAccumulator):
    """The path kernel 𝒦 and the contributions 𝒮 by Gauss quadrature, with `points`
    points on each arc (a polynomial piece of the path)."""

    domain: Domain
    points: int
    rule: Integrals
    totals: StepTotals
    error_bar: ErrorBar | None = None

    checkpointed: ClassVar[tuple[str, ...]] = ("rule", "totals", "error_bar")

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return {RULE: self.rule}

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        before = self.rule.contributions.clone()
        change_before = self.rule.total_change()
        self.integrate(self.rule, step, self.points)
        self.totals.add(
            step.index, slice(None), self.rule.total_change() - change_before
        )
        bar = self.error_bar
        if bar is not None and bar.measures(step.index):
            zeros = map(torch.zeros_like, self.rule.parts)
            finer = Integrals(self.rule.substeps, *zeros)
            self.integrate(finer, step, self.points + 1)
            error = finer.contributions - (self.rule.contributions - before)
            # the error is NaN at points that are not attributed
            bar.add(slice(None), error.nan_to_num())
        return {}

    def integrate(self, integrals: Integrals, step: Step, points: int) -> None:
        """Integrate over the arcs of a step,
        with `points` quadrature points on each arc."""
        for point in step.quadrature_points(points):
            for block in self.domain.blocks(point.segment):
                integrals.add(point, block)

    def error(self, rule: str, steps: int) -> Error | None:
        if self.error_bar is None:
            return None
        return Error(self.error_bar.estimate(steps))

    def by_step(self, rule: str) -> StepTotals:
        return self.totals


@dataclass(kw_only=True)
class PhasedSum(AbstractAccumulator):
    """A forward sum for training in phases. It keeps a copy of the sums at the end of
    each phase."""

    accumulator: AbstractAccumulator
    switches: tuple[int, ...]
    finished_phases: list[PhaseEnd] = field(default_factory=list)

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return self.accumulator.integrals

    @property
    def phase_ends(self) -> Sequence[PhaseEnd]:
        return self.finished_phases

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        tallies = self.accumulator.add(step, due=due)
        if step.index + 1 in self.switches:
            self.finished_phases.append(phase_end_of(self.integrals))
        return tallies

    def error(self, rule: str, steps: int) -> Error | None:
        return self.accumulator.error(rule, steps)

    def by_step(self, rule: str) -> StepTotals:
        return self.accumulator.by_step(rule)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "accumulator": self.accumulator.state,
            "marks": phase_end_states(self.finished_phases),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.accumulator.restore(state["accumulator"])
        first = next(iter(self.integrals.values()))
        self.finished_phases = restore_phase_ends(state["marks"], first.contributions)
