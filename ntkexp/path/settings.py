"""The settings of a path (the keys `path.*`): quadrature rules, kernels, and the steps
whose kernel is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from jaxtyping import Float
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from ntkexp.component import MAX_COUNT, MAX_STEPS, Component, Count, CountOrNone, Steps
from ntkexp.effects.sweep import Effects, MeanName
from ntkexp.kernel import Casts
from ntkexp.measure import AbstractMeasure, Output
from ntkexp.mistake import Mistake
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.rule.base import AbstractRule, Substep

# --- The kernels K[x, c, x′, c′] that a run computes, between outputs c and c′ at points
# x and x′:
#
#     all      K for all pairs of outputs, at every step
#     trace    the trace Σ_c K[x, c, x′, c], only at the steps whose kernel is stored
#     none     no kernels
#
# Contributions do not depend on this choice.
#
# `auto` becomes `all` or `trace` when the number of outputs is known
# (`Path.chosen_kernels`).


Kernels: TypeAlias = Literal["all", "trace", "none"]

MAX_AUTO_ENTRIES = 2048
"""For M training examples with C outputs, `auto` becomes `trace`
if M·C exceeds this number.

The kernel of the training examples has (M·C)² numbers,
and its eigenvalues take (M·C)³ operations."""


class Kernel(Component):
    """The settings of kernel files: exact kernels,
    or kernels of randomly projected gradients.

    `sketch` is the dimension of the projection, or None for exact kernels.
    """

    sketch: int | None = Field(None, ge=1, le=MAX_COUNT)


# --- The steps with a stored kernel: planned before training, or adapted to the kernel
# change.
#
# An adaptive timetable computes the kernel change δ = ‖K_s − K_r‖/‖K_r‖ between the
# latest two kernels, at steps r < s. The setting `change` is the wanted δ. So the next
# kernel is due after (s − r) · `change`/δ steps, where the factor `change`/δ is limited
# to the range from ¼ to 4. The number of kernels is also limited, and must suffice
# until training ends. So the next kernel is due no earlier than if the remaining
# kernels were spaced evenly on a log scale. Each switch between phases of training adds
# a kernel.


# The interval between stored kernels grows or shrinks by at most this factor.
MAX_WAIT_GROWTH = 4.0
MAX_KERNELS = 10**5  # largest number of stored kernels; each is a file


class AbstractTimetable(Resumable, ABC):
    """The choice of the steps with a snapshot, from step 0 to the end of training. A
    snapshot contains a kernel, unless `path.kernels=none` (see `Path.timetable`)."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The largest number of snapshots. The run reserves disk space for them."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return True if a snapshot is due at this step."""

    @abstractmethod
    def observe(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        """Receive the kernel of a step, if it was due."""


@dataclass(frozen=True)
class Planned(AbstractTimetable):
    """Steps that are chosen before training, in ascending order, together with the
    switches between phases."""

    steps: tuple[int, ...]
    switches: tuple[int, ...] = ()

    @property
    def capacity(self) -> int:
        return len(self.steps) + len(self.switches)

    def due(self, step: int) -> bool:
        place = bisect_left(self.steps, step)
        return step in self.switches or self.steps[place : place + 1] == (step,)

    def observe(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        pass


@dataclass
class Adaptive(AbstractTimetable):
    """Steps that are chosen during training. From one chosen step to the next, the
    kernel changes by about `change`.

    The switches between phases are added. Kernels at switches do not influence the
    waiting times."""

    steps: int
    count: int  # largest number of kernels, without those at switches
    change: float
    switches: tuple[int, ...] = ()
    wait: int = 0  # number of steps from the latest stored kernel to the next one
    next: int = 0  # step of the next kernel
    taken: int = 0  # number of kernels so far
    latest: Float[Tensor, "train out train out_"] | None = None

    checkpointed: ClassVar[tuple[str, ...]] = ("wait", "next", "taken", "latest")

    @property
    def capacity(self) -> int:
        return min(self.count, self.steps + 1) + len(self.switches)

    def due(self, step: int) -> bool:
        return step == self.next or step in self.switches

    def observe(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        if step != self.next:
            return
        self.taken += 1
        wanted = step + 1
        if self.latest is not None:
            # relative change δ
            changed = float((kernel - self.latest).norm() / self.latest.norm())
            growth = 1 / MAX_WAIT_GROWTH
            if changed == 0:
                growth = MAX_WAIT_GROWTH
            elif isfinite(changed):
                growth = min(max(self.change / changed, growth), MAX_WAIT_GROWTH)
            wanted = step + round(self.wait * growth)
        self.next = max(step + 1, wanted, self.next_log_spaced(step))
        self.wait = self.next - step
        self.latest = kernel.clone()

    def next_log_spaced(self, step: int) -> int:
        """Return the step of the next kernel, if the remaining kernels were log-spaced
        up to the end.

        >>> Adaptive(steps=1000, count=5, change=0.1, taken=2).next_log_spaced(1)
        10
        """
        left = self.count - self.taken
        if left <= 1:
            return self.steps
        if step == 0:
            return 1
        growth: float = (self.steps / step) ** (1 / left)
        return ceil(step * growth - 1e-9)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.latest = state["latest"]


class Path(Component):
    """The settings of the path integrals: rules, points, outputs,
    and steps with kernels.

    The comments in configs/config.yaml describe each key.
    """

    rule: tuple[AbstractRule, ...]
    quadrature_points: int = Field(2, ge=1, le=100)
    substeps: int = Field(1, ge=1, le=10**4)
    romberg: int = Field(0, ge=0, le=16)
    casts: Casts = "keep"
    queries: tuple[Literal["train", "query", "test"], ...] = ("train", "query", "test")
    kernels: Literal["auto"] | Kernels = "auto"
    outputs: Literal["all"] | tuple[CountOrNone, ...] = "all"
    measure: AbstractMeasure = Output()
    error_samples: CountOrNone = 16
    attributed: Count = 64
    by: Literal["module", "parameter"] | dict[str, tuple[str, ...]] | None = None
    effects: Effects = False
    mean: MeanName = "renormalised"
    every: Literal[1, "snapshots"] = 1
    schedule: (
        Literal["log", "adaptive"]
        | Steps
        | tuple[Annotated[int, Field(ge=0, le=MAX_STEPS)], ...]
    ) = "log"
    count: int = Field(16, ge=2, le=MAX_KERNELS)
    change: PositiveFloat = 0.02
    record: tuple[Literal["outputs", "weights"], ...] = ()

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        names = [rule.option for rule in self.rule]
        if not names or len(set(names)) < len(names):
            raise Mistake(
                f"path.rule=[{','.join(names)}]: give each rule once, such as "
                "path.rule=[secant,left]"
            )
        if not self.queries:
            raise Mistake(
                "path.queries=[]: the network must be read somewhere, such as "
                "path.queries=[query,test]"
            )
        if len(set(self.queries)) < len(self.queries):
            raise Mistake(
                f"path.queries=[{','.join(self.queries)}]: give each split once, such as "
                "path.queries=[query,test]"
            )
        if self.outputs != "all" and len({*self.outputs}) < max(1, len(self.outputs)):
            raise Mistake(
                f"path.outputs={list(self.outputs)}: give one or more, each once, such as "
                "[0], or all"
            )
        if not self.keeps_kernels and self.every == "snapshots":
            raise Mistake(
                f"path.kernels={self.kernels}: snapshots are kernels of every pair of "
                "outputs; use path.every=1, or path.kernels=all"
            )
        given = f"path.measure={self.measure.option}"
        if not self.explains_outputs and self.outputs != "all":
            raise Mistake(
                f"{given}: it is one number for all outputs, so "
                f"path.outputs={list(self.outputs)} cannot choose; leave out one of the two"
            )
        if not self.explains_outputs and self.effects:
            raise Mistake(
                f"{given}: effects are changes of the outputs; leave out path.effects"
            )
        for rule in self.rule:
            self.quadrature(rule)
        if len(set(self.record)) < len(self.record):
            raise Mistake(
                f"path.record=[{','.join(self.record)}]: give each once, such as "
                "path.record=[outputs,weights]"
            )
        return self

    def quadrature(self, rule: AbstractRule) -> tuple[Substep, ...]:
        """Return the substeps of this rule, with their weights."""
        return rule.quadrature(self.quadrature_points, self.substeps, self.romberg)

    @property
    def explains_outputs(self) -> bool:
        """True if the run attributes the outputs themselves, instead of a measure such
        as the loss."""
        return self.measure == Output()

    @property
    def keeps_kernels(self) -> bool:
        """True if kernels are computed for every pair of outputs, or if `auto` has not
        been resolved yet (see `chosen_kernels`)."""
        return self.kernels in ("all", "auto")

    def chosen_kernels(
        self, train: int, outputs: int, *, needs_all: bool = False
    ) -> Kernels:
        """Return `all` or `trace` in place of `kernels="auto"`.

        `needs_all` is True if another part of the experiment needs the kernels
        of all pairs of outputs."""
        if self.kernels != "auto":
            return self.kernels
        is_small = outputs == 1 or train * outputs <= MAX_AUTO_ENTRIES
        return "all" if is_small or needs_all or self.every == "snapshots" else "trace"

    @property
    def tangents(self) -> int:
        """The largest number of tangent kernels in memory at once.

        These are the first kernel, two copies of the current kernel (while its blocks
        are concatenated), and the latest kernel of an adaptive timetable."""
        if self.kernels == "none":
            return 0
        return 4 if self.schedule == "adaptive" else 3

    @property
    def may_retrain(self) -> bool:
        """True if these settings allow leave-out effects to be measured by retraining
        without an example."""
        return self.effects is True and self.mean == "renormalised"

    @property
    def closing_rule(self) -> AbstractRule | None:
        """The first rule that closes every step, or None. A rule closes a step if the
        contributions add up to the change of the outputs. The error of single
        contributions is estimated for this rule."""
        return next((rule for rule in self.rule if rule.closes), None)

    @property
    def finer_quadrature(self) -> tuple[Substep, ...]:
        """The closing rule's quadrature with twice as many substeps,
        for the error estimate."""
        if self.closing_rule is None or not self.error_samples:
            return ()
        return self.closing_rule.quadrature(
            self.quadrature_points, 2 * self.substeps, self.romberg
        )

    @property
    def tapes_with_error(self) -> int:
        """The number of tapes in a step, including the tapes of the error estimate."""
        return len(self.positions(self.finer_quadrature))

    @property
    def richardson_factor(self) -> float:
        """Richardson's factor 1 + 1/(4ᵏ⁺¹ − 1), after k Romberg extrapolations. The
        error of the closing rule is this factor times the difference between the
        results of `finer_quadrature` and of the rule.

        This estimate assumes an error of order n^−2(k+1) for n substeps."""
        return 1 + 1 / (4.0 ** (self.romberg + 1) - 1)

    def positions(self, finer: tuple[Substep, ...]) -> frozenset[float]:
        """Return the positions u of all evaluations in a step, at the weights θ₀ + uΔθ.
        They include 0, 1, and the positions of `finer`.

        >>> from ntkexp.path.rule.base import Secant
        >>> path = Path(rule=(Secant(),))
        >>> sorted(path.positions(())), sorted(path.positions(path.finer_quadrature))
        ([0.0, 1.0], [0.0, 0.5, 1.0])
        """
        substeps = (
            *finer,
            *(substep for rule in self.rule for substep in self.quadrature(rule)),
        )
        return frozenset(
            {0.0, 1.0}.union(*((substep.start, substep.end) for substep in substeps))
        )

    def chosen_outputs(self, count: int) -> tuple[int, ...]:
        """Return the sorted indices of the outputs that have path integrals, for a
        network with `count` outputs.

        >>> from ntkexp.path.rule.base import Left
        >>> Path(rule=(Left(),)).chosen_outputs(3)
        (0, 1, 2)
        >>> Path(rule=(Left(),), outputs=(2, 0)).chosen_outputs(3)
        (0, 2)
        """
        if not self.explains_outputs:
            return (0,)  # a measure has a single value
        if self.outputs == "all":
            return tuple(range(count))
        if max(self.outputs) >= count:
            raise Mistake(
                f"path.outputs={list(self.outputs)}: the network has {count}, numbered from 0 to "
                f"{count - 1}"
            )
        return tuple(sorted(self.outputs))

    @property
    def details(self) -> dict[str, str]:
        """The settings of each quadrature rule as text, by the name of the rule."""
        return {
            rule.option: rule.detail(
                self.quadrature_points, self.substeps, self.romberg
            )
            for rule in self.rule
        }

    def sampled_every(self, steps: int) -> int:
        """Return the interval between the steps at which the error
        of the contributions is measured."""
        return max(1, steps // self.error_samples)

    def timetable(
        self, steps: int, switches: tuple[int, ...] = (), *, measures: bool = False
    ) -> AbstractTimetable:
        """Return the timetable of snapshots. At a snapshot, a run stores its kernel and
        the arrays of `record`, and computes diagnostics. There is a snapshot at each
        switch between phases.

        The timetable is empty if there are no kernels, nothing is recorded, and
        `measures` is False (no diagnostics)."""
        if self.kernels == "none" and not (self.record or measures):
            return Planned(())
        if self.schedule == "adaptive" and self.kernels == "none":
            raise Mistake(
                "path.schedule=adaptive: it follows the kernels, and there are none with "
                "path.kernels=none; use path.schedule=log, or a number of steps"
            )
        if self.schedule == "adaptive":
            return Adaptive(steps, self.count, self.change, switches)
        return Planned(self.plan(self.schedule, steps), switches)

    def plan(
        self, schedule: Literal["log"] | int | tuple[int, ...], steps: int
    ) -> tuple[int, ...]:
        """Return the sorted steps of a schedule, which include 0 and `steps`.

        >>> from ntkexp.path.rule.base import Left
        >>> Path(rule=(Left(),), count=5).plan("log", 1000)
        (0, 1, 10, 100, 1000)
        >>> Path(rule=(Left(),)).plan(40, 100)
        (0, 40, 80, 100)
        """
        if schedule == "log":
            positions = [1.0]
            if self.count > 2:
                positions = [k / (self.count - 2) for k in range(self.count - 1)]
            chosen = {round(steps**position) for position in positions}
        elif isinstance(schedule, int):
            if steps // schedule >= MAX_KERNELS:
                raise Mistake(
                    f"path.schedule={schedule}: over steps={steps} these are "
                    f"{steps // schedule + 1} kernels, and "
                    f"{MAX_KERNELS} can be kept; raise path.schedule, or lower steps"
                )
            chosen = set(range(0, steps, schedule))
        else:
            chosen = {step for step in schedule if step <= steps}
        return tuple(sorted(chosen | {0, steps}))
