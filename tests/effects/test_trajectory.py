"""A recorded step, taken again by the formulas of its description, leads where the training went."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.trajectory import TrainedStep
from tests.effects.trainings import OPTIMIZERS, trained

EPS = torch.finfo(torch.float64).eps
SUM = 64  # numbers in the longest sum of a gradient, that over pixels: each may round it by ε of their magnitudes


def rounding(step: TrainedStep) -> Tensor:
    """How far rounding may take g + λθ, as it is summed elsewhere: by ε of the largest gradients that make it up."""
    weights = step.weights.clone()
    each = [batch.shares[:, None] * jacrev(batch.losses)(weights) for batch in step.batches]
    return SUM * EPS * (torch.cat(each).abs().sum(0).max() + (step.updates[0].linear.coupled * weights).abs())


def gradient(step: TrainedStep) -> Tensor:
    """Σ κᵢ ∇ℓᵢ."""
    weights = step.weights.clone().requires_grad_()
    loss = sum((batch.shares * batch.losses(weights)).sum() for batch in step.batches)
    return torch.autograd.grad(torch.as_tensor(loss), weights)[0]


def taken(step: TrainedStep, memory: Tensor) -> tuple[Tensor, Tensor]:
    """θ and m after the step, for an update of all weights."""
    linear, g = step.updates[0].linear, gradient(step)
    c = 1.0 if step.clip_norm is None else min(1.0, step.clip_norm / (float(g.norm()) + 1e-6))
    p = c * g + linear.coupled * step.weights
    memory = linear.carry * memory + linear.intake * p
    return (1 - linear.lost) * step.weights - linear.scale * memory - linear.ahead * p, memory


@pytest.mark.parametrize(
    "optimizer", [pytest.param(o, marks=() if o in ("nesterov", "amsgrad") else pytest.mark.slow) for o in OPTIMIZERS]
)
def test_a_recorded_step_leads_where_it_led(optimizer: str, tmp_path: Path) -> None:
    """To the rounding of its gradients, which the step amplifies: Adam divides that of a weight by its past ones."""
    found = trained(tmp_path, *OPTIMIZERS[optimizer]).trajectory
    memory = known = torch.zeros_like(found.end)
    for index in range(found.length):
        step = found.step(index)
        after, memory = taken(step, memory)
        expected = found.step(index + 1).weights if index + 1 < found.length else found.end
        (update,), fresh = step.updates, rounding(step)
        linear = update.linear
        known = linear.carry * known + linear.intake * fresh
        bound = linear.scale * known + linear.ahead * fresh + EPS * (step.weights.abs() + expected.abs())
        assert ((after - expected).abs() <= bound).all()
        if update.denominator is not None:
            assert ((memory - update.denominator.mean).abs() <= known).all()
