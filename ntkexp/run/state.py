"""Where a run stands on its path, and what it has accumulated so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.closure import Closure
from ntkexp.on_disk import refuse_small_disk
from ntkexp.optimizer.base import Memory
from ntkexp.path.accumulate.base import AbstractAccumulator
from ntkexp.path.accumulate.marked import Marked
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.integration.base import Room
from ntkexp.path.step import Step
from ntkexp.path.timetable import AbstractTimetable
from ntkexp.run.effects_pass import EffectsPass, begin_effects
from ntkexp.run.kept_sums import kept_bytes
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights


@dataclass(kw_only=True)
class RunState:
    """A run after `step` steps is at these weights, with what was accumulated."""

    setting: Setting
    weights: Weights
    accumulator: AbstractAccumulator
    timetable: AbstractTimetable
    summed_gradient: Float[Tensor, "train out"]
    memory: Memory = field(default_factory=dict)
    step_sizes: list[float] = field(default_factory=list)
    clippings: list[float] = field(default_factory=list)
    misses: dict[int, Closure] = field(default_factory=dict)  # at steps that a rule should close
    turns: list[Float[Tensor, "point out"]] = field(default_factory=list)  # f where another phase begins
    effects: EffectsPass | None = None

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
        if step.index in self.setting.domain.switches:
            self.turns.append(step.outputs.clone())
        tallies = self.accumulator.add(step, due=due)
        if self.effects is not None:
            self.effects.add(step)
        self.summed_gradient += step.impulse
        self.step_sizes.append(step.step_size)
        self.clippings.append(step.clipping)
        self.weights, self.memory = step.end, step.memory
        self.check(step.index, tallies)
        return tallies

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Go back over the path, if it is integrated so; how many steps are done of how many."""
        yield from self.accumulator.steps_back(self.weights, self.step_sizes)
        for step, tallies in enumerate(self.accumulator.late_tallies or ()):
            self.check(step, tallies)

    def sweeps_back(self) -> Iterator[tuple[int, int]]:
        """Sweep back over the path for effects, if they are asked for; how many steps are done of how many."""
        if self.effects is not None:
            yield from self.effects.steps_back(self.weights, self.step_sizes)

    def check(self, step: int, tallies: Mapping[str, Tally]) -> None:
        """Remember a step that is not closed, though its rule closes."""
        closing = self.setting.experiment.path.closing
        if closing is None or closing.option not in tallies:
            return
        found = tallies[closing.option].miss(self.setting.rounding)
        if found is not None:
            self.misses[step] = found

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "weights": self.weights,
            "memory": dict(self.memory),
            "accumulator": self.accumulator.state,
            "timetable": self.timetable.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
            "clippings": self.clippings,
            "misses": {step: (closure.error, closure.bound) for step, closure in self.misses.items()},
            "turns": self.turns,
            "effects": None if self.effects is None else self.effects.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.weights = self.here(state["weights"])
        self.memory = {part: self.here(weights) for part, weights in state["memory"].items()}
        self.accumulator.restore(state["accumulator"])
        self.timetable.restore(state["timetable"])
        self.summed_gradient.copy_(state["summed_gradient"])
        self.step_sizes = list(state["step_sizes"])
        self.clippings = list(state["clippings"])
        self.misses = {step: Closure(*numbers) for step, numbers in state["misses"].items()}
        self.turns = [outputs.to(self.summed_gradient.device) for outputs in state["turns"]]
        if self.effects is not None:
            self.effects.restore(state["effects"])

    def here(self, weights: Weights) -> Weights:
        """Weights on the device of the run."""
        return {name: weight.to(self.summed_gradient.device) for name, weight in weights.items()}


def spilled(setting: Setting) -> int:
    """Bytes on disk of sums that do not fit into the memory: as they are, in two checkpoints at the moment when one
    replaces the other, and as what the run leaves, before which there is one checkpoint less.
    """
    experiment, phases = setting.experiment, len(setting.experiment.switches) + 1
    rules = len(experiment.path.rule)
    summed, left = rules * phases + bool(experiment.path.finer), rules * (1 + phases if phases > 1 else 1)
    return (2 * summed + max(summed, left)) * prod(setting.domain.shape[:3]) * torch.float64.itemsize


def begin(setting: Setting, room: Room, scratch: Path | None = None) -> RunState:
    """The state before the first step; an integration that goes back takes room for its recording, and what does not
    fit into the memory lies in a folder, if there is one.
    """
    experiment, weights = setting.experiment, setting.problem.weights
    domain = replace(setting.domain, scratch=scratch if setting.domain.spills else None)
    if domain.scratch is not None:
        refuse_small_disk(domain.scratch, spilled(setting) - kept_bytes(domain.scratch))
    accumulator, asked = experiment.integration.begin(domain, weights, room), setting.sweep
    if setting.domain.switches and experiment.integration.passes == 1:
        accumulator = Marked(accumulator=accumulator, switches=setting.domain.switches)
    return RunState(
        setting=setting,
        weights=weights,
        accumulator=accumulator,
        timetable=experiment.timetable(),
        summed_gradient=torch.zeros_like(setting.descent.targets),
        effects=begin_effects(setting, asked, accumulator.recorded(), room) if asked and not asked.retrains else None,
    )
