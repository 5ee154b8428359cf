"""Trials of claims, compared with known results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from torch import Tensor

from ntkexp.claim.conduct import TrialJob, drawn
from ntkexp.claim.papers.convolutional_kernels import (
    ConvolutionalAccuracy,
    KernelOperations,
    LayerProducts,
    LearningCurve,
    LimitRegression,
    OperationCount,
    eliminate,
)
from ntkexp.claim.papers.deep_networks import DeepKernels, kernel_moments, random_kernels
from ntkexp.claim.papers.double_descent import WidthSweep
from ntkexp.claim.papers.end_of_training import EndOfTraining, LinearModes, Operations
from ntkexp.claim.papers.followed_loops import GrokkingByComponent, SubliminalLearning, accuracy
from ntkexp.claim.papers.lazy_and_rich import (
    AfterKernel,
    LateGeneralising,
    LearnedTask,
    ScaledNetwork,
    SilentAlignment,
    length,
)
from ntkexp.claim.papers.learned_features import (
    SPACES,
    AlignedLayers,
    LearningNetwork,
    NearestExamples,
    jacobian_alignment,
)
from ntkexp.claim.papers.leaving_out import BARE, DatamodelScore, LeftOutKernel, draw_groups, retraining, score
from ntkexp.claim.papers.needed_examples import RemovalByPhase, margins, step_shares
from ntkexp.claim.papers.scalar_functions import Reparametrised
from ntkexp.claim.papers.wide_networks import (
    FirstKernels,
    FirstOutputs,
    Fluctuations,
    KernelMovement,
    OutputsInTraining,
    SummedOutputs,
    TrainingBesideKernels,
)
from ntkexp.claim.trial import AbstractTrial, SideBySide
from ntkexp.data import ModularAddition, Sphere, Teacher
from ntkexp.data.images import Digits
from ntkexp.data.synthetic import Circle
from ntkexp.init import NTK, Standard
from ntkexp.layer import Polynomial
from ntkexp.layer.affine import Dense
from ntkexp.layer.base import build
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model import DeepLinear
from ntkexp.model.networks import CNN, CNTK, MLP, Linear
from ntkexp.records.atomic import sealed_text, write_atomically
from ntkexp.records.sweep import Level
from ntkexp.removal.rerun import retrain, trained
from ntkexp.statistics import label_alignment
from ntkexp.stream import stream

INIT = NTK(W_std=1.4, b_std=0.3)
IMAGES = Digits(train=6, query=0, test=4)
WORDS = ("data=moons", "data.train=8", "data.query=4", "data.test=0", "steps=4", "path.count=2", "model.width=8")
OPTIMIZERS = {"gd": (), "adam": ("optimizer=adam", "optimizer.step_size=0.01")}


def test_rows_of_a_trial_are_those_of_its_data_and_seed(tmp_path: Path) -> None:
    """Another table changes the name, and rows with another name are not read."""
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
    rows = pd.DataFrame(
        [*LayerProducts(model=CNN(width=3, padding="circular"), init=INIT, data=IMAGES, points=3).rows(0)]
    )
    assert rows["error"].max() < 1e-14  # sums of a few thousand products of size one
    assert rows["unpaired"][rows["kind"] == "convolution"].min() > 1
    assert rows["share"].sum() == pytest.approx(1)


def test_regression_returns_the_labels_without_a_ridge() -> None:
    """With a ridge r the residual is r (Θ + r)⁻¹ Y, which is large."""
    trial = LimitRegression(names=("dense",), models=(MLP(depth=1),), init=INIT, data=IMAGES, ridges=(0.0, 0.1))
    rows = pd.DataFrame([*trial.rows(0)])
    assert rows["residual"][0] <= rows["bound"][0] < 1e-10
    assert rows["residual"][1] > 1e-3
    assert rows["condition"][1] < rows["condition"][0]


@pytest.mark.slow
def test_convolutions_classify_as_their_kernels_do_elsewhere() -> None:
    images = Digits(train=20, query=0, test=30, classes=tuple(range(10)))
    rows = [*ConvolutionalAccuracy(data=images, depths=(3,), width=2, steps=3).rows(0)]
    models = (CNTK(depth=3), CNTK(depth=3, pooling=True))
    kernels = LimitRegression(names=("CNTK", "CNTK-GAP"), models=models, init=INIT, data=images).rows(0)
    found = {row["family"]: row["accuracy"] for row in rows if row["regressor"] == "kernel"}
    assert found == {row["kernel"]: row["accuracy"] for row in kernels}
    assert found["CNTK"] != found["CNTK-GAP"]
    assert {row["regressor"] for row in rows} == {"process", "kernel", "network"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_learning_curve_is_that_of_least_squares(dtype: Literal["float64", "float32"]) -> None:
    """A linear network is the least-squares solution of least norm."""
    data = Digits(train=30, query=0, test=0, classes=(0, 1, 2))
    trial = LearningCurve(
        model=Linear(),
        beside=Linear(),
        init=FLAT,
        data=data,
        sizes=(8, 16),
        splits=3,
        at=(500,),
        known=(0.7,),
        dtype=dtype,
    )
    *rows, predicted = trial.rows(0)
    assert predicted["predicted"] == pytest.approx(0.7, abs=1e-12)
    x, labels = data.split(0).train.inputs.flatten(1), data.split(0).train.target
    y = torch.eye(3, dtype=torch.float64)[labels] - 1 / 3
    for row in rows:
        n = row["examples"]
        assert isinstance(n, int)
        right, generator = 0, stream("splits", 0, n)
        for order in [torch.randperm(30, generator=generator) for _ in range(3)]:
            outputs = x[order[n:]] @ torch.linalg.pinv(x[order[:n]]) @ y[order[:n]]
            right += int((outputs.argmax(1) == labels[order[n:]]).sum())
        assert row["accuracy"] == right / (3 * (30 - n))


def test_a_learning_curve_of_classical_kernels_is_that_of_entry_by_entry_kernels() -> None:
    """The linear kernel is that of a linear model with a bias. The Gaussian accuracy is the best of five widths."""
    data = Digits(train=20, query=0, test=0, classes=(0, 1, 2))
    trial = LearningCurve(
        model=Linear(), beside=Linear(), init=FLAT, data=data, sizes=(6, 12), splits=4, classical=True
    )
    accuracies = {(row["kernel"], row["examples"]): row["accuracy"] for row in trial.rows(0)}
    x, labels = data.split(0).train.inputs.flatten(1), data.split(0).train.target
    y = torch.eye(3, dtype=torch.float64)[labels] - 1 / 3
    distances = sorted(float((x[i] - x[j]).norm()) for i in range(20) for j in range(i))
    median = distances[(len(distances) - 1) // 2]

    def accuracy(k: Callable[[Tensor, Tensor], Tensor], n: int) -> float:
        right, generator = 0, stream("splits", 0, n)
        for _ in range(4):
            order = torch.randperm(20, generator=generator)
            gram = torch.stack([torch.stack([k(x[i], x[j]) for j in order[:n]]) for i in order])
            outputs = gram[n:] @ torch.linalg.solve(gram[:n], y[order[:n]])
            right += int((outputs.argmax(1) == labels[order[n:]]).sum())
        return right / (4 * (20 - n))

    def gaussian(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: torch.exp(-(a - b).square().sum() / (2 * (factor * median) ** 2))

    for n in (6, 12):
        assert accuracies["linear", n] == accuracy(lambda a, b: 1 + a @ b / len(a), n)
        assert accuracies["gaussian", n] == max(accuracy(gaussian(factor), n) for factor in (0.25, 0.5, 1, 2, 4))


def test_operations_of_elimination_are_counted() -> None:
    """With k rows below, a step divides, multiplies and subtracts k numbers of a column, and multiplies and subtracts
    k² numbers of the matrix. Back substitution multiplies and adds k numbers, subtracts and divides.
    """
    n, generator = 7, stream("examples", 0)
    x = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix, right = x @ x.T + torch.eye(n), torch.randn(n, 1, generator=generator, dtype=torch.float64)
    with OperationCount() as count:
        solved = eliminate(matrix, right)
    torch.testing.assert_close(solved, torch.linalg.solve(matrix, right))
    with pytest.raises(Mistake, match=r"operations of aten\._linalg_solve_ex cannot be counted"), OperationCount():
        torch.linalg.solve(matrix, right)
    copies = n * n + n
    assert count.operations == copies + sum(2 * k * k + 3 * k for k in range(n)) + sum(2 * k + 2 for k in range(n))


def test_every_size_has_its_operations() -> None:
    """Kernels have n² pairs, and fewer than 20 n other operations for each of about 100 operations of a pair."""
    trial = KernelOperations(model=MLP(depth=1), init=INIT, sizes=(64, 128, 256))
    few = trial.model_copy(update={"others": 64, "products": 3})
    all_rows, few_rows = (pd.DataFrame([*one.rows(0)]) for one in (trial, few))
    assert all_rows["examples"].tolist() == [64, 128, 256]
    assert all_rows["kernel_operations"].diff().iloc[-1] == pytest.approx(4 * (128**2 - 64**2) * 100, rel=0.5)
    for name, rows, power in (
        ("kernel_operations", all_rows, 2),
        ("kernel_operations", few_rows, 1),
        ("solve_operations", all_rows, 3),
        ("solve_operations", few_rows, 2),
    ):
        ratio = rows[name].iloc[-1] / rows[name].iloc[-2]
        assert ratio == pytest.approx(2**power, rel=0.1)  # lower powers are about n times as small
    images = KernelOperations(model=CNTK(depth=2), init=INIT, shape=(1, 4, 4), sizes=(2, 3))
    assert [row["examples"] for row in images.rows(0)] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_again_with_everyone_is_the_training(optimizer: str) -> None:
    found = retraining([*WORDS, *OPTIMIZERS[optimizer], "path.rule=[left]", "ladder.machine=[]"], seed=1)
    again = found.outputs_with(torch.ones(1, 8, dtype=torch.float64))[0]
    end = found.outcome.matrices.end[8:]
    torch.testing.assert_close(again, end, rtol=0, atol=1e-13)  # four steps, batched otherwise
    assert (found.outputs_with(draw_groups(4, 1, 8, seed=0))[0] - end).norm() > 1e-3


@pytest.mark.slow
def test_the_kernel_of_a_linear_model_does_not_depend_on_the_data() -> None:
    trial = LeftOutKernel(base=(*WORDS, "model=linear", "steps=99"), trains=(4, 8), until=0.3, times=2, every=2)
    for fresh_start in (False, True):
        rows = trial.model_copy(update={"fresh_start": fresh_start}).rows(0)
        assert {row["train"]: row["change"] for row in rows} == {4: 0.0, 8: 0.0}


@pytest.mark.slow
def test_trainings_without_an_example_are_as_long_and_start_alike() -> None:
    """Leaving out one example changes the kernel less than another start. A loss that is not reached has no number."""
    base = ("data=digits", "data.query=3", "data.test=0", "steps=40", "path.count=2", "model.width=4")
    trial = LeftOutKernel(base=base, trains=(4, 8), until=0.2, times=2, every=1)
    rows = pd.DataFrame([*trial.rows(0)])
    assert (rows["train_loss"] <= 0.2).all()
    assert rows["steps"].between(2, 39).all()
    fresh = pd.DataFrame([*trial.model_copy(update={"fresh_start": True}).rows(0)])
    assert (rows["change"] > 0).all()
    assert (fresh["change"] > rows["change"]).all()
    unlearned = pd.DataFrame([*trial.model_copy(update={"until": 1e-12}).rows(0)])
    assert unlearned["steps"].tolist() == [40, 40]
    assert unlearned["change"].isna().all()
    known = pd.DataFrame([*trial.model_copy(update={"until": 100}).rows(0)])
    assert known["steps"].tolist() == [0, 0]
    assert known["change"].isna().all()


def test_scores_name_their_queries() -> None:
    """Examples of a fixed data set have the same name for every seed, and different examples have different names."""
    words = ("data=digits", "data.train=8", "data.query=60", "data.test=0", "steps=2", "path.count=2", "model.width=4")
    trial = DatamodelScore(base=words, groups=4)
    rows = {seed: pd.DataFrame([*trial.rows(seed)]) for seed in (0, 1)}
    names = {}
    for seed, of_seed in rows.items():
        assert of_seed.groupby("method")["example"].nunique().tolist() == [60] * 5
        query = Digits(train=8, query=60, test=0).split(seed).query
        names[seed] = dict(zip(query.index.tolist(), of_seed["example"], strict=False))
    common = {*names[0]} & {*names[1]}
    assert len(common) > 3
    assert all(names[0][index] == names[1][index] for index in common)
    assert len({*rows[0]["example"]} & {*rows[1]["example"]}) == len(common)


def test_the_score_of_a_method_is_a_mean_over_queries() -> None:
    trial = DatamodelScore(base=(*WORDS, "model.activation=tanh"), groups=6)
    rows = pd.DataFrame([*trial.rows(3)])
    retrained = retraining([*trial.base, "path.rule=[secant,left]", *BARE], 3)
    groups = draw_groups(4, 6, 8, seed=3)
    contributions = retrained.outcome.matrices.query_contributions("secant")[:, 0]
    actual = retrained.outputs_with(groups)[:, :, 0]
    expected = score(groups @ contributions.t(), actual)
    means = rows.groupby("method")["score"].mean()
    assert means["contributions"] == pytest.approx(expected, abs=1e-12)
    assert set(means.index) == {"contributions", "tracin", "last_gradient", "input", "shuffled"}


@pytest.mark.slow
def test_several_outputs_are_no_score() -> None:
    with pytest.raises(Mistake, match="choose data of one output"):
        retraining([*WORDS, "loss=cross_entropy"], seed=0)


def test_a_trial_names_the_pool_of_its_seeds() -> None:
    """The data, the words or the trials side by side define the pool. Data with a seed are not drawn."""
    by_data = LayerProducts(model=MLP(width=4), init=INIT, data=Digits(train=4, query=0, test=0))
    by_words = LeftOutKernel(base=("data=wine",), until=0.1)
    both = SideBySide(names=("a", "b"), trials=(by_data, by_words))
    of_trials = [drawn((), trial) for trial in (by_data, by_words, both)]
    digits, wine = "357 examples of digits", "178 examples of wine"
    assert of_trials == [f"each drawing data, for these {pool}" for pool in (digits, wine, f"{digits} or {wine}")]
    assert drawn((), LeftOutKernel(base=("data=wine", "data.seed=0"), until=0.1)) == ""
    assert drawn((), LeftOutKernel(base=("data=circle",), until=0.1)) == "each drawing data"
    assert drawn((), KernelOperations(model=MLP(width=4), init=INIT)) == "each drawing data"
    assert drawn((), GrokkingByComponent(modulus=3)) == "each drawing weights and data, for these 6 sums modulo 3"


def test_a_student_learns_the_sum_of_the_parts() -> None:
    trial = SubliminalLearning(
        data=Digits(classes="all", train=64, query=20, test=0), width=8, extra=4, noise=16, taught=4, steps=4, queries=6
    )
    rows = pd.DataFrame([*trial.rows(0)]).set_index("start")
    assert [*rows.index] == ["teacher", "another"]
    assert (rows["rise"] != 0).all()
    assert (rows["miss"] < 1e-12).all()


def test_outputs_that_are_not_finite_have_no_accuracy() -> None:
    """The argmax of NaN is the first class."""
    data = Digits(classes="all", train=6, query=20, test=9).split(0)
    network = torch.nn.Linear(data.query.inputs[0].numel(), 12, dtype=torch.float64)
    assert 0 <= accuracy(network, data.query, 10) <= 1
    torch.nn.init.constant_(network.weight, math.nan)
    assert math.isnan(accuracy(network, data.query, 10))

    trial = LearningCurve(model=Linear(), beside=Linear(), init=INIT, data=IMAGES, sizes=(2, 4), splits=2)
    kernel = torch.eye(6, dtype=torch.float64)
    targets = torch.ones(6, 2, dtype=torch.float64)
    labels = torch.zeros(6, dtype=torch.long)
    assert trial.accuracy(kernel, labels, targets, 4, 0) == 1
    assert math.isnan(trial.accuracy(kernel, labels, targets * math.nan, 4, 0))


def test_components_have_their_parts_by_phases() -> None:
    """A network that memorizes has phases, and one that learns nothing has none."""
    rows = pd.DataFrame([*GrokkingByComponent(modulus=5, width=32, steps=40, queries=2, decay=0.0).rows(0)])
    assert [*rows["component"]] == ["table", "hidden", "readout"] * 2
    assert (rows["miss"] < 1e-12).all()
    assert (rows["came"] != 0).all()
    never = pd.DataFrame([*GrokkingByComponent(modulus=5, width=1, steps=1, queries=2).rows(0)])
    assert never[["came", "accuracy", "miss"]].isna().all(axis=None)


FLAT = NTK(W_std=1.0, b_std=0.0)


def test_the_phases_of_a_removal_add_up() -> None:
    """A training that fits has three phases, and one that fits nothing has none."""
    sums = ModularAddition(modulus=5, train=20, query=0, encoding="one_hot")
    network = MLP(width=32, depth=1, activation=Polynomial(powers=(0, 0, 1)))
    trial = RemovalByPhase(model=network, init=FLAT, data=sums, alpha=0.3, step_size=1.0, steps=60, removals=1)
    rows = pd.DataFrame([*trial.rows(0)]).set_index("phase")
    assert rows[["share", "time", "beyond"]].sum().tolist() == pytest.approx([1, 1, 0], abs=1e-12)
    assert (rows["miss"] < 1e-12).all()
    assert 0 < rows["time"]["memorising"] < 1
    never = pd.DataFrame([*trial.model_copy(update={"model": Linear()}).rows(0)])
    assert never.drop(columns="phase").isna().all(axis=None)


def test_the_share_of_the_last_step_of_a_linear_model_is_known() -> None:
    """It is the change of one step without the example, from the mean weights of both trainings."""
    sums = ModularAddition(modulus=3, train=6, query=0, encoding="one_hot")
    trial = RemovalByPhase(model=Linear(), init=FLAT, data=sums, alpha=1.0, step_size=0.3, steps=3)
    data = sums.split(0)
    rerun = trial.rerun(data, 0)
    both = torch.stack([rerun.unit_weights, rerun.without([0])])
    *_, last = retrain(rerun, both)
    one = replace(rerun, start=rerun.flat.weights(last.recorded["weights"].mean(0)), length=1)

    def change(weights: torch.Tensor) -> torch.Tensor:
        usual, without = (margins(rerun, end, data.test) for end in weights)
        return without - usual

    total = change(last.weights)
    expected = change(trained(one, both)) @ total / total.square().sum()
    torch.testing.assert_close(step_shares(rerun, 0, data.test)[-1], expected, rtol=1e-9, atol=1e-12)


def test_descent_of_a_linear_network_ends_where_it_is_known_to() -> None:
    """Its weights have the least norm with these outputs, and its loss has no saddle."""
    data = Digits(train=6, query=0, test=0)
    trial = EndOfTraining(model=Linear(), init=FLAT, data=data, widths=(1,), until=1e-2, curvature=True)
    row = pd.DataFrame([*trial.rows(0)]).loc[0]
    assert row["miss"] < 1e-12
    assert row["norm"] == pytest.approx(1, abs=1e-9)
    assert 0 < row["gradient"] < 1
    assert abs(row["curvature"]) < 1e-12  # there are more weights than examples
    never = pd.DataFrame([*trial.model_copy(update={"steps": 1}).rows(0)]).loc[0]
    assert never.drop("width").isna().all()


def test_modes_follow_their_closed_form_from_a_small_start() -> None:
    """The gap decreases with the step size."""
    data = Digits(train=30, query=0, test=0, classes=(0, 1, 2))
    coarse, fine = (
        pd.DataFrame([*LinearModes(data=data, width=16, small=1e-3, step_size=size).rows(0)]).set_index("start")["miss"]
        for size in (0.04, 0.01)
    )
    assert fine["small"] < coarse["small"] < 0.05 < fine["large"]


@pytest.mark.slow
def test_initial_outputs_of_one_layer_have_the_known_kurtosis() -> None:
    """3 Var(v)/(E v)²/width with v the mean of φ² over hidden units, of ReLU 15/width."""
    data = Sphere(train=4, query=0, test=4)
    trial = OutputsInTraining(
        model=MLP(depth=1), init=FLAT, data=data, widths=(4, 16), networks=1500, points=4, times=(0, 2)
    )
    rows = pd.DataFrame([*trial.rows(0)]).set_index(["steps", "width"])
    for width in (4, 16):
        assert rows["excess_kurtosis"][0, width] == pytest.approx(15 / width, rel=0.6)
        assert rows["remaining"][0, width] == pytest.approx(1, abs=1e-12)
        assert 0 < abs(rows["remaining"][2, width] - 1) < 1


@pytest.mark.slow
def test_outputs_of_linear_networks_stay_gaussian_and_shrink() -> None:
    """f_t(x) = w·x − Θ(x, X) A w·X + …, where A = Σ η (1 − ηΘ)^s over the steps s < t."""
    data, steps, networks = Sphere(train=4, query=0, test=4), 20, 2000
    trial = OutputsInTraining(
        model=Linear(), init=FLAT, data=data, widths=(1, 2), networks=networks, points=4, times=(0, steps), fraction=0.3
    )
    rows = pd.DataFrame([*trial.rows(0)]).set_index(["steps", "width"])
    split = data.split(0)
    x, new = split.train.inputs.flatten(1), split.test.inputs.flatten(1)
    kernel = x @ x.T / x.shape[1]
    size = 0.3 * 2 / torch.linalg.eigvalsh(kernel)[-1]
    added = sum(size * torch.linalg.matrix_power(torch.eye(4) - size * kernel, s) for s in range(steps))
    left = new - new @ x.T / x.shape[1] @ added @ x
    expected = float((left.square().sum() / new.square().sum()).sqrt())
    assert expected < 0.9
    for width in (1, 2):
        assert rows["remaining"][steps, width] == pytest.approx(expected, rel=5 / (2 * networks) ** 0.5)
        assert abs(rows["excess_kurtosis"][steps, width]) < 5 * (24 / networks) ** 0.5


def test_operations_of_a_linear_network_are_counted() -> None:
    data = Digits(train=40, query=0, test=30)
    trial = Operations(model=Linear(), init=FLAT, data=data, allowed=0.4)
    row = pd.DataFrame([*trial.rows(0)]).loc[0]
    pairs, inputs, layers = 40 * 41 / 2 + 30 * 40, 64, 2
    kernel = pairs * (inputs + 40 * layers) + 40**3 / 3 + 30 * 40 * 2
    assert row["operations"] * 128 * (3 * 40 * row["steps"] + 30) == pytest.approx(kernel)
    never = pd.DataFrame([*trial.model_copy(update={"allowed": 0.0, "steps": 1, "step_size": 1e-9}).rows(0)]).loc[0]
    assert (row["censored"], never["censored"], never["steps"]) == (0, 1, 1)
    assert never["operations"] * 128 * (3 * 40 + 30) == pytest.approx(kernel)  # as if it stopped after its only step
    assert never["reached"] < 0


def test_some_parametrizations_keep_the_kernel() -> None:
    """For W = g v/‖v‖ with g = ‖v‖, the gradients by g and v are two orthogonal parts of the gradient by W.

    A normalized unit has two more weights, which add their kernel.
    """
    trial = Reparametrised(data=Digits(train=6, query=0, test=0), width=5)
    rows = pd.DataFrame([*trial.rows(0)]).set_index("spelling")
    assert (rows["outputs"] < 1e-13).all()
    assert (rows["change"][["weight_norm", "rotation"]] < 1e-13).all()
    assert rows["change"]["batch_norm"] > 1e-3


# Wide networks.


WIDE_INIT = NTK(W_std=2**0.5, b_std=0.1)
DATA = Sphere(train=4, query=0, test=4)


def number(row: Mapping[str, Level], name: str) -> float:
    """Return a number of a row."""
    found = row[name]
    assert isinstance(found, float)
    return found


def test_first_outputs_have_the_covariance_of_the_limit_at_any_width() -> None:
    trial = FirstOutputs(model=MLP(width=4, depth=1), init=WIDE_INIT, data=DATA, widths=(2, 16), networks=500, points=4)
    narrow, wide = trial.rows(0)
    for row in (narrow, wide):
        # four standard errors of a variance, √((2 + excess)/500); the excess of the narrow network is 7.5
        assert row["variance_ratio"] == pytest.approx(1, abs=4 * ((2 + 7.5) / 500) ** 0.5)
        assert row["covariance_ratio"] == pytest.approx(1, abs=4 * ((2 + 7.5) / 500) ** 0.5)  # a mean over pairs
    assert number(narrow, "excess_kurtosis") > 2 * number(wide, "excess_kurtosis")


def test_one_output_is_its_own_sum() -> None:
    trial = SummedOutputs(model=MLP(width=4, depth=1), init=WIDE_INIT, data=DATA, widths=(4, 8), outputs=1, points=3)
    assert [row["error"] for row in trial.rows(0)] == [0.0, 0.0]


def test_the_wider_the_less_first_steps_from_zero_differ() -> None:
    """Antisymmetric networks start at zero, so one step shows their kernel."""
    init = WIDE_INIT.model_copy(update={"antisymmetric": True})
    trial = Fluctuations(model=MLP(width=4, depth=1), init=init, data=DATA, widths=(4, 64), networks=4, steps=1)
    narrow, wide = trial.rows(0)
    assert number(narrow, "fluctuation") > number(wide, "fluctuation") > 0


def test_first_kernels_of_linear_units_vary_as_they_should() -> None:
    """With f = v·Wx/√(h d), K(x, x) = a (|v|²/h + |Wx|²/(h |x|²)): both terms have mean a and variance 2a²/h."""
    plain = NTK(W_std=1.0, b_std=0.0)
    model = MLP.model_validate({"width": 1, "depth": 1, "activation": "linear"})
    trial = FirstKernels(model=model, init=plain, data=DATA, widths=(16, 64), networks=80, points=1)
    for row in trial.rows(0):
        width = int(str(row["width"]))
        # four standard errors of a sample variance, √((2 + excess)/80); the excess of a sum of h squares is 12/h
        assert number(row, "variance") * width == pytest.approx(1, abs=4 * ((2 + 12 / width) / 80) ** 0.5)
        assert number(row, "distance") ** 2 >= number(row, "variance") * (1 - 1 / 80) * (1 - 1e-12)


def test_kernels_of_random_layers_are_those_of_autograd() -> None:
    x = DATA.split(0).train.inputs
    layers = MLP.model_validate({"width": 5, "depth": 3, "activation": "gelu"}).layers(WIDE_INIT, (x.shape[1],), 1)
    kernels = random_kernels(layers, x, 2, stream("weights", 0))
    again = stream("weights", 0)
    weights: list[dict[str, torch.Tensor]] = [{}, {}]
    for at, layer in enumerate(layers):
        if isinstance(layer, Dense):
            inputs = 5 if weights[0] else x.shape[1]
            drawn = torch.randn(2, inputs, layer.features, generator=again, dtype=x.dtype)
            biases = torch.randn(2, 1, layer.features, generator=again, dtype=x.dtype)
            for network in (0, 1):
                weights[network] |= {f"{at}.weight": drawn[network].T, f"{at}.bias": biases[network, 0]}
    module = build(layers, (x.shape[1],), stream("weights", 1))
    for network in (0, 1):
        expected = tangent_kernel(module, x, weights=weights[network])[:, 0, :, 0]
        torch.testing.assert_close(kernels[network], expected, rtol=1e-12, atol=1e-12)  # sums of some dozen products


def test_moments_do_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the kernels of all networks, drawn in batches of two."""
    x = DATA.split(0).train.inputs
    layers = MLP(width=3, depth=1).layers(WIDE_INIT, (x.shape[1],), 1)
    monkeypatch.setattr("ntkexp.claim.papers.deep_networks.WEIGHTS_AT_ONCE", 2 * (3 * x.shape[1] + 3))
    moments = kernel_moments(layers, x, 5, stream("weights", 0))
    generator = stream("weights", 0)
    kernels = torch.cat([random_kernels(layers, x.float(), count, generator) for count in (2, 2, 1)]).double()
    torch.testing.assert_close(moments.mean, kernels.mean(0))
    torch.testing.assert_close(moments.variance, kernels.var(0))


@pytest.mark.slow
def test_kernels_of_two_layers_of_squares_have_the_known_bias() -> None:
    """Without biases, E K(x, x) = (111 + 1344/n) W⁶ q⁴ for n units z², by Gaussian moments, where q = W² |x|²/d.

    The readout adds 3 E v² for v = W² mean z⁴, with E v² = (9 + 96/n) W⁴ q⁴ (in units of W² here and below), the
    second layer 4 E v², and the first layer 16 (3 + 12/n + 30/n), the last term because u = Σ w g depends on w by g.
    """
    networks = 20000
    model = MLP(activation=Polynomial(powers=(0.0, 0.0, 1.0)))
    sizes = ((2, 16, networks), (2, 32, networks))
    trial = DeepKernels(model=model, init=NTK(W_std=1.3, b_std=0.0), data=DATA, sizes=sizes, points=1)
    for row in trial.rows(0):
        # four standard errors of the mean kernel
        error = 4 * number(row, "spread") / networks**0.5
        assert number(row, "bias") == pytest.approx(1344 / 111 / int(str(row["width"])), abs=error)


def test_the_mean_kernel_of_one_layer_has_no_bias() -> None:
    """Its units are independent, so the bias is below four standard errors of the mean kernel at any width."""
    networks = 500
    trial = DeepKernels(model=MLP(), init=WIDE_INIT, data=DATA, sizes=((1, 2, networks), (1, 8, networks)), points=4)
    for row in trial.rows(0):
        assert math.isnan(number(row, "bias")) == bool(row["reason"])
        assert not number(row, "bias") > 4 * number(row, "spread") / networks**0.5


def test_a_linear_model_follows_its_constant_kernel() -> None:
    flat = MLP(width=1, depth=0)
    beside = TrainingBesideKernels(model=flat, init=WIDE_INIT, data=DATA, widths=(1, 2), networks=2, steps=7)
    assert {row["kernel"] for row in beside.rows(0)} == {"start", "limit"}
    assert max(number(row, "gap") for row in beside.rows(0)) < 1e-13  # sums of a few numbers, rounded
    moving = KernelMovement(model=flat, init=WIDE_INIT, data=DATA, widths=(1,), alphas=(1.0, 2.0), networks=2, steps=7)
    assert [row["movement"] for row in moving.rows(0)] == [0.0, 0.0]


def test_smooth_kernels_of_scaled_outputs_move_as_one_over_the_scale() -> None:
    init = WIDE_INIT.model_copy(update={"centred": True})
    smooth = MLP.model_validate({"width": 4, "depth": 1, "activation": "tanh"})
    trial = KernelMovement(model=smooth, init=init, data=DATA, widths=(4,), alphas=(1e3, 2e3), networks=2, steps=5)
    near, far = (number(row, "movement") for row in trial.rows(0))
    assert near / far == pytest.approx(2, rel=0.05)  # up to terms of the order 1/α, with their factors


# Networks of several widths, trained to the end, compared with least squares.


SWEEP_INIT = NTK(W_std=1.5, b_std=0.1)


def test_a_linear_model_ends_in_least_squares() -> None:
    source = Teacher(train=12, query=0, test=6, dimension=3)
    row = next(iter(WidthSweep(model=MLP(width=1, depth=0), init=SWEEP_INIT, data=source, widths=(1, 2, 3)).rows(0)))
    data = source.split(0)
    x = torch.cat([data.train.inputs, torch.ones(12, 1, dtype=torch.float64)], 1)
    missed = x @ torch.linalg.lstsq(x, data.train.target).solution - data.train.target
    expected = missed.square().mean() / data.test.target.var(correction=0)
    assert row["parameters"] == 4
    # the last damping is 1e-12, and the eigenvalues are about one
    assert number(row, "train_error") == pytest.approx(float(expected), rel=1e-9)


def test_more_parameters_than_targets_fit_exactly() -> None:
    source = Teacher(train=6, query=0, test=4, dimension=2)
    trial = WidthSweep(model=MLP(width=1, depth=1, activation="tanh"), init=SWEEP_INIT, data=source, widths=(1, 4, 8))
    rows = [*trial.rows(0)]
    assert number(rows[2], "train_error") < 1e-12 < number(rows[0], "train_error")
    assert number(rows[0], "condition") == 1e12 > number(rows[2], "condition")


# Kernels during training.


DIGITS = Digits(train=6, query=0, test=20)


def test_a_linear_model_has_one_kernel_and_follows_it() -> None:
    trial = AfterKernel(model=MLP(width=8, depth=0), init=WIDE_INIT, data=DIGITS, widths=(8,), trains=(6,), until=1e-6)
    network, before, after = trial.rows(0)
    assert after["loss"] == before["loss"]
    # slow modes magnify the remaining loss, √(2·10⁻⁶)
    assert number(network, "loss") == pytest.approx(number(after, "loss"), rel=0.1)
    assert [row["beyond"] for row in (network, before, after)] == [0.0, 0.0, 0.0]


def test_a_rich_kernel_is_another_one_after_training() -> None:
    trials = [
        AfterKernel(model=MLP(width=16, depth=1), init=WIDE_INIT, data=DIGITS, widths=(16,), trains=(6,), alpha=alpha)
        for alpha in (0.1, 1000.0)
    ]
    rich, lazy = ([*trial.rows(0)] for trial in trials)
    apart = [abs(number(rows[1], "loss") - number(rows[2], "loss")) for rows in (rich, lazy)]
    assert apart[1] < 1e-4
    assert apart[0] > 1e-2


def test_a_network_that_has_not_learned_has_no_kernel_after_training() -> None:
    trial = AfterKernel(model=MLP(width=8), init=WIDE_INIT, data=DIGITS, widths=(8,), trains=(6,), steps=1)
    assert all(math.isnan(number(row, name)) for row in trial.rows(0) for name in ("error", "beyond", "loss"))


def silent(**changes: float) -> list[Mapping[str, Level]]:
    """Return the rows of a small deep linear network."""
    trial = SilentAlignment(
        names=("linear",),
        models=(DeepLinear(width=32, depth=1),),
        init=NTK(W_std=1, b_std=0),
        data=Digits(train=6, query=0, test=5),
    )
    return list(trial.model_copy(update=changes).rows(0))


@pytest.mark.slow
def test_the_kernel_of_a_linear_network_from_a_small_start_gains_one_direction() -> None:
    """If W and a grow from zero as aβᵀ, K = ‖β‖ (X Xᵀ + X β̂ β̂ᵀXᵀ), with the alignment 2/√(M − 1 + 4)."""
    found = silent(small=1e-5)[2]
    assert (found["inputs"], found["start"]) == ("whitened", "small")
    # weights grow 300-fold, so the start is 10⁻⁵ of the kernel; the loss ends at 1 %
    assert number(found, "alignment_end") == pytest.approx(2 / math.sqrt(6 - 1 + 4), abs=1e-3)
    assert number(found, "turned") == pytest.approx(1, abs=0.02)


def test_a_linear_network_is_regression_with_its_last_kernel() -> None:
    assert all(number(row, "gap") < 1e-9 for row in silent())  # 1e-12 of ridge, times the condition number


def test_training_ends_below_a_share_of_the_loss_of_zero_outputs() -> None:
    assert all(math.isfinite(number(row, "turned")) for row in silent(until=0.3) if row["start"] == "small")


def test_an_unfinished_training_has_no_turn() -> None:
    assert all(math.isnan(number(row, "turned")) for row in silent(steps=2))


def test_a_step_is_no_longer_than_its_stride() -> None:
    module = MLP(width=8, depth=1).module(WIDE_INIT, (3,), 1, stream("weights", 0)).eval()
    x = torch.randn(5, 3, generator=stream("examples", 0), dtype=torch.float64)
    path = ScaledNetwork(module, 0.01).learn(LearnedTask(x, x[:, 0]), 5, 0.4, 0.0, stride=0.02)
    moved = [
        float(length([step.after[name] - step.before[name] for name in step.before]) / length(step.before.values()))
        for step in path
    ]
    assert max(moved) == pytest.approx(0.02, rel=1e-9)  # a quotient of rounded sums


def test_a_linear_model_does_not_depend_on_the_scale() -> None:
    """Its kernel is constant, and the scale cancels in every step."""
    x = torch.randn(5, 3, generator=stream("examples", 0), dtype=torch.float64)
    module = MLP(width=4, depth=0).module(WIDE_INIT, (3,), 1, stream("weights", 0)).eval()

    def outputs(alpha: float) -> torch.Tensor:
        network = ScaledNetwork(module, alpha)
        *_, last = network.learn(LearnedTask(x, x[:, 0]), 25, 0.2, until=0.0)
        return network.outputs(last.after, x)

    torch.testing.assert_close(outputs(0.01), outputs(100.0), rtol=1e-10, atol=1e-10)  # differences of large outputs


# Features that a network learns.


def gradients(network: LearningNetwork, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> list[Any]:
    """Return the gradient of each output at each point, one by one, by the name of the parameter."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    outputs = network.scaled.function(leaves, x)
    return [
        [dict(zip(leaves, torch.autograd.grad(one, [*leaves.values()], retain_graph=True), strict=True)) for one in row]
        for row in outputs
    ]


def test_nearest_examples_of_a_linear_model_are_those_of_its_inputs() -> None:
    """Its kernel is C⟨x, x′⟩/d at every step."""
    data = Digits(train=20, query=0, test=40, classes=(0, 1, 2))
    rows = pd.DataFrame([*NearestExamples(model=Linear(), init=FLAT, data=data, until=0.5).rows(0)])
    table = rows.pivot_table(index="example", columns="space", values="same_class")
    assert [*rows["space"].unique()] == [*SPACES]
    for space in ("path", "end", "start"):
        assert table[space].tolist() == table["angle"].tolist()
    assert 0 < table["distance"].mean() < 1


def test_nearest_examples_are_those_of_gradients_one_by_one() -> None:
    data = Digits(train=8, query=0, test=6, classes=(3, 5, 8))
    trial = NearestExamples(model=MLP(width=6, depth=1), init=WIDE_INIT, data=data, every=1, until=0.5)
    split = data.split(1)
    x, new = split.train.inputs, split.test.inputs
    network = trial.network(split, 1)
    y = torch.eye(3, dtype=torch.float64)[split.train.target] - 1 / 3
    times, points = trial.path(network, x, y)
    flat = [
        torch.stack([torch.cat([torch.cat([part.flatten() for part in out.values()]) for out in row]) for row in rows])
        for rows in (gradients(network, step.before, torch.cat([new, x])) for step in points)
    ]
    kernels = [jacobian @ jacobian.t() for jacobian in flat]
    path = sum((times[k + 1] - times[k]) * (kernels[k] + kernels[k + 1]) / 2 for k in range(len(kernels) - 1))
    assert isinstance(path, torch.Tensor)
    assert len(kernels) > 5
    inputs = torch.cat([new, x]).flatten(1)
    similar = {"path": path, "end": kernels[-1], "start": kernels[0], "angle": inputs @ inputs.t()}
    similar = {name: kernel / torch.outer(kernel.diag(), kernel.diag()).sqrt() for name, kernel in similar.items()}
    similar["distance"] = -(inputs[:, None] - inputs).norm(dim=2)
    predicted = network.outputs(points[-1].before, new).argmax(1)
    rows = pd.DataFrame([*trial.rows(1)])
    for space, similarity in similar.items():
        nearest = [max(range(8), key=lambda i: float(similarity[query, 6 + i])) for query in range(6)]
        classes = split.train.target[nearest]
        of_space = rows[rows["space"] == space]
        assert of_space["same_class"].tolist() == (classes == split.test.target).double().tolist()
        assert of_space["same_prediction"].tolist() == (classes == predicted).double().tolist()


def test_permuted_labels_leave_the_geometry_of_the_inputs() -> None:
    """The true classes are compared, so neither inputs nor the kernel at the start see the labels."""
    data = Digits(train=12, query=0, test=30, classes=(3, 5, 8))
    own = NearestExamples(model=MLP(width=8, depth=1), init=WIDE_INIT, data=data)
    permuted = own.model_copy(update={"permuted": True})
    split = data.split(0)
    learned = permuted.learned_labels(split.train, 0)
    assert learned.tolist() != split.train.target.tolist()
    assert learned.bincount().tolist() == split.train.target.bincount().tolist()
    same = [
        pd.DataFrame([*trial.rows(0)]).pivot_table(index="example", columns="space", values="same_class")
        for trial in (own, permuted)
    ]
    for space in ("start", "angle", "distance"):
        assert same[0][space].tolist() == same[1][space].tolist()
    assert same[0]["end"].mean() > same[1]["end"].mean()


def test_a_network_that_has_not_learned_has_no_nearest_examples_and_no_alignment() -> None:
    fields: dict[str, Any] = {"model": MLP(width=4, depth=2), "init": WIDE_INIT, "data": DIGITS, "steps": 2}
    nearest = pd.DataFrame([*NearestExamples(**fields).rows(0)])
    assert len(nearest) == 20 * len(SPACES)
    assert nearest[["same_class", "same_prediction"]].isna().all(axis=None)
    assert all(math.isnan(number(row, "alignment")) for row in AlignedLayers(**fields).rows(0))


def test_the_alignment_of_a_layer_is_that_of_its_gradients_one_by_one() -> None:
    """A = yᵀ(H ⊗ 1)K(H ⊗ 1)y/(‖(H ⊗ 1)K(H ⊗ 1)‖ ‖y‖²) with H = 1 − 11ᵀ/M and centred y."""
    data = Digits(train=7, query=0, test=0, classes=(3, 5, 8))
    trial = AlignedLayers(model=MLP(width=5, depth=2), init=WIDE_INIT, data=data)
    rows = [*trial.rows(0)]
    assert [(row["layer"], row["place"]) for row in rows[:3]] == [(1, "outer"), (2, "hidden"), (3, "outer")]
    split = data.split(0)
    network = trial.network(split, 0)
    one_hot = torch.eye(3, dtype=torch.float64)[split.train.target]
    *_, last = trial.learn(network, split.train.inputs, one_hot - 1 / 3)
    centring = torch.kron(torch.eye(7) - torch.ones(7, 7) / 7, torch.eye(3)).double()
    y = centring @ one_hot.flatten()
    for moment, weights in (("start", network.start), ("end", last.before)):
        found = gradients(network, weights, split.train.inputs)
        for layer in (1, 2, 3):
            names = [f"network.{2 * layer - 1}.{kind}" for kind in ("weight", "bias")]
            jacobian = torch.stack(
                [torch.cat([out[name].flatten() for name in names]) for point in found for out in point]
            )
            kernel = centring @ jacobian @ jacobian.t() @ centring
            expected = float(y @ kernel @ y / (kernel.norm() * y @ y))
            row = next(row for row in rows if (row["moment"], row["layer"]) == (moment, layer))
            assert number(row, "alignment") == pytest.approx(expected, rel=1e-10)


def test_the_alignment_of_one_output_is_the_centred_alignment() -> None:
    generator = stream("examples", 0)
    jacobian = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    kernel = torch.einsum("icp,jdp->icjd", jacobian, jacobian)
    expected = label_alignment(kernel, y)
    assert jacobian_alignment(jacobian, y - y.mean(0)) == pytest.approx(expected, rel=1e-12)


def test_lazy_training_leaves_the_layers_as_aligned_as_at_the_start() -> None:
    model = MLP.model_validate({"width": 8, "depth": 2, "activation": "tanh"})
    trial = AlignedLayers(model=model, init=WIDE_INIT, data=Digits(train=8, query=0, test=0), alpha=1e6)
    rows = pd.DataFrame([*trial.rows(0)]).pivot_table(index="layer", columns="moment", values="alignment")
    assert (rows["end"] - rows["start"]).abs().max() < 1e-4  # of the order 1/α, with its factors


# Data and fields that do not suit a trial.


NETWORK = MLP(width=4, depth=1)
REAL = Circle(train=4, query=0, test=2)
THREE = Digits(train=4, query=0, test=2, classes=(0, 1, 2))
CURVE: dict[str, Any] = {"model": Linear(), "beside": Linear(), "init": FLAT, "data": IMAGES}
REFUSALS: list[tuple[type[AbstractTrial], dict[str, Any], str]] = [
    (LearningCurve, CURVE | {"sizes": (2, 6)}, "6 of 6 examples leave none to classify"),
    (LearningCurve, CURVE | {"known": (0.5,)}, "an accuracy for each of at"),
    (DeepKernels, {"model": CNTK(), "data": IMAGES, "sizes": ((3, 1, 2),)}, "Conv is no dense layer"),
    (DeepKernels, {"model": Linear(), "sizes": ((3, 1, 2),)}, "linear has no field depth"),
    (DeepKernels, {"init": Standard(W_std=1.0, b_std=0.0), "sizes": ((3, 1, 2),)}, "choose mlp and init=ntk"),
    (DeepKernels, {"sizes": ((3, 1, 1),)}, "greater than or equal to 2"),
    (LearningCurve, CURVE | {"sizes": (2, 2)}, "give two different sizes"),
    (LimitRegression, {"names": ("dense",), "models": (NETWORK,), "data": REAL}, "the data has no classes"),
    (TrainingBesideKernels, {"data": THREE, "widths": (1, 2)}, "networks with one output, and the data has 3"),
    (WidthSweep, {"data": THREE, "widths": (1, 2, 3)}, "choose data of one real value"),
    (AfterKernel, {"data": REAL}, "choose data of two classes"),
    (EndOfTraining, {"data": THREE}, "choose data of two classes"),
    (LateGeneralising, {"data": REAL, "alphas": (1.0, 2.0)}, "choose data of classes"),
    (NearestExamples, {"data": REAL}, "choose data of classes"),
    (NearestExamples, {"data": Digits(train=4, query=2, test=0)}, "leave some for the test"),
    (AlignedLayers, {"data": REAL}, "trial.data: choose data of classes"),
    (AlignedLayers, {"data": DIGITS}, "trial.model has 2 layers with weights"),
    (RemovalByPhase, {"data": REAL, "alpha": 1.0, "step_size": 1.0}, "choose data of classes"),
    (SilentAlignment, {"names": ("one", "two"), "models": (NETWORK,), "data": DIGITS}, "a name of its own"),
]


@pytest.mark.parametrize(("trial", "fields", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_unsuitable_data_and_fields_are_refused(
    trial: type[AbstractTrial], fields: dict[str, Any], message: str
) -> None:
    with_network = {} if "models" in fields or "model" in fields else {"model": NETWORK}
    with pytest.raises((Mistake, ValueError), match=message):
        list(trial(**{"init": WIDE_INIT, "data": DATA, **with_network, **fields}).rows(0))
