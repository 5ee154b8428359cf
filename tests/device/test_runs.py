"""A run on the device equals the run on the processor, repeats its bits, and continues after a stop."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.progress import Silent
from ntkexp.removal.between import Breakdown, Pair
from ntkexp.removal.rerun import breakdown_between
from ntkexp.run.loop import run
from ntkexp.run.setting import Setting, prepare
from tests.device.emulated import DEVICE
from tests.removal.problems import CHOSEN, GROUP, rerun
from tests.run.small import Ran, ran, small
from tests.run.test_resumed import ADAM, BACK, EFFECTS, SEQUENCE, SNAPSHOTS, Leaving, Left, assert_same_bits, numbers

pytestmark = pytest.mark.slow

CLOSE = 1e5 * torch.finfo(torch.float64).eps  # sums of some hundred numbers in another order, over 20 steps
FEW = ("adam", "clipped", "sgd")
"""Removals for each optimizer: tests/removal/test_breakdown.py."""
HERE = f"device={DEVICE}"

RUNS = {
    "mlp": ("model=mlp",),
    "resnet": ("model=resnet", "steps=5"),
    "transformer": ("model=transformer", "optimizer=adam"),
    "embeddings": (*SEQUENCE, "optimizer=sgd"),
    "nesterov": ("optimizer=nesterov",),
    "rmsprop": ("optimizer=rmsprop",),
    "effects": ("optimizer=adamw", "path.effects=true"),
    "effects of batches": ("optimizer=sgd", "optimizer.batch=7", "path.effects=true"),
    "snapshots": ("path.every=snapshots", "path.count=4"),
    "flow": ("optimizer=flow", "steps=2", "path.error_samples=3"),
    "classes": ("data.classes=all", "loss=cross_entropy"),
    "centred": ("init.centred=true",),
    "antisymmetric": ("init.antisymmetric=true",),
    "measure": ("path.measure=loss",),
}
LEFT = {
    "there": (SNAPSHOTS, "step", 5),
    "back": (BACK, "back", 9),
    "effects": ((*EFFECTS, *ADAM), "effects", 2),
}


def tensors_of(found: Ran) -> dict[str, Tensor]:
    """Return what a run finds, on the processor."""
    tensors = {rule: path.contributions for rule, path in found.outcome.matrices.paths.items()}
    tensors["end"] = found.outcome.matrices.end
    if found.outcome.effects is not None:
        tensors["effects"] = found.outcome.effects.values
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_the_processor(name: str) -> None:
    found = tensors_of(ran(*RUNS[name], HERE))
    for key, expected in tensors_of(ran(*RUNS[name])).items():
        assert (found[key] - expected).abs().max() <= CLOSE * expected.abs().max(), key


@pytest.mark.parametrize("name", ["resnet", "embeddings", "effects of batches"])
def test_a_run_repeats_its_bits(name: str) -> None:
    first, second = (tensors_of(ran(*RUNS[name], HERE)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", LEFT)
def test_a_run_that_was_left_goes_on_to_the_same_bits(name: str) -> None:
    words, event, at = LEFT[name]

    def setting() -> Setting:
        return prepare(small(*words, HERE))

    listener = Leaving()
    listener.at = (event, at)
    with pytest.raises(Left):
        run(setting(), listener)
    listener.at = None
    saved = torch.load(io.BytesIO(listener.saved), map_location="cpu", weights_only=True)
    assert_same_bits(numbers(run(setting(), listener, saved)), numbers(run(setting(), Leaving())))


def breakdown_on(device: str, case: str, folder: Path) -> Breakdown:
    """Return how the change is divided that leaving four examples out makes."""
    training, points = rerun(case, "tanh", f"device={device}")
    weights = Pair(training.unit_weights, training.without(GROUP))
    return breakdown_between(training, weights, points, CHOSEN.to(points.device), folder, Silent())


@pytest.mark.parametrize("case", FEW)
def test_a_removal_is_divided_as_on_the_processor(case: str, tmp_path: Path) -> None:
    expected, found = (breakdown_on(device, case, tmp_path) for device in ("cpu", DEVICE))
    size = float(expected.actual.abs().max())
    assert size > 1e-3
    for name in ("actual", "shares", "by_step"):
        missed = (getattr(found, name).cpu() - getattr(expected, name)).abs().max()
        assert missed <= CLOSE * size, name
