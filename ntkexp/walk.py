"""The walk: where a run stands on its path, and what it has accumulated so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.closure import Closure
from ntkexp.optimizer.base import Memory
from ntkexp.path.descent import Step
from ntkexp.path.error_bar import ErrorBar
from ntkexp.path.integrals import Integrals, Tally
from ntkexp.path.points import Block
from ntkexp.prepare import Setting
from ntkexp.shapes import Weights


@dataclass
class Walk:
    """Where a run stands: after `step` steps, at these weights, with what was accumulated."""

    setting: Setting
    weights: Weights
    memory: Memory
    integrals: dict[str, Integrals]
    error_bar: ErrorBar | None
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

    def advance(self, step: Step) -> dict[str, Tally]:
        """Take one step; accumulate it, block by block of points, unless that must wait for the steps to come."""
        tallies = {name: Tally() for name in self.integrals}
        for place in self.setting.read_blocks if self.integrals else ():
            block = Block(self.setting.points, step.segment, place)
            for name, integrals in self.integrals.items():
                integrals.add(step, block, tallies[name])
            if self.error_bar is not None and self.error_bar.measures(step.index):
                self.error_bar.add(step, block)
        self.summed_gradient += step.step_size * step.output_gradient
        self.step_sizes.append(step.step_size)
        self.clippings.append(step.clipping)
        self.weights, self.memory = step.segment.end, step.memory
        self.check(step.index, tallies)
        return tallies

    def check(self, step: int, tallies: Mapping[str, Tally]) -> None:
        """Remember a step whose secant does not close."""
        found = tallies["secant"].unclosed(self.setting.terms, self.setting.eps) if "secant" in tallies else None
        if found is not None:
            self.unclosed[step] = found

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "weights": self.weights,
            "memory": dict(self.memory),
            "integrals": {name: integrals.state for name, integrals in self.integrals.items()},
            "error_bar": {} if self.error_bar is None else self.error_bar.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
            "clippings": self.clippings,
            "unclosed": {step: (closure.error, closure.bound) for step, closure in self.unclosed.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.weights = self.placed(state["weights"])
        self.memory = {part: self.placed(weights) for part, weights in state["memory"].items()}
        for name, integrals in self.integrals.items():
            integrals.restore(state["integrals"][name])
        if self.error_bar is not None:
            self.error_bar.restore(state["error_bar"])
        self.summed_gradient.copy_(state["summed_gradient"])
        self.step_sizes = list(state["step_sizes"])
        self.clippings = list(state["clippings"])
        self.unclosed = {step: Closure(*numbers) for step, numbers in state["unclosed"].items()}

    def placed(self, weights: Weights) -> Weights:
        """Weights on the device of the run."""
        return {name: weight.to(self.summed_gradient.device) for name, weight in weights.items()}


def begin(setting: Setting) -> Walk:
    """The walk before its first step."""
    path, shape = setting.experiment.path, setting.kernel.shape
    integrals = {} if setting.experiment.optimizer.remembers else opened(setting)
    error_bar = None
    if path.finer and integrals:
        error_bar = ErrorBar(
            coarse=integrals["secant"].pieces,
            fine=path.finer,
            gain=1 + 1 / (4 ** (path.romberg + 1) - 1),
            every=max(1, setting.experiment.steps // path.error_samples),
            total=setting.kernel.new_zeros(shape[:3]),
        )
    gradient = torch.zeros_like(setting.targets[: setting.points.train])
    return Walk(setting, setting.weights, {}, integrals, error_bar, gradient, [], [])


def opened(setting: Setting) -> dict[str, Integrals]:
    """The integrals by all rules, at zero."""
    path, shape = setting.experiment.path, setting.kernel.shape
    return {
        rule.name: Integrals(path.quadrature(rule), *(room(setting, shape[:axes]) for axes in (4, 3, 2)))
        for rule in path.rule
    }


def room(setting: Setting, shape: torch.Size) -> Tensor:
    """Zeros to accumulate in; NaN at points where the path is not integrated."""
    room = setting.kernel.new_full(shape, torch.nan)
    room[setting.attributed] = 0.0
    return room
