"""The ways to integrate a path, each with what it refuses, what it costs and what it starts from, and which one is
chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer, Memory
from ntkexp.path.backward_sum import TwoPasses
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import RULE, AbstractAccumulator, ErrorBar, FlowIntegral, StepSum
from ntkexp.path.integrals import integrals_at_zero, totals_at_zero
from ntkexp.path.recording import Room, new_recording
from ntkexp.path.rule.base import Left
from ntkexp.path.settings import Path
from ntkexp.path.snapshot_sum import Moments, SnapshotSum, Track
from ntkexp.shapes import Weights


class Costs(NamedTuple):
    """What is held at once, and what is read of a step."""

    rules: int  # each with contributions of its own
    kernels: int  # path kernels and snapshots
    errors: int  # sums like contributions that tell their error
    tapes: int  # positions inside a step at which a block is read, both ends included
    doubled: bool = False  # whether the error takes adjoints of its own


class AbstractIntegration(ABC):
    """One of the ways; what an optimizer or the settings of a path do not go with is refused when it is made."""

    path: Path
    passes: ClassVar[int] = (
        1  # how often the path is gone over; a point more costs little where that is once
    )

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """By these a run's memory is planned."""

    @property
    def details(self) -> Mapping[str, str]:
        """The settings that concern each rule by which there will be integrals, in words."""
        return self.path.details

    def facts(self, memory: Memory) -> dict[str, float]:
        """What the optimizer's memory says of the path when it is behind."""
        return {}

    @abstractmethod
    def begin(self, domain: Domain, weights: Weights, room: Room) -> AbstractAccumulator:
        """What takes in the steps from these weights on."""


@dataclass(frozen=True, kw_only=True)
class EveryStep(AbstractIntegration):
    """The kernel of every step, for optimizers that remember nothing: it costs a reading of each by each rule."""

    path: Path

    @property
    def costs(self) -> Costs:
        path, rules = self.path, len(self.path.rule)
        kernels, tapes = rules if path.keeps_kernels else 0, len(path.positions(path.finer))
        return Costs(rules, kernels, errors=1 if path.finer else 0, tapes=tapes)

    def begin(self, domain: Domain, weights: Weights, room: Room) -> StepSum:
        path, error_bar = self.path, None
        if path.closing is not None and path.finer:
            error_bar = ErrorBar(
                rule=path.closing.option,
                coarse=path.quadrature(path.closing),
                fine=path.finer,
                gain=path.gain,
                every=path.sampled_every(domain.steps),
                total=domain.zeros(3),
            )
        rules = {
            rule.option: integrals_at_zero(path.quadrature(rule), domain, len(path.rule))
            for rule in path.rule
        }
        totals = {name: totals_at_zero(domain, len(rules)) for name in rules}
        return StepSum(domain=domain, rules=rules, totals=totals, error_bar=error_bar)


@dataclass(frozen=True, kw_only=True)
class Snapshots(AbstractIntegration):
    """The kernel at some steps, with exact moments of the loss, for optimizers that remember nothing.

    It holds two snapshots beside each path kernel, and knows its error by them.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.explains_outputs:
            raise Mistake(
                f"path.measure={self.path.measure.option}: between snapshots kernels of outputs are interpolated, not "
                "those of a measure; use path.every=1"
            )
        if self.path.by is not None:
            raise Mistake(
                f"path.by={self.path.by}: between snapshots kernels of the whole are interpolated, not those of "
                "components; use path.every=1"
            )

    @property
    def costs(self) -> Costs:
        rules = len(self.path.rule)
        return Costs(rules, 3 * rules, errors=rules, tapes=len(self.path.positions(())))

    @property
    def details(self) -> Mapping[str, str]:
        return {rule: f"{detail} snapshots".lstrip() for rule, detail in self.path.details.items()}

    def begin(self, domain: Domain, weights: Weights, room: Room) -> SnapshotSum:
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
            moments=Moments(pull=domain.no_pull(), late_pull=domain.no_pull()),
            arriving=domain.no_pull(),
            last=domain.steps - 1,
        )


@dataclass(frozen=True, kw_only=True)
class AlongFlow(AbstractIntegration):
    """The integral over time, for an optimizer whose weights move on a curve: `path.nodes` readings of every arc."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                "path.every=snapshots: a flow is integrated over time on each of its arcs, not step by step; use "
                "path.every=1 (path.nodes and path.probes limit its cost), or optimizer=gd"
            )

    @property
    def costs(self) -> Costs:
        errors = 1 if self.path.error_samples else 0
        tapes = len(self.path.positions(self.path.finer))
        return Costs(
            1, 1 + errors, errors, tapes
        )  # if there is an error, a finer kernel is at work

    @property
    def details(self) -> Mapping[str, str]:
        return {RULE: f"nodes={self.path.nodes} in time"}

    def facts(self, memory: Memory) -> dict[str, float]:
        if not memory:
            return {}
        arcs = memory["controller"]
        return {"flow_error": float(arcs["error"] / arcs["way"])}

    def begin(self, domain: Domain, weights: Weights, room: Room) -> FlowIntegral:
        error_bar = None
        if self.path.error_samples:
            every = self.path.sampled_every(domain.steps)
            error_bar = ErrorBar(
                rule=RULE, coarse=(), fine=(), gain=1.0, every=every, total=domain.zeros(3)
            )
        tangent = integrals_at_zero(Left().quadrature(1, 1, 0), domain)
        totals = totals_at_zero(domain, 1)
        return FlowIntegral(
            domain=domain, nodes=self.path.nodes, rule=tangent, totals=totals, error_bar=error_bar
        )


@dataclass(frozen=True, kw_only=True)
class Backward(AbstractIntegration):
    """The sum from the last step to the first, for optimizers that remember: it goes over the path twice, and holds an
    adjoint for each attributed point and output.
    """

    path: Path
    optimizer: AbstractOptimizer
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                f"path.every=snapshots: optimizer={self.optimizer.option} carries past gradients from step to step, so "
                "every step is needed; use path.every=1 (path.attributed limits its cost), or optimizer=gd or sgd"
            )

    @property
    def costs(self) -> Costs:
        rules, tapes = len(self.path.rule), len(self.path.positions(self.path.finer))
        return Costs(rules, rules, errors=0, tapes=tapes, doubled=bool(self.path.finer))

    def begin(self, domain: Domain, weights: Weights, room: Room) -> TwoPasses:
        differentiated = self.optimizer.differentiated if self.path.effects else ()
        records = (*self.optimizer.records, *differentiated)
        recording = new_recording(domain.steps, weights, records, domain.no_pull(), room)
        return TwoPasses(
            path=self.path, optimizer=self.optimizer, domain=domain, recording=recording
        )


def fair_counts(count: int, sizes: Sequence[int]) -> list[int]:
    """Which points are attributed where each costs a pass backwards: the first ones of every group, as many of each as
    of the others where it has that many; how many of each group these are.

    >>> fair_counts(64, [128, 128, 101])
    [22, 21, 21]
    >>> fair_counts(64, [8, 100, 100]), fair_counts(64, [8, 8])
    ([8, 28, 28], [8, 8])
    """
    taken = [0] * len(sizes)
    while (left := count - sum(taken)) > 0 and (
        open_ := [k for k in range(len(sizes)) if taken[k] < sizes[k]]
    ):
        for turn, k in enumerate(open_):
            fair = left // len(open_) + (turn < left % len(open_))
            taken[k] += min(fair, sizes[k] - taken[k])
    return taken


def choose_integration(optimizer: AbstractOptimizer, path: Path) -> AbstractIntegration:
    """The way that goes with both, or a mistake.

    >>> from ntkexp.optimizer.descent import Adam
    >>> from ntkexp.path.rule.base import Left
    >>> choose_integration(Adam(), Path(rule=(Left(),))).passes
    2
    """
    if not path.keeps_kernels and (optimizer.flows or optimizer.remembers):
        raise Mistake(
            f"path.kernels={path.kernels}: the path of optimizer={optimizer.option} is summed up as kernels; use "
            "optimizer=gd or sgd, or path.kernels=all"
        )
    if optimizer.flows:
        return AlongFlow(path=path)
    if optimizer.remembers:
        return Backward(path=path, optimizer=optimizer)
    return Snapshots(path=path) if path.every == "snapshots" else EveryStep(path=path)
