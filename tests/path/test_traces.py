"""Traces over outputs are those of kernels, and nothing is made for pairs of outputs."""

from __future__ import annotations

import math

import pytest
import torch

from ntkexp.diagnostics import drift
from ntkexp.kernel.read import plan as reading
from ntkexp.mistake import Mistake
from tests.path.test_no_kernels import Largest
from tests.run.small import ran, small

SHORT = ("steps=2", "path.rule=[secant]", "optimizer.step_size=0.1", "path.error_samples=0")
CLASSES = ("data.classes=[1,3,8]", "loss=cross_entropy")
MANY = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=41", "loss=cross_entropy")
ROUNDING = 1e-13  # the same products, added up in another order


@pytest.mark.parametrize("at_once", [reading.AT_ONCE, 1.0], ids=["all outputs at once", "one by one"])
def test_what_is_kept_is_the_trace_of_the_kernel(at_once: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ran(*SHORT, *CLASSES)
    monkeypatch.setattr(reading, "AT_ONCE", at_once)
    some = ran(*SHORT, *CLASSES, "path.kernels=trace", "memory_gb=2")
    assert some.memory.kernels.keys() == whole.memory.kernels.keys()
    traces = {step: kernel.diagonal(dim1=1, dim2=3).sum(2) for step, kernel in whole.memory.kernels.items()}
    train = whole.setting.points.train
    for step, expected in traces.items():
        found = some.memory.kernels[step][:, 0, :, 0]
        assert float((found - expected).norm() / expected.norm()) < ROUNDING
        row, full = some.memory.rows[step], whole.memory.rows[step]
        assert row["trace"] == pytest.approx(full["trace"], rel=ROUNDING)
        assert row["drift"] == pytest.approx(drift(expected[:train], traces[0][:train]), abs=ROUNDING)
        assert row["label_alignment"] == pytest.approx(full["label_alignment"], rel=ROUNDING)
        assert row["lambda_max"] == pytest.approx(full["lambda_max"], rel=1e-6)  # by products with vectors, from below
        largest = torch.linalg.eigvalsh(expected[:train])[-1]
        assert row["eigenvalue_1"] == pytest.approx(float(largest), rel=ROUNDING)


def test_the_distance_to_infinite_width_is_one_of_traces() -> None:
    asked = (*SHORT, "data.classes=[1,3,8]", "ladder.machine=[frozen_limit]")
    some, whole = (ran(*asked, f"path.kernels={kept}") for kept in ("trace", "all"))
    train, limit = whole.setting.points.train, whole.outcome.evidence.known_limit.tangent
    trace = whole.memory.kernels[0].diagonal(dim1=1, dim2=3).sum(2)[:train]
    expected = drift(trace, 3 * limit[:train])
    assert some.memory.rows[0]["limit_distance"] == pytest.approx(expected, rel=1e-10)


def test_shares_of_the_residual_are_those_in_the_modes_of_the_trace() -> None:
    some = ran(*SHORT, *CLASSES, "path.kernels=trace")
    train = some.setting.points.train
    residual = some.setting.start.outputs[:train] - some.setting.problem.targets[:train]
    top = torch.linalg.eigh(some.memory.kernels[0][:train, 0, :, 0])[1][:, -5:]
    expected = float((top.mT @ residual).square().sum() / residual.square().sum())
    assert some.memory.rows[0]["residual_top_5"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_nothing_grows_with_the_square_of_the_outputs() -> None:
    sizes = ("data.train=60", "data.probe=40", "data.test=0", "path.outputs=[0,7]", "model.width=8")
    with Largest() as spy:
        some = ran(*SHORT, *MANY, *sizes, "path.kernels=trace")
    assert spy.numbers < 60 * 100 * 41**2 / 4  # where pairs of outputs have 10 million
    assert math.isfinite(float(some.memory.rows[-1]["drift"] or math.nan))
    assert some.outcome.evidence.kernel_end.numel() == 0


def test_traces_are_not_sketched() -> None:
    with pytest.raises(Mistake, match=r"traces are not sketched.*path\.kernels=all"):
        small("path.kernels=trace", "kernel.sketch=20")
