"""The story of a run: walk the path from where it stands, accumulate, look back.

A run is pure: it tells a journal what happens and returns what came out. The journal may keep a checkpoint, from which
the same run goes on to the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.loss.squared import Squared
from ntkexp.machine.base import Course, Evidence, PathKernel
from ntkexp.machine.ladder import Place, Rung
from ntkexp.observe import Observer, Row, shared
from ntkexp.path.descent import Step
from ntkexp.path.error_bar import ErrorBar
from ntkexp.path.integrals import Integrals, Tally
from ntkexp.path.points import Block
from ntkexp.path.rule.secant import Secant
from ntkexp.prepare import Setting
from ntkexp.shapes import Weights

BLOWN_UP = 1e6  # times the first loss: far beyond what a run that converges passes through


class AbstractJournal(ABC):
    """Whoever listens to a run."""

    @abstractmethod
    def row(self, row: Row) -> None:
        """The numbers of a step."""

    @abstractmethod
    def snapshot(self, step: int, kernel: Float[Tensor, "point out train out_"]) -> None:
        """The tangent kernel at a step."""

    @abstractmethod
    def stepped(self, walk: Walk, loss: float) -> None:
        """A step is complete: the moment for a checkpoint."""


@dataclass
class Walk:
    """Where a run stands: after `step` steps, at these weights, with what was accumulated."""

    setting: Setting
    weights: Weights
    integrals: dict[str, Integrals]
    error_bar: ErrorBar | None
    summed_gradient: Float[Tensor, "train out"]
    step_sizes: list[float]

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.step_sizes)

    @property
    def time(self) -> float:
        """Σ_s η_s."""
        return sum(self.step_sizes)

    def advance(self, step: Step) -> dict[str, Tally]:
        """Accumulate one step, block by block of points."""
        tallies = {name: Tally() for name in self.integrals}
        for place in self.setting.read_blocks:
            block = Block(self.setting.points, step.segment, place)
            for name, integrals in self.integrals.items():
                integrals.add(step, block, tallies[name])
            if self.error_bar is not None and self.error_bar.measures(step.index):
                self.error_bar.add(step, block)
        self.summed_gradient += step.step_size * step.output_gradient
        self.step_sizes.append(step.step_size)
        self.weights = step.segment.end
        return tallies

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "weights": self.weights,
            "integrals": {name: integrals.state for name, integrals in self.integrals.items()},
            "error_bar": {} if self.error_bar is None else self.error_bar.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.weights = {name: weight.to(self.summed_gradient.device) for name, weight in state["weights"].items()}
        for name, integrals in self.integrals.items():
            integrals.restore(state["integrals"][name])
        if self.error_bar is not None:
            self.error_bar.restore(state["error_bar"])
        self.summed_gradient.copy_(state["summed_gradient"])
        self.step_sizes = list(state["step_sizes"])


def begin(setting: Setting) -> Walk:
    """The walk before its first step."""
    path, shape = setting.experiment.path, setting.kernel.shape
    integrals = {
        rule.name: Integrals(path.quadrature(rule), room(setting, shape), room(setting, shape[:3]))
        for rule in path.rule
    }
    error_bar = None
    if "secant" in integrals and path.error_samples:
        error_bar = ErrorBar(
            coarse=integrals["secant"].pieces,
            fine=Secant().quadrature(path.nodes, 2 * path.pieces, path.romberg),
            gain=1 + 1 / (4 ** (path.romberg + 1) - 1),
            every=max(1, setting.experiment.steps // path.error_samples),
            total=setting.kernel.new_zeros(shape[:3]),
        )
    gradient = torch.zeros_like(setting.targets[: setting.points.train])
    return Walk(setting, setting.weights, integrals, error_bar, gradient, [])


def room(setting: Setting, shape: torch.Size) -> Tensor:
    """Zeros to accumulate in; NaN at points where the path is not integrated."""
    room = setting.kernel.new_full(shape, torch.nan)
    for place in setting.read_blocks:
        room[place] = 0.0
    return room


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    evidence: Evidence
    places: Mapping[str, Place]
    rungs: list[Rung]
    weights: Weights
    steps: int
    diverged: bool
    sentence: str
    parts: Mapping[str, Mapping[str, float]]  # per rule: how well its contributions are known


def finish(walk: Walk, journal: AbstractJournal) -> Outcome:
    """Take the remaining steps, and look back."""
    setting, observer = walk.setting, Observer(walk.setting)
    first = observer.loss(setting.outputs)
    snapshots = setting.experiment.path.snapshots(setting.experiment.steps)
    ending = Ending(f"{setting.experiment.steps} steps")
    for step in setting.descent.walk(walk.weights, walk.step):
        loss = observer.loss(step.outputs)
        if (reason := end_of(setting, loss, first, step.index)) is not None:
            ending = reason
            break
        row = observer.step(step.index, walk.time, step.outputs, step.segment.start) | {"step_size": step.step_size}
        if step.index in snapshots:
            kernel = setting.points.tangent_kernel(step.segment.start, step.right)
            row |= observer.kernel(kernel, step.outputs, step.segment.start, step.step_size)
            journal.snapshot(step.index, kernel)
        journal.row(row | shared(walk.advance(step)))
        journal.stepped(walk, loss)
    return look_back(walk, observer, journal, ending)


@dataclass(frozen=True)
class Ending:
    """Why a run ended."""

    sentence: str
    diverged: bool = False


def end_of(setting: Setting, loss: float, first: float, step: int) -> Ending | None:
    """Whether the run ends before this step."""
    target = setting.experiment.stop_at_loss
    if target is not None and loss <= target:
        return Ending(f"{step} steps, to a loss of {loss:.3g}")
    if isfinite(loss) and loss <= BLOWN_UP * (first + 1):
        return None
    ratio = setting.descent.step_size / setting.largest_stable_step
    return Ending(
        f"diverged at step {step}: the step size {setting.descent.step_size:.3g} is {ratio:.3g} times the largest "
        f"stable one at the start; try optimizer.stable_fraction=0.5",
        diverged=True,
    )


def look_back(walk: Walk, observer: Observer, journal: AbstractJournal, ending: Ending) -> Outcome:
    """The end of training, and what kernel machines make of it."""
    setting = walk.setting
    outputs, right = setting.points.read(walk.weights)
    kernel = setting.points.tangent_kernel(walk.weights, right)
    row = observer.step(walk.step, walk.time, outputs, walk.weights)
    journal.row(row | observer.kernel(kernel, outputs, walk.weights, None))
    journal.snapshot(walk.step, kernel)
    evidence = Evidence(
        inputs=setting.points.inputs.flatten(1),
        train=setting.points.train,
        start=setting.outputs,
        end=outputs,
        targets=setting.descent.targets,
        paths=path_kernels(walk),
        kernel_start=setting.kernel,
        kernel_end=kernel,
        course=course(walk),
    )
    rungs = setting.experiment.ladder.climb(evidence)
    parts = {name: known(walk, name) for name in walk.integrals}
    return Outcome(evidence, sizes(walk), rungs, walk.weights, walk.step, ending.diverged, ending.sentence, parts)


def path_kernels(walk: Walk) -> dict[str, PathKernel]:
    """The integrals, named by their rules."""
    path = walk.setting.experiment.path
    details = {rule.name: path.detail(rule) for rule in path.rule}
    return {
        name: PathKernel(integrals.kernel, integrals.contributions, details[name])
        for name, integrals in walk.integrals.items()
    }


def course(walk: Walk) -> Course:
    """How training went."""
    return Course(
        step_sizes=tuple(walk.step_sizes),
        output_gradient=walk.setting.descent.output_gradient,
        summed_gradient=walk.summed_gradient,
        weight=walk.setting.weight,
        is_squared=isinstance(walk.setting.experiment.loss, Squared),
    )


def sizes(walk: Walk) -> dict[str, Place]:
    """Where each split lies, and the size of what rounds there."""
    setting = walk.setting
    found = {}
    for name, place in setting.places.items():
        inputs = setting.points.inputs[place]
        size = sum(setting.module.size(weights, inputs) for weights in (setting.weights, walk.weights))
        found[name] = Place(place, size)
    return found


def known(walk: Walk, rule: str) -> dict[str, float]:
    """How well the contributions by a rule are known: Σ|𝒮|/Σ|Σ𝒮|, and the error of the parts relative to ‖𝒮‖."""
    contributions = torch.cat([walk.integrals[rule].contributions[place] for place in walk.setting.read_blocks])
    moved = float(contributions.sum(2).abs().sum())
    found = {"cancellation": float(contributions.abs().sum()) / moved if moved else float("nan")}
    if rule == "secant" and walk.error_bar is not None:
        size = float(contributions.norm())
        found["error_bar"] = walk.error_bar.estimate(walk.step) / size if size else float("nan")
    return found
