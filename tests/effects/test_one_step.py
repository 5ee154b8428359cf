"""Steps without an example: exact where there is one step, and the derivative where next to nothing is left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.sweep import MEANS, AbstractMean, MeanName, sweep_from
from ntkexp.effects.trajectory import TakenBatch
from tests.effects.test_sweep import end_gradient, slopes
from tests.effects.trainings import OPTIMIZERS, Trained, Weighted, distance, trained

QUICK, SLOW = ("adam",), pytest.mark.slow
EVERY = pytest.mark.parametrize("optimizer", [pytest.param(o, marks=() if o in QUICK else SLOW) for o in OPTIMIZERS])
LITTLE = 1e-7  # of an example


@dataclass(frozen=True)
class ALittle(AbstractMean):
    """A convention in which only a little of what is left out is left out."""

    mean: AbstractMean

    def shares(self, batch: TakenBatch, weights: Float[Tensor, "#group row"]) -> Float[Tensor, "group row"]:
        return self.mean.shares(batch, 1 - LITTLE * (1 - weights))

    def slopes(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return self.mean.slopes(along, batch)

    def removals(self, along: Float[Tensor, "vector row"], batch: TakenBatch) -> Float[Tensor, "vector row"]:
        return self.mean.removals(along, batch)


def effects(found: Trained, mean: AbstractMean, vectors: Tensor) -> Tensor:
    sweep = sweep_from(found.trajectory, vectors, mean, together=4, one_step=True)
    for _ in sweep.steps_back():
        continue
    return sweep.effects


@EVERY
def test_leaving_out_a_little_is_the_derivative(optimizer: str, tmp_path: Path) -> None:
    eps = ("optimizer.eps=1e-3",) if "ad" in optimizer[:2] or optimizer == "amsgrad" else ()
    found, mean = trained(tmp_path, *OPTIMIZERS[optimizer], *eps), MEANS["renormalised"]
    end = end_gradient(found)
    expected = slopes(found, "renormalised", end)
    # the second difference is LITTLE times curvatures up to 1/eps, and rounding 1e-16/LITTLE
    assert distance(-effects(found, ALittle(mean), end) / LITTLE, expected) < 1e-4


@pytest.mark.parametrize(
    ("optimizer", "mean"),
    [pytest.param(o, m, marks=() if (o, m) == ("adam", "fixed") else SLOW) for o in OPTIMIZERS for m in MEANS],
)
def test_of_one_step_it_is_the_truth(optimizer: str, mean: MeanName, tmp_path: Path) -> None:
    """Outputs that are linear in the weights feel what the step does, and no more."""
    found = trained(tmp_path, *OPTIMIZERS[optimizer], "steps=1")
    flat, descent = found.trajectory.flat, found.setting.descent
    chosen = torch.eye(flat.size, dtype=torch.float64)
    predicted = effects(found, MEANS[mean], chosen)
    for example in range(2):
        weights = torch.ones(found.trajectory.examples, dtype=torch.float64)
        weights[example] = 0.0
        given = vars(descent) | {"renormalises": mean == "renormalised"}
        (step,) = Weighted(**given, example_weights=weights).walk(found.setting.problem.weights)
        actual = flat.vector(step.end) - flat.vector(found.end)
        assert (predicted[:, example] - actual).abs().max() < 1e-12 * (actual.abs().max() + 1e-3)
