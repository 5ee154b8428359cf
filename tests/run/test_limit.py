"""Runs beside their infinite width: the rungs of the ladder, the columns of the log, and how fast K_0 gets there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.machine.base import DoesNotApply, LimitKernels
from ntkexp.model.base import AbstractLayered
from ntkexp.run.setting import prepare
from tests.run.small import ran, small

RUNGS = "ladder.machine=[frozen_start,frozen_limit,nngp]"


@pytest.mark.parametrize(
    "settings", [(), ("init.alpha=3", "data.classes=[1,2,3]"), ("model=cnn", "init=standard")], ids=str
)
def test_the_limit_of_a_run_is_the_infinite_kernel_of_its_layers(settings: tuple[str, ...]) -> None:
    experiment = small(RUNGS, *settings)
    setting = prepare(experiment)
    assert isinstance(setting.start.limit, LimitKernels)
    assert isinstance(experiment.model, AbstractLayered)
    layers = experiment.model.layers(experiment.init, (1, 8, 8), 1)
    nngp, ntk = infinite_kernel(layers, setting.points.inputs)
    scale = experiment.init.alpha**2
    for found, expected in ((setting.start.limit.start, nngp), (setting.start.limit.tangent, ntk)):
        # other blocks, other orders of summation
        torch.testing.assert_close(found, scale * expected[:, : setting.points.train], rtol=1e-12, atol=1e-12)


def test_a_run_goes_on_where_variances_are_too_large_for_its_limit() -> None:
    setting = prepare(small(RUNGS, "model.activation=tanh", "init.W_std=60"))
    assert isinstance(setting.start.limit, DoesNotApply)
    assert "too steep for Mehler's series" in str(setting.start.limit)


def test_the_log_measures_the_distance() -> None:
    run = ran(RUNGS, "data.classes=[1,2,3]")
    limit = run.setting.start.limit
    assert isinstance(limit, LimitKernels)
    train = run.setting.points.train
    whole = torch.einsum("pt,co->pcto", limit.tangent[:train], torch.eye(3, dtype=torch.float64))
    rows = {int(row["step"] or 0): row for row in run.memory.rows if row.get("drift") is not None}
    assert rows.keys() == run.memory.kernels.keys()
    for step, row in rows.items():
        kernel = run.memory.kernels[step][:train]
        assert row["limit_distance"] == pytest.approx(float((kernel - whole).norm() / whole.norm()), rel=1e-12)
        cosine = float((kernel * whole).sum() / (kernel.norm() * whole.norm()))
        assert row["limit_alignment"] == pytest.approx(cosine, rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("model=transformer",), "model=transformer has no known limit of infinite width"),
        (("model=cnn", "model.pooling=max"), "MaxPool has no known limit"),
        (("init=mean_field",), "mean-field parametrisation has no kernel in the limit"),
        (("model=cnn", "model.head=average"), "times the work"),
    ],
    ids=str,
)
def test_without_a_limit_there_is_a_reason(
    settings: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkexp.experiment.problem.MOST", 10**6)
    run = ran(RUNGS, "steps=2", *settings)
    for machine in ("frozen_limit", "nngp"):
        for row in run.rows(machine):
            assert row.relative_error is None
            assert reason in row.note
    assert all(row.get("limit_distance") is None for row in run.memory.rows)


def test_kernels_that_outgrow_the_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.experiment.problem.SHARE", 1e-9)
    limit = prepare(small(RUNGS)).start.limit
    assert isinstance(limit, DoesNotApply)
    assert "more than a quarter of memory_gb=4" in str(limit)


def test_nothing_is_computed_that_nobody_asks_for() -> None:
    assert isinstance(prepare(small("ladder.machine=[frozen_start]")).start.limit, DoesNotApply)


@pytest.mark.slow
def test_the_wider_the_network_the_nearer_its_first_kernel() -> None:
    """‖K_0 − K_∞‖ ∝ width^−1/2, over twelve seeds."""
    experiment, distances = small(RUNGS, "data.probe=0", "data.test=0"), []
    widths = (32, 512)
    for width in widths:
        found, model = [], experiment.model.model_copy(update={"width": width})
        for seed in range(12):
            setting = prepare(experiment.model_copy(update={"model": model, "seed": seed}))
            assert isinstance(setting.start.limit, LimitKernels)
            K, limit = setting.start.kernel[:, 0, :, 0], setting.start.limit.tangent
            found.append(float((K - limit).norm() / limit.norm()))
        distances.append(np.mean(np.log(found)))
    slope = (distances[1] - distances[0]) / np.log(widths[1] / widths[0])
    assert slope == pytest.approx(-0.5, abs=0.2)  # seeds differ by about 40 %, means of twelve by 12 %: 0.06 of a slope
