"""The derivative is held against trainings with other weights of the examples: central differences of order 6."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.effects.clipping import Clipping
from ntkexp.effects.curvature import gradient
from ntkexp.effects.mean import MEANS, Infinitesimal, MeanName
from ntkexp.effects.sweep import sweep_from
from tests.effects.trainings import OPTIMIZERS, Trained, Weighted, distance, trained

STEP = {"adam": 1e-5, "amsgrad": 1e-5, "adamw": 1e-5}  # with ε = 1e-8 wider ones are off themselves
STENCIL = ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))
TOLERANCE = 1e-9  # rounding is 1e-16/h, times what 7 steps and Adam's division by small numbers make of it
QUICK, SLOW = (("adam", "renormalised"), ("momentum", "fixed")), pytest.mark.slow


def outputs(found: Trained, weights: dict[str, Tensor]) -> Tensor:
    """F at the probe points, in a row."""
    points = found.setting.points
    with torch.no_grad():
        return points.reader.function(weights, points.inputs[points.train :]).flatten()


def differences(found: Trained, mean: MeanName, width: float) -> Tensor:
    """∂F/∂w by trainings from the same start, in the same order."""
    examples = found.trajectory.examples
    columns = []
    for example in range(examples):
        column = torch.zeros(())
        for times, factor in STENCIL:
            for sign in (1, -1):
                weights = torch.ones(examples, dtype=torch.float64)
                weights[example] += sign * times * width
                given = vars(found.setting.descent) | {"renormalises": mean == "renormalised"}
                *_, last = Weighted(**given, example_weights=weights).walk(found.setting.problem.weights)
                column = column + sign * factor / width * outputs(found, last.end)
        columns.append(column)
    return torch.stack(columns, dim=1)


def end_gradient(found: Trained) -> Tensor:
    flat = found.trajectory.flat
    gradient: Tensor = torch.func.jacrev(lambda at: outputs_of(found, flat.weights(at)))(flat.vector(found.end))
    return gradient


def outputs_of(found: Trained, weights: dict[str, Tensor]) -> Tensor:
    points = found.setting.points
    return points.reader.function(weights, points.inputs[points.train :]).flatten()


def slopes(found: Trained, mean: MeanName, vectors: Tensor, together: int | None = None) -> Tensor:
    sweep = sweep_from(found.trajectory, vectors, Infinitesimal(MEANS[mean]), together)
    for _ in sweep.steps_back():
        continue
    return -sweep.effects


@pytest.mark.parametrize(
    ("optimizer", "mean"),
    [pytest.param(o, m, marks=() if (o, m) in QUICK else SLOW) for o in OPTIMIZERS for m in MEANS],
)
def test_effects_are_the_derivative_of_training(optimizer: str, mean: MeanName, tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS[optimizer])
    exact = slopes(found, mean, end_gradient(found))
    assert distance(exact, differences(found, mean, STEP.get(optimizer, 1e-3))) < TOLERANCE


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
    assert torch.equal(slopes(found, "renormalised", end, together=5), apart)


def test_a_sweep_that_was_left_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS["amsgrad"])
    end = end_gradient(found)
    left = sweep_from(found.trajectory, end, MEANS["fixed"], together=4)
    next(left.steps_back())
    state = deepcopy(left.state)
    resumed = sweep_from(found.trajectory, end, MEANS["fixed"])
    resumed.restore(state)
    for _ in resumed.steps_back():
        continue
    assert torch.equal(-resumed.effects, slopes(found, "fixed", end, together=4))
