"""A recorded step, taken again by the formulas of its description, leads where the training went."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.effects.trajectory import TrainedStep
from tests.effects.trainings import OPTIMIZERS, distance, trained

ROUNDING = 1e-13  # a step takes tens of operations; Adam's first divides a gradient by itself


def gradient(step: TrainedStep) -> Tensor:
    """Σ κᵢ ∇ℓᵢ."""
    weights = step.weights.clone().requires_grad_()
    loss = sum((batch.shares * batch.losses(weights)).sum() for batch in step.batches)
    return torch.autograd.grad(torch.as_tensor(loss), weights)[0]


def taken(step: TrainedStep, memory: Tensor) -> tuple[Tensor, Tensor]:
    """θ and m after the step, for an update of all weights."""
    (update,) = step.updates
    g = gradient(step)
    c = 1.0 if step.clip_norm is None else min(1.0, step.clip_norm / (float(g.norm()) + 1e-6))
    p = c * g + update.coupled * step.weights
    memory = update.carry * memory + update.intake * p
    return (1 - update.lost) * step.weights - update.scale * memory - update.ahead * p, memory


@pytest.mark.parametrize(
    "optimizer", [pytest.param(o, marks=() if o in ("nesterov", "amsgrad") else pytest.mark.slow) for o in OPTIMIZERS]
)
def test_a_recorded_step_leads_where_it_led(optimizer: str, tmp_path: Path) -> None:
    found = trained(tmp_path, *OPTIMIZERS[optimizer]).trajectory
    memory = torch.zeros_like(found.end)
    for index in range(found.length):
        step = found.step(index)
        after, memory = taken(step, memory)
        expected = found.step(index + 1).weights if index + 1 < found.length else found.end
        assert distance(after - step.weights, expected - step.weights) < ROUNDING
        if (denominator := step.updates[0].denominator) is not None:
            assert distance(memory, denominator.mean) < ROUNDING
