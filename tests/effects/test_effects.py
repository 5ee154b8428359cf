"""Small trainings of every optimizer of the runner, recorded step by step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.curvature import Clipping, gradient
from ntkexp.effects.sweep import MEANS, AbstractMean, Infinitesimal, MeanName, sweep_from
from ntkexp.effects.trajectory import AbstractTrajectory, TakenBatch
from ntkexp.optimizer.base import GUARD, AbstractOptimizer
from ntkexp.optimizer.descent import GD, SGD, Adam, AdamW, Momentum, Nesterov, Rmsprop
from ntkexp.path.recording import RecordedTraining
from ntkexp.path.step import Descent, sizes_of
from ntkexp.run.setting import Setting, prepare
from tests.run.small import recorded_steps, small

QUICK = (
    "data=digits", "data.classes=[0,1,2]", "data.train=6", "data.query=3", "data.test=0", "loss=cross_entropy",
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
    "rmsprop": ("optimizer=rmsprop", "optimizer.batch=4", "optimizer.smoothing=0.7", "optimizer.weight_decay=0.02",
                "optimizer.clip_norm=0.5", "schedule=cosine"),
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
    """A training with its setting."""

    setting: Setting
    trajectory: AbstractTrajectory


def trained(folder: Path, *overrides: str) -> Trained:
    """Descend, and record every step."""
    setting = prepare(small(*QUICK, *overrides))
    recording, sizes = recorded_steps(setting, folder / "trajectory.bin", setting.experiment.optimizer.differentiated)
    return Trained(setting, RecordedTraining(recording=recording, descent=setting.descent, step_sizes=sizes))


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


# A training by the definitions of PyTorch's optimizers, in one graph of autograd.
#
# It is exact, unlike finite differences of trainings: with Adam's ε = 1e-8, differences of order 6 had errors up to
# 2e-3 at a width of 1e-4, and of 1e-1 at 1e-5 if the sign of a gradient changes nearby.


Memory: TypeAlias = dict[str, Tensor]


def derivative(found: Trained, mean: MeanName) -> Float[Tensor, "vector example"]:
    """∂F/∂w of every output at the query points, at weights of 1."""
    weights = torch.ones(found.trajectory.examples, dtype=torch.float64, requires_grad=True)
    reached = end(found, mean, weights)
    assert (reached - found.trajectory.end).abs().max() < 1e-12  # the same training
    points = found.setting.points
    outputs = points.reader.function(found.trajectory.flat.weights(reached), points.inputs[points.train :]).flatten()
    return torch.stack([torch.autograd.grad(output, weights, retain_graph=True)[0] for output in outputs])


def end(found: Trained, mean: MeanName, example_weights: Float[Tensor, " example"]) -> Float[Tensor, " weight"]:
    """θ after a training with these weights of the examples."""
    descent, flat, like = found.setting.descent, found.trajectory.flat, found.setting.problem.weights
    optimizer, memory = descent.optimizer, Memory()
    theta = flat.vector(like).requires_grad_()
    for index in range(descent.steps):
        size = sizes_of(like, descent.factors, descent.step_size_at(index))
        sizes = flat.vector({name: torch.full_like(weight, size[name]) for name, weight in like.items()})
        g = step_gradient(found, mean, index, theta, example_weights)
        if optimizer.clip_norm is not None:
            g = g * (optimizer.clip_norm / (g.norm() + GUARD)).clamp(max=1)
        coupled, lost = (0.0, 1.0) if optimizer.decouples else (1.0, 0.0)
        moved = MOVES[type(optimizer)](optimizer, index, g + coupled * optimizer.weight_decay * theta, memory)
        theta = theta - sizes * (moved + lost * optimizer.weight_decay * theta)
    return theta


def step_gradient(
    found: Trained, mean: MeanName, index: int, theta: Tensor, example_weights: Float[Tensor, " example"]
) -> Float[Tensor, " weight"]:
    """The gradient of a step, a mean of weighted losses."""
    descent, points = found.setting.descent, found.setting.points
    drawn = descent.optimizer.batch_indices(index, points.train, descent.seed)
    rows = torch.arange(points.train) if drawn is None else drawn
    outputs = points.reader.function(found.trajectory.flat.weights(theta), points.inputs[rows])
    losses, weights = descent.loss.value(outputs, descent.targets[rows]), example_weights[rows]
    whole = weights.sum() if mean == "renormalised" else len(rows)
    found_: Tensor = torch.autograd.grad(losses @ weights / whole, theta, create_graph=True)[0]
    return found_


def plain(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    return p


def momentum(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    memory["v"] = optimizer.momentum * memory["v"] + (1 - optimizer.dampening) * p if index else p
    return memory["v"]


def nesterov(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    memory["v"] = optimizer.momentum * memory["v"] + p if index else p
    return p + float(optimizer.momentum) * memory["v"]


def adaptive(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    """m̂/(√v̂ + ε), v̂ the largest so far where that is asked for."""
    nothing, (first, second) = torch.zeros_like(p), optimizer.betas
    memory["m"] = first * memory.get("m", nothing) + (1 - first) * p
    memory["v"] = second * memory.get("v", nothing) + (1 - second) * p * p
    root = torch.where(memory["v"] > 0, memory["v"].clamp(min=1e-300).sqrt(), 0.0)  # at zero √ has no slope
    if optimizer.amsgrad:
        root = memory["root"] = torch.maximum(root, memory.get("root", nothing))
    corrected: Tensor = memory["m"] / (1 - first ** (index + 1))
    found: Tensor = corrected / (root / (1 - second ** (index + 1)) ** 0.5 + optimizer.eps)
    return found


def rmsprop(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    share = optimizer.smoothing
    memory["v"] = share * memory.get("v", torch.zeros_like(p)) + (1 - share) * p * p
    root = torch.where(memory["v"] > 0, memory["v"].clamp(min=1e-300).sqrt(), 0.0)  # at zero √ has no slope
    return p / (root + float(optimizer.eps))


MOVES: dict[type[AbstractOptimizer], Callable[[Any, int, Tensor, Memory], Tensor]] = {
    GD: plain,
    SGD: plain,
    Momentum: momentum,
    Nesterov: nesterov,
    Rmsprop: rmsprop,
    Adam: adaptive,
    AdamW: adaptive,
}
"""θ ← θ − η times this."""


# Steps without an example: exact for one step, and the derivative for a very small omission.


SLOW = pytest.mark.slow
LITTLE = 1e-7  # of an example


@dataclass(frozen=True)
class ALittle(AbstractMean):
    """A convention that leaves out only a little of each example."""

    mean: AbstractMean

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        return self.mean.shares(batch, 1 - LITTLE * (1 - weights))

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return self.mean.slopes(along, batch)

    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return self.mean.removals(along, batch)


def effects(found: Trained, mean: AbstractMean, vectors: Tensor) -> Tensor:
    sweep = sweep_from(found.trajectory, vectors, mean, outputs_per_pass=4, one_step=True)
    for _ in sweep.steps_back():
        continue
    return sweep.effects


@pytest.mark.parametrize("optimizer", [pytest.param(o, marks=[SLOW] * (o != "amsgrad")) for o in OPTIMIZERS])
def test_leaving_out_a_little_is_the_derivative(optimizer: str, tmp_path: Path) -> None:
    eps = ("optimizer.eps=1e-3",) if optimizer in {"adam", "adamw", "amsgrad", "rmsprop"} else ()
    found, mean = trained(tmp_path, *OPTIMIZERS[optimizer], *eps), MEANS["renormalised"]
    end = end_gradient(found)
    expected = slopes(found, "renormalised", end)
    # the second difference is LITTLE times curvatures up to 1/eps, and rounding 1e-16/LITTLE
    assert distance(-effects(found, ALittle(mean), end) / LITTLE, expected) < 1e-4


@pytest.mark.parametrize(
    ("optimizer", "mean"),
    [
        pytest.param(optimizer, mean, marks=[SLOW] * (optimizer not in ("nesterov", "adam")))
        for optimizer, mean in zip(OPTIMIZERS, cycle(MEANS), strict=False)
    ],
)
def test_of_one_step_it_is_the_truth(optimizer: str, mean: MeanName, tmp_path: Path) -> None:
    """Outputs that are linear in the weights change by the step alone."""
    found = trained(tmp_path, *OPTIMIZERS[optimizer], "steps=1")
    flat, descent = found.trajectory.flat, found.setting.descent
    chosen = torch.eye(flat.size, dtype=torch.float64)
    predicted = effects(found, MEANS[mean], chosen)
    for example in range(2):
        weights = torch.ones(found.trajectory.examples, dtype=torch.float64)
        weights[example] = 0.0
        given = vars(descent) | {"renormalises": mean == "renormalised"}
        (step,) = Weighted(**given, example_weights=weights).steps_from(found.setting.problem.weights)
        actual = flat.vector(step.end) - found.trajectory.end
        assert (predicted[:, example] - actual).abs().max() < 1e-12 * (actual.abs().max() + 1e-3)


# The derivative, compared with the derivative of the whole training written out.


TOLERANCE = 1e-11  # rounding, amplified by 7 steps and Adam's division by small numbers


def outputs(found: Trained, weights: dict[str, Tensor]) -> Tensor:
    """F at the query points, in a row."""
    points = found.setting.points
    return points.reader.function(weights, points.inputs[points.train :]).flatten()


def end_gradient(found: Trained) -> Tensor:
    flat = found.trajectory.flat
    gradient: Tensor = torch.func.jacrev(lambda at: outputs(found, flat.weights(at)))(found.trajectory.end)
    return gradient


def slopes(found: Trained, mean: MeanName, vectors: Tensor, together: int | None = None) -> Tensor:
    sweep = sweep_from(found.trajectory, vectors, Infinitesimal(MEANS[mean]), together)
    for _ in sweep.steps_back():
        continue
    return -sweep.effects


@pytest.mark.sample(4)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_effects_are_the_derivative_of_training(optimizer: str, mean: MeanName, tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS[optimizer])
    exact = slopes(found, mean, end_gradient(found))
    assert distance(exact, derivative(found, mean)) < TOLERANCE


def test_clipping_is_seen_at_work(tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS["adam"]).trajectory
    steps = [found.step(index) for index in range(found.length)]
    factors = [Clipping(gradient(step.batches, step.weights), step.clip_norm).factor for step in steps]
    assert any(factor < 1 for factor in factors)


def test_outputs_swept_apart_are_swept_as_together(tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS["adam"])
    end = end_gradient(found)
    expected = slopes(found, "renormalised", end)
    apart = torch.cat([slopes(found, "renormalised", part) for part in torch.split(end, 5)])
    assert distance(apart, expected) < 1e-12  # matrices of other sizes round otherwise
    assert distance(slopes(found, "renormalised", end, together=5), apart) < 1e-12  # and those elsewhere in memory


def test_a_sweep_that_was_left_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS["amsgrad"])
    end = end_gradient(found)
    left = sweep_from(found.trajectory, end, MEANS["fixed"], outputs_per_pass=4)
    next(left.steps_back())
    state = deepcopy(left.state)
    resumed = sweep_from(found.trajectory, end, MEANS["fixed"])
    resumed.restore(state)
    for _ in resumed.steps_back():
        continue
    assert torch.equal(-resumed.effects, slopes(found, "fixed", end, together=4))
