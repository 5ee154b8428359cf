"""The walk: where a run stands on its path, and what it has accumulated so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.closure import Closure
from ntkexp.optimizer.base import Memory
from ntkexp.path.accumulate.error_bar import ErrorBar
from ntkexp.path.accumulate.flow import AlongFlow
from ntkexp.path.accumulate.integrals import Integrals, Tally
from ntkexp.path.accumulate.ledger import AbstractLedger, EveryStep
from ntkexp.path.accumulate.moments import Moments
from ntkexp.path.accumulate.snapshots import Snapshots, Track
from ntkexp.path.descent import Step
from ntkexp.path.points import Block
from ntkexp.path.rule.base import Piece
from ntkexp.path.rule.left import Left
from ntkexp.path.timetable import AbstractTimetable
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights


@dataclass
class Walk:
    """Where a run stands: after `step` steps, at these weights, with what was accumulated."""

    setting: Setting
    weights: Weights
    memory: Memory
    ledger: AbstractLedger
    timetable: AbstractTimetable
    summed_gradient: Float[Tensor, "train out"]
    step_sizes: list[float]
    clippings: list[float]
    unclosed: dict[int, Closure] = field(default_factory=dict)  # steps at which rounding does not explain the secant

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.step_sizes)

    @property
    def time(self) -> float:
        """Σ_s η_s."""
        return sum(self.step_sizes, start=0.0)

    def advance(self, step: Step, *, due: bool) -> dict[str, Tally]:
        """Take one step, at which a kernel may be due; what it adds by each rule, if that was measured."""
        tallies = self.ledger.add(step, self.blocks, due=due)
        self.summed_gradient += self.setting.descent.impulse(step)
        self.step_sizes.append(step.step_size)
        self.clippings.append(step.clipping)
        self.weights, self.memory = step.segment.end, step.memory
        self.check(step.index, tallies)
        return tallies

    def check(self, step: int, tallies: Mapping[str, Tally]) -> None:
        """Remember a step that is not closed, though its rule closes."""
        closing = self.setting.experiment.path.closing
        if closing is None or closing.option not in tallies:
            return
        found = tallies[closing.option].unclosed(self.setting.terms, self.setting.eps)
        if found is not None:
            self.unclosed[step] = found

    def close(self, step: Step) -> None:
        """End sooner than was planned, before this step."""
        self.ledger.close(step, self.blocks)

    def blocks(self, step: Step) -> Iterator[Block]:
        """The points at which the path is integrated, block by block."""
        return (Block(self.setting.points, step.segment, place) for place in self.setting.read_blocks)

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "weights": self.weights,
            "memory": dict(self.memory),
            "ledger": self.ledger.state,
            "timetable": self.timetable.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
            "clippings": self.clippings,
            "unclosed": {step: (closure.error, closure.bound) for step, closure in self.unclosed.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.weights = self.placed(state["weights"])
        self.memory = {part: self.placed(weights) for part, weights in state["memory"].items()}
        self.ledger.restore(state["ledger"])
        self.timetable.restore(state["timetable"])
        self.summed_gradient.copy_(state["summed_gradient"])
        self.step_sizes = list(state["step_sizes"])
        self.clippings = list(state["clippings"])
        self.unclosed = {step: Closure(*numbers) for step, numbers in state["unclosed"].items()}

    def placed(self, weights: Weights) -> Weights:
        """Weights on the device of the run."""
        return {name: weight.to(self.summed_gradient.device) for name, weight in weights.items()}


def begin(setting: Setting) -> Walk:
    """The walk before its first step."""
    path, steps = setting.experiment.path, setting.experiment.steps
    if setting.experiment.optimizer.flows:
        ledger: AbstractLedger = along_flow(setting)
    else:
        ledger = snapshots(setting) if path.every == "snapshots" else every_step(setting)
    gradient = torch.zeros_like(setting.descent.targets)
    return Walk(setting, setting.weights, {}, ledger, path.timetable(steps), gradient, [], [])


def every_step(setting: Setting) -> EveryStep:
    """The kernel of every step; nothing yet where the path is integrated from its end."""
    path = setting.experiment.path
    integrals = {} if setting.experiment.optimizer.remembers else opened(setting)
    if path.closing is None or not (path.finer and integrals):
        return EveryStep(integrals, None)
    return EveryStep(integrals, sampled(setting, path.closing.option, path.quadrature(path.closing), path.gain))


def sampled(setting: Setting, rule: str, coarse: tuple[Piece, ...], gain: float) -> ErrorBar:
    """An error bar that has measured nothing yet."""
    path = setting.experiment.path
    every = max(1, setting.experiment.steps // path.error_samples)
    return ErrorBar(rule, coarse, path.finer, gain, every, setting.kernel.new_zeros(setting.path_shape[:3]))


def along_flow(setting: Setting) -> AlongFlow:
    """The path of a flow, at nothing."""
    path, shape = setting.experiment.path, setting.path_shape
    tangent = Left().quadrature(1, 1, 0)
    integrals = Integrals(tangent, *(room(setting, shape[:axes]) for axes in (4, 3, 2)))
    return AlongFlow(
        setting.descent, path.nodes, integrals, sampled(setting, "gauss", (), 1.0) if path.error_samples else None
    )


def snapshots(setting: Setting) -> Snapshots:
    """The kernel at some steps."""
    shape = setting.path_shape
    tracks = {
        name: Track(integrals, *(setting.kernel.new_zeros(shape[:axes]) for axes in (4, 2, 4, 3)))
        for name, integrals in opened(setting).items()
    }
    pulls = [torch.zeros_like(setting.descent.targets) for _ in range(3)]
    return Snapshots(tracks, Moments(0.0, pulls[0], 0.0, pulls[1]), pulls[2], setting.experiment.steps - 1)


def opened(setting: Setting) -> dict[str, Integrals]:
    """The integrals by all rules, at zero."""
    path, shape = setting.experiment.path, setting.path_shape
    return {
        rule.option: Integrals(path.quadrature(rule), *(room(setting, shape[:axes]) for axes in (4, 3, 2)))
        for rule in path.rule
    }


def room(setting: Setting, shape: tuple[int, ...]) -> Tensor:
    """Zeros to accumulate in; NaN at points where the path is not integrated."""
    room = setting.kernel.new_full(shape, torch.nan)
    room[setting.attributed] = 0.0
    return room
