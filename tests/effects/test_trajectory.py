"""A recorded step, taken again by the formulas of its description, leads where the training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as some
from torch import Tensor
from torch.func import jacrev, vjp

from ntkexp.effects.sweep import MEANS, AbstractMean, Infinitesimal, MeanName, sweep_from
from ntkexp.effects.trajectory import TakenBatch, TrainedStep, flat_like
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.path.step import Step
from tests.effects.test_effects import OPTIMIZERS, Trained, Weighted, distance, end_gradient, outputs, trained

EPS = torch.finfo(torch.float64).eps
SUM = 64  # numbers in the longest sum of a gradient, that over pixels: each may round it by ε of their magnitudes


def rounding(step: TrainedStep) -> Tensor:
    """Return a bound on the rounding of g + λθ, which is summed elsewhere: ε times its largest gradients."""
    weights = step.weights.clone()
    each = [batch.shares[:, None] * jacrev(batch.losses)(weights) for batch in step.batches]
    return SUM * EPS * (torch.cat(each).abs().sum(0).max() + (step.updates[0].linear.l2 * weights).abs())


def gradient(step: TrainedStep) -> Tensor:
    """Σ κᵢ ∇ℓᵢ."""
    weights = step.weights.clone().requires_grad_()
    loss = sum((batch.shares * batch.losses(weights)).sum() for batch in step.batches)
    return torch.autograd.grad(torch.as_tensor(loss), weights)[0]


def taken(step: TrainedStep, memory: Tensor) -> tuple[Tensor, Tensor]:
    """θ and m after the step, for an update of all weights."""
    linear, g = step.updates[0].linear, gradient(step)
    c = 1.0 if step.clip_norm is None else min(1.0, step.clip_norm / (float(g.norm()) + 1e-6))
    p = c * g + linear.l2 * step.weights
    memory = linear.momentum_decay * memory + linear.momentum_gain * p
    return (
        1 - linear.decoupled_decay
    ) * step.weights - linear.momentum_scale * memory - linear.gradient_scale * p, memory


@pytest.mark.parametrize(
    "optimizer", [pytest.param(o, marks=() if o in ("nesterov", "amsgrad") else pytest.mark.slow) for o in OPTIMIZERS]
)
def test_a_recorded_step_leads_where_it_led(optimizer: str, tmp_path: Path) -> None:
    """To the rounding of its gradients, which the step amplifies: Adam divides a gradient by past gradients."""
    found = trained(tmp_path, *OPTIMIZERS[optimizer]).trajectory
    memory = known = torch.zeros_like(found.end)
    for index in range(found.length):
        step = found.step(index)
        after, memory = taken(step, memory)
        expected = found.step(index + 1).weights if index + 1 < found.length else found.end
        (update,), fresh = step.updates, rounding(step)
        linear = update.linear
        known = linear.momentum_decay * known + linear.momentum_gain * fresh
        bound = (
            linear.momentum_scale * known + linear.gradient_scale * fresh + EPS * (step.weights.abs() + expected.abs())
        )
        assert ((after - expected).abs() <= bound).all()
        if update.denominator is not None:
            assert ((memory - update.denominator.mean).abs() <= known).all()


# A mean without an example is known exactly, so effects predict at once what one step does to it.


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
    """For steps so small that later steps are linear, and only the mean is not."""
    found = trained(tmp_path, "optimizer=sgd", "optimizer.batch=4", f"optimizer.step_size={SMALL}")
    told = effects(found, MEANS[mean], end_gradient(found))
    actual = torch.stack([outputs(found, walk(found, mean, k)[-1].end) for k in range(told.shape[1])], dim=1)
    actual -= outputs(found, found.trajectory.flat.weights(found.trajectory.end))[:, None]
    assert distance(told, actual) < 100 * SMALL  # of second order, in 7 steps


def walk(found: Trained, mean: MeanName, left_out: int) -> list[Step]:
    """The steps without an example."""
    weights = torch.ones(found.trajectory.examples, dtype=torch.float64)
    weights[left_out] = 0.0
    again = vars(found.setting.descent) | {"renormalises": mean == "renormalised"}
    return list(Weighted(**again, example_weights=weights).steps_from(found.setting.problem.weights))


@pytest.mark.parametrize("mean", MEANS)
def test_in_batches_of_four_the_derivative_is_a_quarter_too_small(mean: MeanName, tmp_path: Path) -> None:
    """After one step without clipping, linear outputs change by the mean without the example."""
    found = trained(tmp_path, "optimizer=momentum", "optimizer.batch=4", "optimizer.step_size=0.2", "steps=1")
    flat = found.trajectory.flat
    every = torch.eye(flat.size, dtype=torch.float64)
    told, derivative = effects(found, MEANS[mean], every), effects(found, Infinitesimal(MEANS[mean]), every)
    actual = torch.zeros_like(told)
    for example in range(found.trajectory.examples):
        (step,) = walk(found, mean, example)
        actual[:, example] = flat.vector(step.end) - found.trajectory.end
    assert distance(told, actual) < 1e-12  # a step rounds by 1e-16, and changes are a thousandth
    factor = 4 / 3 if mean == "renormalised" else 1.0
    assert distance(factor * derivative, told) < ROUNDING


# Weights by name are views of one vector; their gradient is assembled once, for any number of names.


class Counting(DispatchMode):
    """Counts the numbers in tensors that operations make."""

    made: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not found._is_view():
            self.made += found.numel()
        return found


def made_on_the_way_back(names: int) -> float:
    """Numbers for each weight, where every weight is squared and all are summed."""
    flat = flat_like({str(k): torch.zeros(5) for k in range(names)})

    def squared(vector: Tensor) -> Tensor:
        return torch.stack([weight @ weight for weight in flat.weights(vector).values()]).sum()

    back = vjp(squared, torch.ones(flat.size))[1]
    counting = Counting()
    with counting:
        back(torch.tensor(1.0))
    return counting.made / flat.size


def test_many_names_cost_no_more_on_the_way_back_than_few() -> None:
    assert made_on_the_way_back(40) < 1.1 * made_on_the_way_back(4)  # and not one vector for each name
