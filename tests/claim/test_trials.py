"""Trials of claims, against what is known of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from ntkexp.claim.conduct import TrialJob
from ntkexp.claim.papers import ConvolutionalAccuracy, KernelTimes, LayerProducts, LeftOutKernel, LimitRegression
from ntkexp.claim.papers.leaving_out import draw_groups, retraining
from ntkexp.data.images import Digits
from ntkexp.data.synthetic import Circle
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model.networks import CNN, CNTK, MLP
from ntkexp.records.atomic import sealed_text, write_atomically

INIT = NTK(W_std=1.4, b_std=0.3)
IMAGES = Digits(train=6, probe=0, test=4)
WORDS = ("data=moons", "data.train=8", "data.probe=4", "data.test=0", "steps=4", "path.count=2", "model.width=8")
OPTIMIZERS = {"gd": (), "adam": ("optimizer=adam", "optimizer.step_size=0.01")}


def test_rows_of_a_trial_are_those_of_its_data_and_seed(tmp_path: Path) -> None:
    """Another table has another name, and rows that were written under another name are not read."""
    (tmp_path / "t.csv").write_text("a,b,y\n1,2,3\n4,5,6\n", encoding="utf-8")
    words = ("data=table", f"data.path={tmp_path / 't.csv'}", "data.target=y")
    fields = {"_target_": "ntkexp.claim.papers.OtherRuns", "base": words, "groups": 4}
    jobs = [TrialJob(fields, seed, str(tmp_path)) for seed in (0, 1)]
    names = [job.name for job in jobs]
    write_atomically(jobs[0].file, sealed_text({"rows": [{"correlation": 1.0}]}, jobs[0].name))
    assert jobs[0].rows == [{"correlation": 1.0}]
    jobs[1].file.write_bytes(jobs[0].file.read_bytes())
    assert jobs[1].rows is None
    (tmp_path / "t.csv").write_text("a,b,y\n1,2,3\n4,5,7\n", encoding="utf-8")
    assert not set(names) & {job.name for job in jobs}
    assert jobs[0].rows is None


def test_products_of_layers() -> None:
    rows = pd.DataFrame(LayerProducts(model=CNN(width=3, padding="circular"), init=INIT, data=IMAGES, points=3).rows(0))
    assert rows["error"].max() < 1e-14  # sums of a few thousand products of size one
    assert rows["unpaired"][rows["kind"] == "convolution"].min() > 1
    assert rows["share"].sum() == pytest.approx(1)


def test_regression_returns_the_labels_without_a_ridge() -> None:
    """With the ridge r the residual is r (Θ + r)⁻¹ Y, which is not small."""
    trial = LimitRegression(names=("dense",), models=(MLP(depth=1),), init=INIT, data=IMAGES, ridges=(0.0, 0.1))
    rows = pd.DataFrame(trial.rows(0))
    assert rows["residual"][0] <= rows["bound"][0] < 1e-10
    assert rows["residual"][1] > 1e-3
    assert rows["condition"][1] < rows["condition"][0]


@pytest.mark.slow
def test_convolutions_classify_as_their_kernels_do_elsewhere() -> None:
    images = Digits(train=20, probe=0, test=90, classes=tuple(range(10)))
    rows = ConvolutionalAccuracy(data=images, depths=(3,), width=2, steps=3).rows(0)
    models = (CNTK(depth=3), CNTK(depth=3, pooling=True))
    kernels = LimitRegression(names=("CNTK", "CNTK-GAP"), models=models, init=INIT, data=images).rows(0)
    found = {row["family"]: row["accuracy"] for row in rows if row["regressor"] == "kernel"}
    assert found == {row["kernel"]: row["accuracy"] for row in kernels}
    assert found["CNTK"] != found["CNTK-GAP"]
    assert {row["regressor"] for row in rows} == {"process", "kernel", "network"}


def test_what_has_no_classes_is_not_classified() -> None:
    trial = LimitRegression(names=("dense",), models=(MLP(),), init=INIT, data=Circle(train=4, probe=0, test=1))
    with pytest.raises(Mistake, match="the data has no classes"):
        trial.rows(0)


def test_every_size_is_timed() -> None:
    rows = KernelTimes(model=MLP(depth=1), init=INIT, sizes=(4, 8), repeats=1).rows(0)
    assert [row["examples"] for row in rows] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_again_with_everyone_is_the_training(optimizer: str) -> None:
    found = retraining([*WORDS, *OPTIMIZERS[optimizer], "path.rule=[left]", "ladder.machine=[]"], seed=1)
    again = found.outputs_without(torch.ones(1, 8, dtype=torch.float64))[0]
    end = found.outcome.evidence.end[8:]
    torch.testing.assert_close(again, end, rtol=0, atol=1e-13)  # four steps, batched otherwise
    assert (found.outputs_without(draw_groups(4, 1, 8, seed=0))[0] - end).norm() > 1e-3


@pytest.mark.slow
def test_the_kernel_of_a_linear_model_does_not_depend_on_the_data() -> None:
    rows = LeftOutKernel(base=(*WORDS, "model=linear"), times=2, every=2).rows(0)
    assert {row["left_out"]: row["change"] for row in rows} == {"one": 0.0, "half": 0.0}


@pytest.mark.slow
def test_several_outputs_are_no_score() -> None:
    with pytest.raises(Mistake, match="choose data of one output"):
        retraining([*WORDS, "loss=cross_entropy"], seed=0)
