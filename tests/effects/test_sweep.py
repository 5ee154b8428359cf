"""The derivative is held against that of the whole training written out."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.effects.curvature import Clipping, gradient
from ntkexp.effects.sweep import MEANS, Infinitesimal, MeanName, sweep_from
from tests.effects.trainings import OPTIMIZERS, Trained, distance, trained
from tests.effects.unrolled import derivative

TOLERANCE = 1e-11  # rounding, times what 7 steps and Adam's division by small numbers make of it


def outputs(found: Trained, weights: dict[str, Tensor]) -> Tensor:
    """F at the probe points, in a row."""
    points = found.setting.points
    return points.reader.function(weights, points.inputs[points.train :]).flatten()


def end_gradient(found: Trained) -> Tensor:
    flat = found.trajectory.flat
    gradient: Tensor = torch.func.jacrev(lambda at: outputs(found, flat.weights(at)))(flat.vector(found.end))
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
    left = sweep_from(found.trajectory, end, MEANS["fixed"], together=4)
    next(left.steps_back())
    state = deepcopy(left.state)
    resumed = sweep_from(found.trajectory, end, MEANS["fixed"])
    resumed.restore(state)
    for _ in resumed.steps_back():
        continue
    assert torch.equal(-resumed.effects, slopes(found, "fixed", end, together=4))
