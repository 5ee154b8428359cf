"""Predictions from a file, against the formulas applied to the whole matrix."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.kernel_file.predict import Answer, Entries, Question, Solver, predict
from ntkexp.mistake import Mistake
from ntkexp.records.kernel_file import open_matrix
from tests.kernel_file.subjects import Products, filled, whole

TRAIN = 70
RIDGE = 0.3
ALL = "data.classes=all"


@pytest.fixture(scope="module", params=[(), (ALL,)], ids=["two classes", "ten"])
def entries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Entries:
    path = tmp_path_factory.mktemp("kernel") / "k.zarr"
    return Entries(filled(path, Products.of(*request.param)))


def kernels(entries: Entries) -> dict[str, Tensor]:
    return whole(Products.of(*([ALL] if entries.targets.shape[1] > 1 else [])))


def answered(entries: Entries, question: Question) -> dict[tuple[str, str], Answer]:
    return {(each.kernel, each.solved.when): each for each in predict(entries, question, lambda text: None)}


def everywhere(answer: Answer) -> Tensor:
    return torch.cat([answer.predicted[split].mean for split in ("train", "probe", "test")])


def regression(kernel: Tensor, targets: Tensor) -> Tensor:
    R = kernel[:TRAIN] + RIDGE * torch.eye(TRAIN, dtype=torch.float64)
    coefficients: Tensor = torch.linalg.solve(R, targets[:TRAIN])
    return kernel @ coefficients


@pytest.mark.sample(3)
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "cg", None], ids=str)
def test_every_solver_is_ridge_regression(entries: Entries, solver: Solver | None) -> None:
    found = answered(entries, Question(ridge=RIDGE, solver=solver, memory_gb=4.0 if solver else 1e-5))
    assert [kernel for kernel, _ in found] == ["ntk", "nngp"]
    for name, kernel in kernels(entries).items():
        expected = regression(kernel, entries.targets)
        close = 1e-7 if solver in {"cg", None} else 1e-10  # its tolerance times the condition number, below a thousand
        torch.testing.assert_close(everywhere(found[name, "t=∞"]), expected, rtol=close, atol=close)


def test_scores_are_what_they_say(entries: Entries) -> None:
    answer = answered(entries, Question(ridge=RIDGE))["ntk", "t=∞"]
    places = entries.matrix.splits
    outputs = regression(kernels(entries)["ntk"], entries.targets)
    for row in answer.scores:
        error = (outputs - entries.targets)[places[row.split]]
        chosen = outputs[places[row.split]]
        guess = (chosen[:, 0] > 0).long() if chosen.shape[1] == 1 else chosen.argmax(1)
        right = guess == entries.labels[places[row.split]]
        assert row.points == len(error)
        assert row.accuracy == pytest.approx(float(right.double().mean()), abs=1e-15)
        assert row.rmse == pytest.approx(float(error.square().mean().sqrt()), rel=1e-8)


def test_deviations_are_those_of_the_processes(entries: Entries) -> None:
    found, both = answered(entries, Question(ridge=RIDGE)), kernels(entries)
    inverse = torch.linalg.inv(both["nngp"][:TRAIN] + RIDGE * torch.eye(TRAIN, dtype=torch.float64))
    test = entries.matrix.splits["test"]
    cross, own = both["nngp"][test], entries.own("nngp", test)
    posterior = own - (cross @ inverse * cross).sum(1)
    deviation = found["nngp", "t=∞"].predicted["test"].deviation
    assert deviation is not None
    torch.testing.assert_close(deviation.square(), posterior, rtol=1e-8, atol=1e-10)
    R = both["ntk"][:TRAIN] + RIDGE * torch.eye(TRAIN, dtype=torch.float64)
    A = torch.linalg.solve(R, both["ntk"][test].mH).mH
    ensemble = own + (A @ both["nngp"][:TRAIN] * A).sum(1) - 2 * (A * cross).sum(1)
    deviation = found["ntk", "t=∞"].predicted["test"].deviation
    assert deviation is not None
    torch.testing.assert_close(deviation.square(), ensemble, rtol=1e-8, atol=1e-10)


def test_every_time_and_steps(entries: Entries) -> None:
    kernel = kernels(entries)["ntk"]
    flows = answered(entries, Question(times=(0.0, 20.0), ridge=RIDGE))
    assert not everywhere(flows["ntk", "t=0"]).any()
    steps = answered(entries, Question(steps=200, step_size=0.1, ridge=RIDGE))
    coefficients = torch.zeros_like(entries.targets[:TRAIN])
    R = kernel[:TRAIN] + RIDGE * torch.eye(TRAIN, dtype=torch.float64)
    for _ in range(200):
        coefficients += 0.1 / TRAIN * (entries.targets[:TRAIN] - R @ coefficients)
    descended = everywhere(steps["ntk", "200 steps of 0.1"])
    torch.testing.assert_close(descended, kernel @ coefficients, rtol=1e-9, atol=1e-10)
    finer = everywhere(flows["ntk", "t=20"])
    assert float((descended - finer).norm() / finer.norm()) < 0.05  # Euler's error at this step


def test_the_best_ridge_is_one_that_leaves_little_out(entries: Entries) -> None:
    chosen = answered(entries, Question(ridge=None))["ntk", "t=∞"]
    assert chosen.scores[-1].split == "left out"
    for ridge in (chosen.solved.ridge / 10, chosen.solved.ridge * 10):
        other = answered(entries, Question(ridge=ridge, folds=0))["ntk", "t=∞"]
        assert other.scores[-1].rmse >= chosen.scores[-1].rmse


def test_a_singular_kernel_without_end_is_refused_with_advice(entries: Entries) -> None:
    with pytest.raises(Mistake, match=r"the kernel is singular \(\d+ of 70 eigenvalues.*finite time, or a ridge > 0"):
        answered(entries, Question(times=(inf,)))  # 64 pixels make a linear kernel of rank 64


def test_cholesky_and_products_where_memory_is_short(entries: Entries) -> None:
    square = 8 * TRAIN**2 / 1e9
    assert Question(ridge=RIDGE).way_to_solve(entries) == "eigen"
    assert Question(ridge=RIDGE, memory_gb=5 * square).way_to_solve(entries) == "cholesky"
    assert Question(ridge=RIDGE, memory_gb=square).way_to_solve(entries) == "cg"
    with pytest.raises(Mistake, match=r"memory_gb=.* or ask for t=∞ at one ridge"):
        Question(times=(1.0,), memory_gb=square).way_to_solve(entries)
    with pytest.raises(Mistake, match="solver=cg gives t=∞ at one ridge"):
        Question(times=(1.0,), solver="cg").way_to_solve(entries)


def test_a_file_that_is_not_finished_says_so(tmp_path: Path) -> None:
    path = tmp_path / "k.zarr"
    with pytest.raises(KeyboardInterrupt):
        filled(path, Products.of(fails_after=5))
    with pytest.raises(Mistake, match="is not finished, or damaged: 5 of 12 tiles are there"):
        Entries(open_matrix(path))


def test_a_file_that_lost_a_tile_says_so(tmp_path: Path) -> None:
    matrix = filled(tmp_path / "k.zarr", Products.of())
    next((matrix.path / "ntk" / "c").rglob("0/0/0/0")).unlink()
    with pytest.raises(Mistake, match="is not finished, or damaged: 11 of 12 tiles are there"):
        list(predict(Entries(open_matrix(matrix.path)), Question(ridge=RIDGE), lambda text: None))
