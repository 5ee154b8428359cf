"""Small trainings of every optimizer of the runner, recorded step by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.trajectory import AbstractTrajectory
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.path.step import Descent
from ntkexp.records.data import Trajectory
from ntkexp.run.setting import Setting, prepare
from ntkexp.shapes import Weights
from tests.run.small import small

QUICK = (
    "data=digits", "data.classes=[0,1,2]", "data.train=6", "data.probe=3", "data.test=0", "loss=cross_entropy",
    "steps=7", "model.width=5", "model.activation=tanh", "path.rule=[left]", "ladder.machine=[left]",
    "path.attributed=1000",
)  # fmt: skip
OPTIMIZERS = {
    "gd": ("optimizer=gd", "optimizer.step_size=0.5"),
    "sgd": ("optimizer=sgd", "optimizer.batch=4", "optimizer.step_size=0.5", "schedule=cosine",
            "optimizer.weight_decay=0.02", "optimizer.clip_norm=0.5"),
    "replacement": ("optimizer=sgd", "optimizer.batch=5", "optimizer.replacement=true", "optimizer.step_size=0.5"),
    "momentum": ("optimizer=momentum", "optimizer.batch=4", "optimizer.step_size=0.2", "optimizer.dampening=0.3",
                 "optimizer.weight_decay=0.02", "optimizer.layers={network.1: 0.3}", "schedule=cosine"),
    "nesterov": ("optimizer=nesterov", "optimizer.batch=4", "optimizer.step_size=0.2", "optimizer.weight_decay=0.02",
                 "optimizer.clip_norm=0.5"),
    "adam": ("optimizer=adam", "optimizer.batch=4", "optimizer.step_size=0.05", "optimizer.weight_decay=0.02",
             "optimizer.clip_norm=0.5", "optimizer.layers={network.1: 0.3}"),
    "amsgrad": ("optimizer=adam", "optimizer.amsgrad=true", "optimizer.batch=4", "optimizer.step_size=0.05",
                "optimizer.betas=[0.9,0.7]"),
    "adamw": ("optimizer=adamw", "optimizer.batch=4", "optimizer.step_size=0.05", "optimizer.weight_decay=0.3",
              "schedule=cosine"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Weighted(Descent):
    """A descent whose examples count as much as they weigh."""

    example_weights: Float[Tensor, " train"]
    renormalises: bool  # whether a mean is by the sum of the weights

    def output_gradient(self, index: int, outputs: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        drawn = self.optimizer.batch_indices(index, self.points.train, self.seed)
        batch = torch.arange(self.points.train) if drawn is None else drawn
        weights = torch.bincount(batch, minlength=self.points.train) * self.example_weights
        share = 1 / weights.sum() if self.renormalises else 1 / len(batch)
        return self.loss.output_gradient(outputs, self.targets) * (weights * share * self.scale)[:, None]


@dataclass(frozen=True)
class Trained:
    """A training, with what it was made of."""

    setting: Setting
    trajectory: AbstractTrajectory
    end: Weights


def trained(folder: Path, *overrides: str) -> Trained:
    """Descend, and record every step."""
    setting = prepare(small(*QUICK, *overrides))
    optimizer, weights = setting.experiment.optimizer, setting.problem.weights
    records, pull = (*optimizer.records, *optimizer.differentiated), setting.domain.no_pull()
    size = row_length(weights, records, pull)
    rows = Trajectory(folder / "trajectory.bin", setting.experiment.steps + 1, size, setting.experiment.dtype)
    rows.take_room()
    recording, sizes, end = Recording(rows=rows, like=weights, records=records, pull=pull), [], weights
    for step in setting.descent.walk(weights):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return Trained(setting, RecordedTraining(recording=recording, descent=setting.descent, step_sizes=sizes), end)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
