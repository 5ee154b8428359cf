"""What is accumulated along a path, how its kernels are made, and at which steps they are kept."""

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

from ntkexp.component import LARGEST, LONGEST, Component, Count, CountOrNone, Steps
from ntkexp.effects.sweep import Effects, MeanName
from ntkexp.kernel.record.casts import Casts
from ntkexp.measure import AbstractMeasure, Output
from ntkexp.mistake import Mistake
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.rule.base import AbstractRule, Piece

# --- How kernels are made from Jacobians, and for which outputs.
#
# `all` makes blocks [out, out_] for every pair of points; `trace` makes Σ_c K[x, c, x′, c], and only where a
# kernel is kept; `none` makes none. Contributions are found by each.


Kernels: TypeAlias = Literal["all", "trace", "none"]


class Kernel(Component):
    """The kernels of kernel files: exact, or of gradients projected at random to `sketch` dimensions."""

    sketch: int | None = Field(None, ge=1, le=LARGEST)


# --- The steps at which kernels are taken: planned before the first step, or as the kernel is seen to change.
#
# An adaptive timetable measures δ = ‖K_s − K_r‖/‖K_r‖, K among the training examples, from one kernel to the
# next, and goes `change`/δ times as far to the one after, at most four times, at least a quarter. It goes no less
# far than what remains of `count` would, log-spaced, so that these are not used up before the end.
#
# Where training switches from one phase to the next, a kernel is due as well, whatever the timetable says.


FARTHEST = 4.0
MOST_KERNELS = 10**5  # each is a file


class AbstractTimetable(Resumable, ABC):
    """When a kernel is due. The first is taken at step 0, the last when training is over."""

    @property
    @abstractmethod
    def room(self) -> int:
        """How many kernels there are at most."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether a kernel is taken at this step."""

    @abstractmethod
    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        """Take note of a kernel that was taken."""


@dataclass(frozen=True)
class Planned(AbstractTimetable):
    """Steps that are known in advance, in order, and those at which another phase begins."""

    steps: tuple[int, ...]
    switches: tuple[int, ...] = ()

    @property
    def room(self) -> int:
        return len(self.steps) + len(self.switches)

    def due(self, step: int) -> bool:
        place = bisect_left(self.steps, step)
        return step in self.switches or self.steps[place : place + 1] == (step,)

    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        pass


@dataclass
class Adaptive(AbstractTimetable):
    """Steps after which the kernel is expected to have changed by a given share, and those at which another phase
    begins: of what is seen there it learns nothing.
    """

    steps: int
    count: int
    change: float
    switches: tuple[int, ...] = ()
    ahead: int = 0  # from the latest kernel to the next
    next: int = 0
    taken: int = 0
    latest: Float[Tensor, "train out train out_"] | None = None

    checkpointed: ClassVar[tuple[str, ...]] = ("ahead", "next", "taken", "latest")

    @property
    def room(self) -> int:
        return min(self.count, self.steps + 1) + len(self.switches)

    def due(self, step: int) -> bool:
        return step == self.next or step in self.switches

    def saw(self, step: int, kernel: Float[Tensor, "train out train out_"]) -> None:
        if step != self.next:
            return
        self.taken += 1
        wanted = step + 1
        if self.latest is not None:
            changed = float((kernel - self.latest).norm() / self.latest.norm())  # δ
            times = self.change / changed if changed else FARTHEST
            times = min(max(times, 1 / FARTHEST), FARTHEST) if isfinite(changed) else 1 / FARTHEST
            wanted = step + round(self.ahead * times)
        self.next = max(step + 1, wanted, self.soonest(step))
        self.ahead = self.next - step
        self.latest = kernel.clone()

    def soonest(self, step: int) -> int:
        """Where the next kernel would be if all that remain were log-spaced; the last of them is at the end.

        >>> Adaptive(steps=1000, count=5, change=0.1, taken=2).soonest(1)
        10
        """
        left = self.count - self.taken
        if left <= 1:
            return self.steps
        return ceil(step * (self.steps / step) ** (1 / left) - 1e-9) if step else 1

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.latest = state["latest"]


# --- What is accumulated along a path, and when kernels are kept.


class Path(Component):
    """The rules that read each step, where they are read, and the schedule of kernel snapshots."""

    rule: tuple[AbstractRule, ...]
    nodes: int = Field(2, ge=1, le=100)
    pieces: int = Field(1, ge=1, le=10**4)
    romberg: int = Field(0, ge=0, le=16)
    casts: Casts = "keep"
    probes: tuple[Literal["train", "probe", "test"], ...] = ("train", "probe", "test")
    kernels: Kernels = "all"
    outputs: Literal["all"] | tuple[CountOrNone, ...] = "all"
    measure: AbstractMeasure = Output()
    error_samples: CountOrNone = 16
    attributed: Count = 64
    by: Literal["module", "parameter"] | dict[str, tuple[str, ...]] | None = None
    effects: Effects = False
    mean: MeanName = "renormalised"
    every: Literal[1, "snapshots"] = 1
    schedule: (
        Literal["log", "adaptive"] | Steps | tuple[Annotated[int, Field(ge=0, le=LONGEST)], ...]
    ) = "log"
    count: int = Field(16, ge=2, le=MOST_KERNELS)
    change: PositiveFloat = 0.02

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        """Rules that cannot be accumulated together, or not at all."""
        names = [rule.option for rule in self.rule]
        if not names or len(set(names)) < len(names):
            raise Mistake(
                f"path.rule=[{','.join(names)}]: give each rule once, such as path.rule=[secant,left]"
            )
        if not self.probes:
            raise Mistake(
                "path.probes=[]: the network must be read somewhere, such as path.probes=[probe,test]"
            )
        if self.outputs != "all" and len({*self.outputs}) < max(1, len(self.outputs)):
            raise Mistake(
                f"path.outputs={list(self.outputs)}: give one or more, each once, such as [0], or all"
            )
        if not self.keeps_kernels and self.every == "snapshots":
            raise Mistake(
                f"path.kernels={self.kernels}: snapshots are kernels of every pair of outputs; use path.every=1, or "
                "path.kernels=all"
            )
        given = f"path.measure={self.measure.option}"
        if not self.explains_outputs and self.outputs != "all":
            raise Mistake(
                f"{given}: it is a number of all outputs, so path.outputs={list(self.outputs)} chooses none; leave "
                "one of both out"
            )
        if not self.explains_outputs and self.effects:
            raise Mistake(f"{given}: effects of runs are on outputs; leave out path.effects")
        for rule in self.rule:
            self.quadrature(rule)
        return self

    def quadrature(self, rule: AbstractRule) -> tuple[Piece, ...]:
        """How this rule reads a step under these settings."""
        return rule.quadrature(self.nodes, self.pieces, self.romberg)

    @property
    def explains_outputs(self) -> bool:
        """Whether the outputs themselves are explained, and no measure of them."""
        return self.measure == Output()

    @property
    def keeps_kernels(self) -> bool:
        """Whether kernels are made for every pair of outputs: contributions are found without."""
        return self.kernels == "all"

    @property
    def tangents(self) -> int:
        """How many tangent kernels are held at once: the first, one that is put together from its blocks, and the last
        one where it says when the next is due.
        """
        if self.kernels == "none":
            return 0
        return 4 if self.schedule == "adaptive" else 3

    @property
    def may_retrain(self) -> bool:
        """Whether trainings without an example find the effects that are asked for, as these do."""
        return self.effects is True and self.mean == "renormalised"

    @property
    def closing(self) -> AbstractRule | None:
        """The first rule that closes every step, which says how well the network was read."""
        return next((rule for rule in self.rule if rule.closes), None)

    @property
    def finer(self) -> tuple[Piece, ...]:
        """What the error of the parts by the closing rule is measured against: the same with twice the pieces."""
        if self.closing is None or not self.error_samples:
            return ()
        return self.closing.quadrature(self.nodes, 2 * self.pieces, self.romberg)

    @property
    def gain(self) -> float:
        """What the difference to `finer` is multiplied with to be an error: both are off by powers of their pieces."""
        return 1 + 1 / (4.0 ** (self.romberg + 1) - 1)

    def positions(self, finer: tuple[Piece, ...]) -> frozenset[float]:
        """Where in a step the network is read by all rules and by finer pieces, both ends included.

        >>> from ntkexp.path.rule.base import Secant
        >>> path = Path(rule=(Secant(),))
        >>> sorted(path.positions(())), sorted(path.positions(path.finer))
        ([0.0, 1.0], [0.0, 0.5, 1.0])
        """
        pieces = (*finer, *(piece for rule in self.rule for piece in self.quadrature(rule)))
        return frozenset({0.0, 1.0}.union(*((piece.start, piece.end) for piece in pieces)))

    def chosen_outputs(self, count: int) -> tuple[int, ...]:
        """The outputs at which the path is integrated, in order.

        >>> from ntkexp.path.rule.base import Left
        >>> Path(rule=(Left(),)).chosen_outputs(3), Path(rule=(Left(),), outputs=(2, 0)).chosen_outputs(3)
        ((0, 1, 2), (0, 2))
        """
        if not self.explains_outputs:
            return (0,)  # the measure is the one output
        if self.outputs == "all":
            return tuple(range(count))
        if max(self.outputs) >= count:
            raise Mistake(
                f"path.outputs={list(self.outputs)}: the network has {count}, numbered from 0 to {count - 1}"
            )
        return tuple(sorted(self.outputs))

    @property
    def details(self) -> dict[str, str]:
        """The settings that concern each rule."""
        return {
            rule.option: rule.detail(self.nodes, self.pieces, self.romberg) for rule in self.rule
        }

    def sampled_every(self, steps: int) -> int:
        """How far apart the steps are at which the error of the parts is measured."""
        return max(1, steps // self.error_samples)

    def timetable(self, steps: int, switches: tuple[int, ...] = ()) -> AbstractTimetable:
        """When tangent kernels are kept, and snapshots taken if there are any; also at switches between phases."""
        if self.kernels == "none":
            return Planned(())
        if self.schedule == "adaptive":
            return Adaptive(steps, self.count, self.change, switches)
        return Planned(self.plan(self.schedule, steps), switches)

    def plan(self, schedule: Literal["log"] | int | tuple[int, ...], steps: int) -> tuple[int, ...]:
        """The steps of a schedule; the first and the last are always among them.

        >>> from ntkexp.path.rule.base import Left
        >>> Path(rule=(Left(),), count=5).plan("log", 1000)
        (0, 1, 10, 100, 1000)
        >>> Path(rule=(Left(),)).plan(40, 100)
        (0, 40, 80, 100)
        """
        if schedule == "log":
            positions = (
                [k / (self.count - 2) for k in range(self.count - 1)] if self.count > 2 else [1.0]
            )
            chosen = {round(steps**position) for position in positions}
        elif isinstance(schedule, int):
            if steps // schedule >= MOST_KERNELS:
                raise Mistake(
                    f"path.schedule={schedule}: over steps={steps} these are {steps // schedule + 1} kernels, and "
                    f"{MOST_KERNELS} can be kept; raise path.schedule, or lower steps"
                )
            chosen = set(range(0, steps, schedule))
        else:
            chosen = {step for step in schedule if step <= steps}
        return tuple(sorted(chosen | {0, steps}))
