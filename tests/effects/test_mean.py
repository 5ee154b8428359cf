"""A mean without an example is known exactly, so effects foretell at once what one step does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from ntkexp.effects.sweep import MEANS, AbstractMean, Infinitesimal, MeanName, sweep_from
from ntkexp.effects.trajectory import TakenBatch
from ntkexp.path.step import Step
from tests.effects.test_sweep import end_gradient, outputs
from tests.effects.trainings import Trained, Weighted, distance, trained

SMALL = 1e-4  # a step size
ROUNDING = 1e-13  # of sums of a few numbers near 1


def batch_of(examples: list[int], *, is_mean: bool = True) -> TakenBatch:
    shares = torch.full((len(examples),), 3.0 / len(examples), dtype=torch.float64)  # of a loss that counts threefold
    return TakenBatch(examples=torch.tensor(examples), shares=shares, losses=lambda weights: weights, is_mean=is_mean)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
@given(examples=some.lists(some.integers(0, 4), min_size=1, max_size=7), is_mean=some.booleans())
@settings(max_examples=40, deadline=None)
def test_rows_of_an_example_add_up_to_what_its_leaving_does(
    mean: AbstractMean, examples: list[int], *, is_mean: bool
) -> None:
    """However often it was drawn, and where it was alone."""
    batch = batch_of(examples, is_mean=is_mean)
    along = torch.cos(torch.tensor(examples, dtype=torch.float64))[None]  # γ·∇ℓ, the same for the same example
    found = mean.removals(along, batch)[0]
    everyone = torch.ones(1, len(examples), dtype=torch.float64)
    for example in set(examples):
        there = (batch.examples != example).double()[None]
        change = (mean.shares(batch, there) - mean.shares(batch, everyone)) @ along[0]
        assert abs(found[batch.examples == example].sum() - change) < ROUNDING


def effects(found: Trained, mean: AbstractMean, vectors: Tensor) -> Tensor:
    sweep = sweep_from(found.trajectory, vectors, mean)
    for _ in sweep.steps_back():
        continue
    return sweep.effects


@pytest.mark.parametrize("mean", [pytest.param("fixed", marks=pytest.mark.slow), "renormalised"])
def test_trainings_in_batches_of_four_change_by_the_effect(mean: MeanName, tmp_path: Path) -> None:
    """Where steps are so small that what follows is linear, and only the mean is not."""
    found = trained(tmp_path, "optimizer=sgd", "optimizer.batch=4", f"optimizer.step_size={SMALL}")
    told = effects(found, MEANS[mean], end_gradient(found))
    actual = torch.stack([outputs(found, walk(found, mean, k)[-1].end) for k in range(told.shape[1])], dim=1)
    actual -= outputs(found, found.end)[:, None]
    assert distance(told, actual) < 100 * SMALL  # of second order, in 7 steps


def walk(found: Trained, mean: MeanName, left_out: int) -> list[Step]:
    """The steps without an example."""
    weights = torch.ones(found.trajectory.examples, dtype=torch.float64)
    weights[left_out] = 0.0
    again = vars(found.setting.descent) | {"renormalises": mean == "renormalised"}
    return list(Weighted(**again, example_weights=weights).walk(found.setting.problem.weights))


@pytest.mark.parametrize("mean", MEANS)
def test_in_batches_of_four_the_derivative_is_a_quarter_too_small(mean: MeanName, tmp_path: Path) -> None:
    """Of one step without clipping, outputs that are linear in the weights feel what a mean without an example does."""
    found = trained(tmp_path, "optimizer=momentum", "optimizer.batch=4", "optimizer.step_size=0.2", "steps=1")
    flat = found.trajectory.flat
    every = torch.eye(flat.size, dtype=torch.float64)
    told, derivative = effects(found, MEANS[mean], every), effects(found, Infinitesimal(MEANS[mean]), every)
    actual = torch.zeros_like(told)
    for example in range(found.trajectory.examples):
        (step,) = walk(found, mean, example)
        actual[:, example] = flat.vector(step.end) - flat.vector(found.end)
    assert distance(told, actual) < 1e-12  # a step of rounding 1e-16, beside changes of a thousandth
    factor = 4 / 3 if mean == "renormalised" else 1.0
    assert distance(factor * derivative, told) < ROUNDING
