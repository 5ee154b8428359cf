"""The methods to sum the path kernel 𝒦 and the contributions 𝒮 along a path, their
memory costs, and the choice of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer, Memory
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import (
    RULE,
    AbstractAccumulator,
    ErrorBar,
    FlowIntegral,
    StepSum,
)
from ntkexp.path.integrals import integrals_at_zero, totals_at_zero
from ntkexp.path.recording import AllocateRows, new_recording
from ntkexp.path.rule.base import Left
from ntkexp.path.settings import Path
from ntkexp.path.snapshot_sum import Moments, SnapshotSum, Track
from ntkexp.path.two_passes import TwoPasses
from ntkexp.shapes import Weights


class Costs(NamedTuple):
    """The number of arrays that a method holds in memory at once, and the number of
    tapes (recorded forward passes) per step."""

    rules: int  # number of arrays of contributions: one for each quadrature rule
    kernels: int  # number of path kernels and kernel snapshots
    errors: int  # number of error arrays in the shape of contributions
    # number of positions in a step at which a block is evaluated, including start and
    # end
    tapes: int
    doubled: bool = False  # True if the error estimate needs a second set of adjoints


class AbstractIntegration(ABC):
    """A method to sum 𝒦 and 𝒮 along a path.

    The constructor raises if the method does not support the settings of the path.
    """

    path: Path
    # number of passes over the path
    passes: ClassVar[int] = 1

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """The memory costs, for the memory plan of a run."""

    @property
    def details(self) -> Mapping[str, str]:
        """The settings of each quadrature rule as text, by the name of the rule."""
        return self.path.details

    def facts(self, memory: Memory) -> dict[str, float]:
        """Return numbers about the path for the report, by name. `memory` is the
        optimizer's state after training."""
        return {}

    @abstractmethod
    def begin(
        self, domain: Domain, weights: Weights, allocate: AllocateRows
    ) -> AbstractAccumulator:
        """Return an accumulator with sums of zero,
        for a path that starts at these weights."""


@dataclass(frozen=True, kw_only=True)
class EveryStep(AbstractIntegration):
    """The sum over the kernels of all steps, for optimizers without momentum."""

    path: Path

    @property
    def costs(self) -> Costs:
        rules = len(self.path.rule)
        return Costs(
            rules=rules,
            kernels=rules * self.path.keeps_kernels,
            errors=int(bool(self.path.finer_quadrature)),
            tapes=self.path.tapes_with_error,
        )

    def begin(
        self, domain: Domain, weights: Weights, allocate: AllocateRows
    ) -> StepSum:
        path = self.path
        error_bar = None
        if path.closing_rule is not None and path.finer_quadrature:
            error_bar = ErrorBar(
                rule=path.closing_rule.option,
                coarse=path.quadrature(path.closing_rule),
                fine=path.finer_quadrature,
                richardson_factor=path.richardson_factor,
                every=path.sampled_every(domain.steps),
                total=domain.zeros(3),
            )
        count = len(path.rule)
        rules = {}
        for rule in path.rule:
            rules[rule.option] = integrals_at_zero(path.quadrature(rule), domain, count)
        totals = {name: totals_at_zero(domain, len(rules)) for name in rules}
        return StepSum(domain=domain, rules=rules, totals=totals, error_bar=error_bar)


@dataclass(frozen=True, kw_only=True)
class Snapshots(AbstractIntegration):
    """The sum over kernel snapshots at a few steps, for optimizers without momentum.

    The kernel is interpolated between snapshots. The derivatives ℓ′ of the loss by the
    outputs are known at every step, so sums of ℓ′ over steps are exact. For each path
    kernel, memory holds two snapshots, from which the error is estimated."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.explains_outputs:
            raise Mistake(
                f"path.measure={self.path.measure.option}: snapshots interpolate kernels of "
                "the outputs, not of a measure; use path.every=1"
            )
        if self.path.by is not None:
            raise Mistake(
                f"path.by={self.path.by}: snapshots interpolate the whole kernel, not its "
                "components; use path.every=1"
            )

    @property
    def costs(self) -> Costs:
        rules = len(self.path.rule)
        return Costs(rules, 3 * rules, errors=rules, tapes=len(self.path.positions(())))

    @property
    def details(self) -> Mapping[str, str]:
        return {
            rule: f"{detail} snapshots".lstrip()
            for rule, detail in self.path.details.items()
        }

    def begin(
        self, domain: Domain, weights: Weights, allocate: AllocateRows
    ) -> SnapshotSum:
        tracks = {
            rule.option: Track(
                integrals=integrals_at_zero(self.path.quadrature(rule), domain),
                totals=totals_at_zero(domain, len(self.path.rule)),
                latest=domain.zeros(4),
                pulled=domain.zeros(2),
                before=domain.zeros(4),
                error=domain.zeros(3),
            )
            for rule in self.path.rule
        }
        return SnapshotSum(
            domain=domain,
            tracks=tracks,
            moments=Moments(
                pull=domain.zero_output_gradient(),
                late_pull=domain.zero_output_gradient(),
            ),
            arriving=domain.zero_output_gradient(),
            last=domain.steps - 1,
        )


@dataclass(frozen=True, kw_only=True)
class AlongFlow(AbstractIntegration):
    """The integral over time along a gradient flow, by Gauss quadrature on each arc (a
    polynomial piece of the path)."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                "path.every=snapshots: a flow is integrated over time on each of its arcs, "
                "not step by step; use path.every=1 (path.quadrature_points and path.queries "
                "limit its cost), or optimizer=gd"
            )

    @property
    def costs(self) -> Costs:
        errors = int(bool(self.path.error_samples))
        tapes = self.path.tapes_with_error
        # the error estimate needs a second path kernel
        return Costs(rules=1, kernels=1 + errors, errors=errors, tapes=tapes)

    @property
    def details(self) -> Mapping[str, str]:
        return {RULE: f"points={self.path.quadrature_points} in time"}

    def facts(self, memory: Memory) -> dict[str, float]:
        if not memory:
            return {}
        arcs = memory["controller"]
        return {"flow_error": float(arcs["error"] / arcs["way"])}

    def begin(
        self, domain: Domain, weights: Weights, allocate: AllocateRows
    ) -> FlowIntegral:
        error_bar = None
        if self.path.error_samples:
            every = self.path.sampled_every(domain.steps)
            error_bar = ErrorBar(
                rule=RULE,
                coarse=(),
                fine=(),
                richardson_factor=1.0,
                every=every,
                total=domain.zeros(3),
            )
        tangent = integrals_at_zero(Left().quadrature(1, 1, 0), domain)
        totals = totals_at_zero(domain, 1)
        return FlowIntegral(
            domain=domain,
            points=self.path.quadrature_points,
            rule=tangent,
            totals=totals,
            error_bar=error_bar,
        )


@dataclass(frozen=True, kw_only=True)
class Backward(AbstractIntegration):
    """The sum from the last step to the first, for optimizers with momentum.

    A first pass trains and records the steps. The second pass sums. Memory holds an
    adjoint (see `path.backward_sum`) for each attributed point and output."""

    path: Path
    optimizer: AbstractOptimizer
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                f"path.every=snapshots: optimizer={self.optimizer.option} carries past "
                "gradients from step to step, so every step is needed; use path.every=1 "
                "(path.attributed limits its cost), or optimizer=gd or sgd"
            )

    @property
    def costs(self) -> Costs:
        rules = len(self.path.rule)
        tapes = self.path.tapes_with_error
        return Costs(
            rules,
            rules,
            errors=0,
            tapes=tapes,
            doubled=bool(self.path.finer_quadrature),
        )

    def begin(
        self, domain: Domain, weights: Weights, allocate: AllocateRows
    ) -> TwoPasses:
        records = self.optimizer.records
        if self.path.effects:
            records = (*records, *self.optimizer.differentiated)
        recording = new_recording(
            domain.steps, weights, records, domain.zero_output_gradient(), allocate
        )
        return TwoPasses(
            path=self.path, optimizer=self.optimizer, domain=domain, recording=recording
        )


def fair_counts(count: int, sizes: Sequence[int]) -> list[int]:
    """Divide `count` attributed points evenly among groups with the given sizes.

    If a group has fewer points than its share,
    the other groups get the remaining points.

    >>> fair_counts(64, [128, 128, 101])
    [22, 21, 21]
    >>> fair_counts(64, [8, 100, 100]), fair_counts(64, [8, 8])
    ([8, 28, 28], [8, 8])
    """
    counts = [0] * len(sizes)
    while (left := count - sum(counts)) > 0:
        unfilled = [k for k, size in enumerate(sizes) if counts[k] < size]
        if not unfilled:
            break
        for turn, k in enumerate(unfilled):
            share = left // len(unfilled) + (turn < left % len(unfilled))
            counts[k] += min(share, sizes[k] - counts[k])
    return counts


def choose_integration(optimizer: AbstractOptimizer, path: Path) -> AbstractIntegration:
    """Return the integration method for an optimizer and the settings
    of a path, or raise.

    >>> from ntkexp.optimizer.descent import Adam
    >>> from ntkexp.path.rule.base import Left
    >>> choose_integration(Adam(), Path(rule=(Left(),))).passes
    2
    """
    if optimizer.needs_kernels and not path.keeps_kernels:
        raise Mistake(
            f"path.kernels={path.kernels}: optimizer={optimizer.option} needs the kernels of "
            "all steps; use optimizer=gd or sgd, or path.kernels=all"
        )
    if optimizer.flows:
        return AlongFlow(path=path)
    if optimizer.needs_backward_sum:
        return Backward(path=path, optimizer=optimizer)
    if path.every == "snapshots":
        return Snapshots(path=path)
    return EveryStep(path=path)
