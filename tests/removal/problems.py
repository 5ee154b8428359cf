"""Small trainings that can be repeated."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ntkexp.progress import Silent
from ntkexp.removal.between import Breakdown, Pair
from ntkexp.removal.rerun import Rerun, breakdown_between, rerun_of
from ntkexp.run.setting import prepare
from tests.run.small import small

BATCH = "optimizer.batch=6"
DECAY = "optimizer.weight_decay=0.05"
LATE = "optimizer.betas=[0.9,0.9]"  # so that the largest square is not always the latest
CLIP = "optimizer.clip_norm=0.2"
CASES: dict[str, tuple[str, ...]] = {
    "gd": ("optimizer=gd", "optimizer.step_size=0.3"),
    "sgd": ("optimizer=sgd", "optimizer.step_size=0.3", BATCH, "schedule=cosine", DECAY),
    "clipped": ("optimizer=sgd", "optimizer.step_size=0.3", BATCH, DECAY, CLIP, "optimizer.layers={network.1: 0.25}"),
    "replacement": ("optimizer=sgd", "optimizer.step_size=0.3", BATCH, "optimizer.replacement=true"),
    "sum": ("optimizer=sgd", "optimizer.step_size=0.03", BATCH, "loss.reduction=sum"),
    "one by one": ("optimizer=momentum", "optimizer.step_size=0.05", "optimizer.batch=1", DECAY),
    "momentum": ("optimizer=momentum", "optimizer.step_size=0.1", BATCH, "optimizer.dampening=0.3", DECAY, CLIP),
    "nesterov": ("optimizer=nesterov", "optimizer.step_size=0.05", BATCH, DECAY),
    "rmsprop": ("optimizer=rmsprop", BATCH, DECAY, CLIP),
    "adam": ("optimizer=adam", "optimizer.step_size=0.01", BATCH, DECAY, CLIP),
    "adamw": ("optimizer=adamw", "optimizer.step_size=0.01", BATCH, DECAY, "schedule=cosine"),
    "amsgrad": ("optimizer=adam", "optimizer.step_size=0.01", BATCH, "optimizer.amsgrad=true", LATE),
}  # fmt: skip
GROUP = [0, 3, 5, 7]


@cache
def rerun(case: str, activation: str, *more: str) -> tuple[Rerun, Tensor]:
    """Return a training, and points at which outputs are computed."""
    words = ("data=digits", "data.classes=[0,1,2]", "loss=cross_entropy", "data.query=3", "data.test=3", "steps=10")
    experiment = small(*words, f"model.activation={activation}", *CASES[case], *more)
    setting = prepare(experiment)
    length = experiment.steps
    found = rerun_of(experiment, setting.problem, setting.descent.step_size, length)
    return found, setting.problem.inputs[found.examples : found.examples + 3]


CHOSEN = torch.cartesian_prod(torch.arange(3), torch.arange(3))


def split(training: Rerun, points: Tensor, first: Tensor, second: Tensor) -> Breakdown:
    """Return the breakdown of the change between two weightings of the examples."""
    with tempfile.TemporaryDirectory() as folder:
        return breakdown_between(training, Pair(first, second), points, CHOSEN, Path(folder), Silent())
