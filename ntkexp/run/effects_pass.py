"""The effects of a run: what leaving each example out would change, found by sweeps back over its recorded steps.

The attributed points are taken a chunk at a time, so many that what their outputs feel fits into the memory; every
chunk goes over the whole recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.mean import mean_of
from ntkexp.effects.sweep import AdjointSweep, sweep_from
from ntkexp.path.backward.recorded_training import RecordedTraining
from ntkexp.path.backward.recording import Recording, row_length
from ntkexp.path.integration.base import Room
from ntkexp.path.points import cut
from ntkexp.path.step import Step
from ntkexp.run.setting import Setting
from ntkexp.run.sweep_setting import SweepSetting
from ntkexp.shapes import Weights


@dataclass(kw_only=True)
class EffectsPass:
    """Where the sweeps stand: `done` chunks of points are behind, `sweep` is that of the next one."""

    setting: Setting
    asked: SweepSetting
    recording: Recording
    keeps: bool  # whether the steps are kept here, or by another who goes back over them
    effects: Float[Tensor, "attributed integrated train"]
    sizes: Float[Tensor, " moment"] | None = None  # Σ‖a‖ from the end on, over the chunks that are done
    done: int = 0
    sweep: AdjointSweep | None = None
    saved: Mapping[str, Any] | None = None  # of a checkpoint, of a sweep under way

    def add(self, step: Step) -> None:
        """Take in a step that was taken."""
        if self.keeps:
            self.recording.write(step)

    def steps_back(self, end: Weights, step_sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
        """Sweep back over what is left; how many steps are done of how many."""
        if self.keeps:
            self.recording.close(len(step_sizes), end)
        training = RecordedTraining(recording=self.recording, descent=self.setting.descent, step_sizes=step_sizes)
        chunks, length = cut(0, len(self.effects), self.asked.plan.chunk), training.length
        while self.done < len(chunks):
            self.sweep = self.begin(training, chunks[self.done])
            for left in self.sweep.steps_back():
                yield (self.done + 1) * length - left, len(chunks) * length
            self.end(self.sweep, chunks[self.done])

    def begin(self, training: RecordedTraining, chunk: slice) -> AdjointSweep:
        """The sweep of a chunk, where it stands."""
        vectors = self.end_gradients(training, self.asked.points[chunk])
        path = self.setting.experiment.path
        mean, one_step = mean_of(path.effects, path.mean), path.effects == "one_step"
        sweep = sweep_from(training, vectors, mean, self.asked.plan.together, one_step=one_step)
        if self.saved is not None:
            sweep.restore(self.saved)
            self.saved = None
        return sweep

    def end(self, sweep: AdjointSweep, chunk: slice) -> None:
        """Take in what a sweep has found."""
        self.effects[chunk] = sweep.effects.view(-1, *self.effects.shape[1:])
        sizes = torch.tensor(sweep.sizes, dtype=torch.float64)
        self.sizes = sizes if self.sizes is None else self.sizes + sizes
        self.done, self.sweep = self.done + 1, None

    def end_gradients(self, training: RecordedTraining, points: Tensor) -> Float[Tensor, "vector weight"]:
        """∂F/∂θ_T of all outputs of some points, one after another."""
        read, outputs = self.setting.points, list(self.setting.domain.integrated)

        def outputs_at(weights: Tensor, one: Tensor) -> Tensor:
            found: Tensor = read.reader.function(training.flat.weights(weights), one)
            return found[0, outputs]

        rows = [jacrev(outputs_at)(training.end, read.inputs[[int(point)]]) for point in points]
        return torch.cat(rows)

    @property
    def growth(self) -> float:
        """How much more outputs feel of the weights at most than of those at the end: max_s ‖a_s‖/‖a_T‖."""
        if self.sizes is None or not self.sizes.isfinite().all():
            return float("inf")
        return float(self.sizes.max() / self.sizes[0])

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "done": self.done,
            "effects": self.effects,
            "sizes": self.sizes,
            "sweep": None if self.sweep is None else self.sweep.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.done, self.sizes, self.saved = state["done"], state["sizes"], state["sweep"]
        self.effects.copy_(state["effects"])


def begin_effects(setting: Setting, asked: SweepSetting, recording: Recording | None, room: Room) -> EffectsPass:
    """No step taken yet; steps are recorded here, unless another does that anyway."""
    like, domain, keeps = setting.problem.weights, setting.domain, recording is None
    if recording is None:
        records, pull = setting.experiment.optimizer.differentiated, domain.no_pull()
        rows = room(domain.steps + 1, row_length(like, records, pull))
        recording = Recording(rows=rows, like=like, records=records, pull=pull)
    shape = len(asked.points), len(domain.integrated), setting.points.train
    return EffectsPass(
        setting=setting, asked=asked, recording=recording, keeps=keeps, effects=domain.like.new_zeros(shape)
    )
