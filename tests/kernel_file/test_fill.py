"""A file holds the whole kernel after any number of interruptions, and its identity."""

from __future__ import annotations

import fcntl
import os
import shutil
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import count
from math import acos, inf, isfinite, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.init import NTK
from ntkexp.kernel_file.kernel import EmpiricalKernel
from ntkexp.kernel_file.predict import Entries, KernelPredictions, PredictionSettings, Solver, predict
from ntkexp.library import KernelMachine
from ntkexp.limit.infinite_kernel import BlockSlices, compute
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask
from ntkexp.model.networks import CNTK, UCINtk
from ntkexp.records.atomic import acquire, release
from ntkexp.records.kernel_file import KernelMatrix, open_matrix
from tests.kernel_file.subjects import Products, filled, whole
from tests.run.commands import free_disk

TRAIN, POINTS = 70, 145


def products(path: Path, *overrides: str, workers: int = 1, force: bool = False) -> KernelMatrix:
    return filled(path, Products.of(*overrides, threads=workers), force=force)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_file_holds_the_kernel(tmp_path: Path, dtype: str) -> None:
    matrix = products(tmp_path / "k.zarr", f"dtype={dtype}")
    assert matrix.missing() == []
    for name, expected in whole(Products.of(f"dtype={dtype}")).items():
        found = torch.as_tensor(matrix.array(name))[:, 0, :, 0]
        assert found.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(found[:TRAIN], found[:TRAIN].mH)
    kernel = Products.of(f"dtype={dtype}")
    own = kernel.blocks(kernel.inputs)["ntk"][:, 0, :, 0].diagonal()
    torch.testing.assert_close(torch.as_tensor(matrix.array("ntk_self"))[:, 0, 0], own, rtol=0, atol=0)


def test_the_file_opens_labelled(tmp_path: Path) -> None:
    products(tmp_path / "k.zarr")
    with xr.open_zarr(tmp_path / "k.zarr", consolidated=False) as store:
        assert store["ntk"].dims == ("query", "out", "train", "out_")
        assert store["ntk"].shape == (POINTS, 1, TRAIN, 1)
    products(tmp_path / "ten.zarr", "data.classes=all")
    with xr.open_zarr(tmp_path / "ten.zarr", consolidated=False) as store:
        assert store["ntk"].sizes["out"] == 1
        assert dict(store["target"].sizes) == {"query": POINTS, "target_out": 10}
    found = open_matrix(tmp_path / "k.zarr")
    assert {name: place.stop for name, place in found.splits.items()} == {"train": 70, "query": 100, "test": 145}
    assert found.description["data"] == "digits"


def test_the_same_bytes_whoever_computes_and_however_often_it_is_broken_off(tmp_path: Path) -> None:
    products(tmp_path / "whole.zarr", workers=1)
    products(tmp_path / "crowd.zarr", workers=3)
    broken = tmp_path / "broken.zarr"
    for tiles, missing in ((2, 10), (4, 6), (10, 6)):  # the last case stops at single points
        with pytest.raises(KeyboardInterrupt):
            filled(broken, Products.of(fails_after=tiles))
        assert len(open_matrix(broken).missing()) == missing
    filled(broken, Products.of())
    assert contents(broken) == contents(tmp_path / "whole.zarr") == contents(tmp_path / "crowd.zarr")


def test_what_was_computed_is_kept_though_another_tile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order of the two results."""

    def all_at_once(running: set[Future[object]], return_when: str) -> tuple[list[Future[object]], set[Future[object]]]:
        return sorted(wait(running).done, key=lambda future: future.exception() is None), set()

    monkeypatch.setattr("ntkexp.kernel_file.fill.wait", all_at_once)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path / "k.zarr", Products.of(fails_after=1))
    assert len(open_matrix(tmp_path / "k.zarr").missing()) == 11


def test_what_is_finished_is_not_computed_again(tmp_path: Path) -> None:
    path, again = tmp_path / "k.zarr", Products.of()
    products(path)
    filled(path, again)
    assert again.seen == []
    filled(path, again, force=True)
    assert again.seen


@pytest.mark.parametrize("change", ["replace", "unlink"])
def test_a_kill_while_a_file_is_replaced_is_no_obstacle(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied before a file or folder gets its name, or before some files are removed."""
    made, calls = tmp_path / "made", count()
    changed: Callable[..., Any] = getattr(Path, change)
    killed: list[Path] = []

    def leaving(path: Path, *arguments: Any, **options: Any) -> Any:
        is_chosen = path.name == ".k.zarr.partial" if change == "replace" else next(calls) % 9 == 0
        if is_chosen:
            killed.append(shutil.copytree(made, tmp_path / f"killed-{len(killed)}"))
        return changed(path, *arguments, **options)

    products(made / "k.zarr")
    expected = contents(made / "k.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(Path, change, leaving)
        products(made / "k.zarr", force=True)
    assert killed
    for folder in killed:
        assert products(folder / "k.zarr", force=True).missing() == []
        assert contents(folder / "k.zarr") == expected
        assert [entry.name for entry in folder.iterdir() if entry.name != "k.zarr"] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (("data.seed=1",), "is of other data"),
        (("data.train=71",), "is of other data"),
        (("data=moons",), "is of other data"),
        (("dtype=float32",), "is of dtype=float64"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, other: tuple[str, ...], reason: str) -> None:
    path = tmp_path / "k.zarr"
    products(path)
    with pytest.raises(Mistake, match=f"{reason}; choose another place, or compute it again$"):
        products(path, *other)
    assert products(path, *other, force=True).missing() == []


def test_a_file_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It had its seals in its attributes, and one file of marks for each row of tiles."""
    products(tmp_path / "k.zarr")
    (tmp_path / "k.zarr" / "done" / "seals.json").unlink()
    with pytest.raises(Mistake, match=r"is damaged, or of an earlier version: done/seals\.json; compute it again$"):
        products(tmp_path / "k.zarr")
    assert products(tmp_path / "k.zarr", force=True).missing() == []


def test_a_folder_that_is_no_kernel_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(Mistake, match="not a store of arrays"):
            products(tmp_path, force=force)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["NOTES.txt", "done/NOTES.txt", "mine/zarr.json", "mine/c/0", "ntk/.draft.partial"])
def test_a_file_of_the_user_s_in_a_kernel_file_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "k.zarr"
    products(path)
    (path / name).parent.mkdir(exist_ok=True, parents=True)
    (path / name).write_text("mine")
    before = contents(path)
    with pytest.raises(Mistake, match=r"^[^\n]*no run wrote \([^\n]*; move it away, or choose another place$"):
        products(path, "data.seed=1", force=True)
    assert contents(path) == before


@pytest.mark.parametrize("made", [("done",), ("done", "k_self"), ("done", "target", "label", "index")])
def test_a_folder_with_some_arrays_of_those_names_is_no_kernel_file(tmp_path: Path, made: tuple[str, ...]) -> None:
    path = tmp_path / "thesis"
    for name in made:
        (path / name).mkdir(parents=True)
        (path / name / "zarr.json").write_text("{}")
    (path / "thesis.tex").write_text("years of work")
    before = contents(path)
    with pytest.raises(Mistake, match=r"^[^\n]*(is not a kernel file|no run wrote)[^\n]*$"):
        products(path, force=True)
    assert contents(path) == before


def test_a_file_that_would_take_years_is_not_begun(tmp_path: Path) -> None:
    years = r"data\.train=70, 145 points in all: this would take about 24 years on one core, more than 10 years; lower"
    with pytest.raises(Mistake, match=years):  # 70² / 2 + 75 · 70 pairs
        filled(tmp_path / "k.zarr", Products.of(each=1e5))
    assert not (tmp_path / "k.zarr").exists()


def test_one_process_writes(tmp_path: Path) -> None:
    acquire(tmp_path / ".k.zarr.lock")
    with pytest.raises(Mistake, match="is being written by another process"):
        products(tmp_path / "k.zarr")


def test_nothing_lies_beside_the_file_afterwards(tmp_path: Path) -> None:
    products(tmp_path / "k.zarr")
    assert [entry.name for entry in tmp_path.iterdir()] == ["k.zarr"]


def test_a_lock_that_another_removes_just_before_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two would each hold a file of that name."""
    lock, flock = tmp_path / ".lock", fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        release(os.dup(descriptor), lock)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    held = acquire(lock)
    assert os.path.samestat(os.fstat(held), lock.stat())
    release(held, lock)
    assert not lock.exists()


def test_a_disk_that_is_too_small_is_found_out_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", free_disk(1000))
    with pytest.raises(Mistake, match=r"tiles of this kernel take .* GB of disk and .* has 1e-06 GB free"):
        products(tmp_path / "k.zarr")


# A kernel file of sketches: another file than the exact one, whose maker says how far it may be off.


SMALL = ("data.train=9", "data.query=4", "data.test=3", "model.width=16")


def mean_of_two(*overrides: str) -> EmpiricalKernel:
    """The mean over two networks."""
    experiment = compose([*SMALL, *overrides])
    return EmpiricalKernel(experiment, experiment.draw(), seeds=(0, 1))


def test_it_lies_within_its_bar_and_has_an_identity_of_its_own() -> None:
    exact, sketched = mean_of_two(), mean_of_two("kernel.sketch=500")
    points = exact.experiment.draw().train.inputs
    kernel, found = exact.blocks(points)["ntk"], sketched.blocks(points)["ntk"]
    bar, size = (sum(each) / 2 for each in zip(*sketched.errors, strict=True))
    assert 0 < float((found - kernel).norm()) <= bar < 0.5 * size
    assert "kernel.sketch=500" in sketched.remark
    assert exact.remark == ""
    elsewhere = mean_of_two("kernel.sketch=500").remark
    assert elsewhere.startswith("the kernel is a sketch (kernel.sketch=500): it is good for kernel change")
    assert sketched.spec == exact.spec | {"sketch": 500, "sketch_seed": 0}


def test_a_loss_with_more_outputs_has_another_kernel() -> None:
    """The squared loss of two classes has one output, and cross-entropy has two."""
    squared, hinge, entropy = (mean_of_two(f"loss={loss}") for loss in ("squared", "hinge", "cross_entropy"))
    assert (squared.outputs, hinge.outputs, entropy.outputs) == (1, 1, 2)
    assert squared.identity == hinge.identity
    assert squared.identity != entropy.identity
    traces = [replace(kernel, chosen_outputs="trace").identity for kernel in (squared, entropy)]
    assert traces[0] != traces[1]


# Predictions from a file, against the formulas applied to the whole matrix.


EXAMPLES = 70
RIDGE = 0.3
ALL = "data.classes=all"


@pytest.fixture(scope="module", params=[(), (ALL,)], ids=["two classes", "ten"])
def entries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Entries:
    path = tmp_path_factory.mktemp("kernel") / "k.zarr"
    return Entries(filled(path, Products.of(*request.param)))


def kernels(entries: Entries) -> dict[str, Tensor]:
    return whole(Products.of(*([ALL] if entries.targets.shape[1] > 1 else [])))


def answered(entries: Entries, question: PredictionSettings) -> dict[tuple[str, str], KernelPredictions]:
    return {(each.kernel, each.solved.when): each for each in predict(entries, question, lambda text: None)}


def everywhere(answer: KernelPredictions) -> Tensor:
    return torch.cat([answer.predicted[split].mean for split in ("train", "query", "test")])


def regression(kernel: Tensor, targets: Tensor) -> Tensor:
    R = kernel[:EXAMPLES] + RIDGE * torch.eye(EXAMPLES, dtype=torch.float64)
    coefficients: Tensor = torch.linalg.solve(R, targets[:EXAMPLES])
    return kernel @ coefficients


@pytest.mark.sample(3)
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "cg", None], ids=str)
def test_every_solver_is_ridge_regression(entries: Entries, solver: Solver | None) -> None:
    found = answered(entries, PredictionSettings(ridge=RIDGE, solver=solver, memory_gb=4.0 if solver else 1e-5))
    assert [kernel for kernel, _ in found] == ["ntk", "nngp"]
    for name, kernel in kernels(entries).items():
        expected = regression(kernel, entries.targets)
        close = 1e-7 if solver in {"cg", None} else 1e-10  # its tolerance times the condition number, below a thousand
        torch.testing.assert_close(everywhere(found[name, "t=∞"]), expected, rtol=close, atol=close)


def test_scores_are_what_they_say(entries: Entries) -> None:
    answer = answered(entries, PredictionSettings(ridge=RIDGE))["ntk", "t=∞"]
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


def test_outputs_that_overflow_have_no_accuracy(entries: Entries) -> None:
    """A hundred thousand steps of a step size that diverges."""
    answer = answered(entries, PredictionSettings(ridge=RIDGE, steps=100_000, step_size=1e3))
    rows = [row for found in answer.values() for row in found.scores]
    assert len(rows) == 6
    assert {(row.accuracy, row.log_loss, row.calibration_error) for row in rows} == {(None, None, None)}
    assert not any(isfinite(row.rmse) for row in rows)


def test_deviations_are_those_of_the_processes(entries: Entries) -> None:
    found, both = answered(entries, PredictionSettings(ridge=RIDGE)), kernels(entries)
    inverse = torch.linalg.inv(both["nngp"][:EXAMPLES] + RIDGE * torch.eye(EXAMPLES, dtype=torch.float64))
    test = entries.matrix.splits["test"]
    cross, own = both["nngp"][test], entries.diagonal("nngp", test)
    posterior = own - (cross @ inverse * cross).sum(1)
    deviation = found["nngp", "t=∞"].predicted["test"].deviation
    assert deviation is not None
    torch.testing.assert_close(deviation.square(), posterior, rtol=1e-8, atol=1e-10)
    R = both["ntk"][:EXAMPLES] + RIDGE * torch.eye(EXAMPLES, dtype=torch.float64)
    A = torch.linalg.solve(R, both["ntk"][test].mH).mH
    ensemble = own + (A @ both["nngp"][:EXAMPLES] * A).sum(1) - 2 * (A * cross).sum(1)
    deviation = found["ntk", "t=∞"].predicted["test"].deviation
    assert deviation is not None
    torch.testing.assert_close(deviation.square(), ensemble, rtol=1e-8, atol=1e-10)


def test_every_time_and_steps(entries: Entries) -> None:
    kernel = kernels(entries)["ntk"]
    flows = answered(entries, PredictionSettings(times=(0.0, 20.0), ridge=RIDGE))
    assert not everywhere(flows["ntk", "t=0"]).any()
    steps = answered(entries, PredictionSettings(steps=200, step_size=0.1, ridge=RIDGE))
    coefficients = torch.zeros_like(entries.targets[:EXAMPLES])
    R = kernel[:EXAMPLES] + RIDGE * torch.eye(EXAMPLES, dtype=torch.float64)
    for _ in range(200):
        coefficients += 0.1 / EXAMPLES * (entries.targets[:EXAMPLES] - R @ coefficients)
    descended = everywhere(steps["ntk", "200 steps of 0.1"])
    torch.testing.assert_close(descended, kernel @ coefficients, rtol=1e-9, atol=1e-10)
    finer = everywhere(flows["ntk", "t=20"])
    assert float((descended - finer).norm() / finer.norm()) < 0.05  # Euler's error at this step


def test_a_kernel_machine_predicts_the_same(entries: Entries) -> None:
    kernel, targets = kernels(entries)["ntk"], entries.targets[:EXAMPLES]
    for question, machine in (
        (PredictionSettings(ridge=RIDGE), KernelMachine("precomputed", ridge=RIDGE)),
        (PredictionSettings(ridge=RIDGE, times=(20.0,)), KernelMachine("precomputed", ridge=RIDGE, time=20.0)),
        (
            PredictionSettings(ridge=RIDGE, steps=200, step_size=0.1),
            KernelMachine("precomputed", ridge=RIDGE, steps=200, step_size=0.1),
        ),
    ):
        expected = next(each for (name, _), each in answered(entries, question).items() if name == "ntk")
        found = machine.fit(kernel[:EXAMPLES], targets).predict(kernel)
        torch.testing.assert_close(found, everywhere(expected), rtol=1e-12, atol=1e-12)


def test_the_best_ridge_is_one_that_leaves_little_out(entries: Entries) -> None:
    chosen = answered(entries, PredictionSettings(ridge=None))["ntk", "t=∞"]
    assert chosen.scores[-1].split == "left out"
    for ridge in (chosen.solved.ridge / 10, chosen.solved.ridge * 10):
        other = answered(entries, PredictionSettings(ridge=ridge, folds=0))["ntk", "t=∞"]
        assert other.scores[-1].rmse >= chosen.scores[-1].rmse


def test_a_singular_kernel_without_end_is_refused_with_advice(entries: Entries) -> None:
    with pytest.raises(Mistake, match=r"the kernel is singular \(\d+ of 70 eigenvalues.*finite time, or a ridge > 0"):
        answered(entries, PredictionSettings(times=(inf,)))  # 64 pixels make a linear kernel of rank 64


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_a_kernel_of_single_precision_is_singular_to_its_own_rounding(tmp_path: Path, solver: Solver) -> None:
    """Products of three points on a circle have rank 2. Rounding makes the last eigenvalue positive for some data."""
    for seed in range(4):
        kernel = Products.of("dtype=float32", "data=circle", "data.train=3", "data.test=2", f"data.seed={seed}")
        with pytest.raises(Mistake, match="the kernel is singular"):
            list(predict(Entries(filled(tmp_path / f"{seed}.zarr", kernel)), PredictionSettings(solver=solver), print))


def test_products_that_do_not_converge_are_reported(entries: Entries) -> None:
    answers = answered(entries, PredictionSettings(solver="cg"))
    assert answers["ntk", "t=∞"].solved.warning is None
    assert "nngp: conjugate gradients did not converge" in str(answers["nngp", "t=∞"].solved.warning)  # of rank 64


@pytest.mark.slow
def test_predictions_keep_to_their_memory(tmp_path: Path) -> None:
    """A matrix that does not fit is read a few rows at a time, also while it is copied to where products read it."""
    entries = Entries(filled(tmp_path / "k.zarr", Products.of(ALL, "data.train=800", "data.test=20")))
    square = 8 * entries.count**2
    answers: list[dict[tuple[str, str], KernelPredictions]] = []
    for share in (20.0, 0.5):
        question = PredictionSettings(ridge=100.0, solver="cg", memory_gb=share * square / 1e9)
        tracemalloc.start()
        answers.append(answered(entries, question))
        peak = tracemalloc.get_traced_memory()[1]  # of numpy's arrays, as which rows are read
        tracemalloc.stop()
        assert 0 < peak < share * square
    for held, read in zip(answers[0].values(), answers[1].values(), strict=True):
        torch.testing.assert_close(everywhere(held), everywhere(read), rtol=1e-9, atol=1e-9)
    assert [file.name for file in tmp_path.iterdir()] == ["k.zarr"]  # and no other file remains


def test_cholesky_and_products_where_memory_is_short(entries: Entries) -> None:
    square = 8 * EXAMPLES**2 / 1e9
    assert PredictionSettings(ridge=RIDGE).choose_solver(entries) == "eigen"
    assert PredictionSettings(ridge=RIDGE, memory_gb=5 * square).choose_solver(entries) == "cholesky"
    assert PredictionSettings(ridge=RIDGE, memory_gb=square).choose_solver(entries) == "cg"
    with pytest.raises(Mistake, match=r"memory_gb=.* or ask for t=∞ at one ridge"):
        PredictionSettings(times=(1.0,), memory_gb=square).choose_solver(entries)
    with pytest.raises(Mistake, match="solver=cg supports only t=∞ at one ridge"):
        PredictionSettings(times=(1.0,), solver="cg").choose_solver(entries)


def test_a_file_that_is_not_finished_says_so(tmp_path: Path) -> None:
    path = tmp_path / "k.zarr"
    with pytest.raises(KeyboardInterrupt):
        filled(path, Products.of(fails_after=5))
    with pytest.raises(Mistake, match="is not finished, or damaged: 5 of 12 tiles are finished"):
        Entries(open_matrix(path))


def test_a_file_that_lost_a_tile_says_so(tmp_path: Path) -> None:
    matrix = filled(tmp_path / "k.zarr", Products.of())
    next((matrix.path / "ntk" / "c").rglob("0/0/0/0")).unlink()
    with pytest.raises(Mistake, match="is not finished, or damaged: 11 of 12 tiles are finished"):
        list(predict(Entries(open_matrix(matrix.path)), PredictionSettings(ridge=RIDGE), lambda text: None))


# The published kernels in their authors' own recursions, with loops over pixels, against the architectures here.


Pairs = NDArray[np.float64]  # [row, column, row′, column′] of two images
INIT = NTK(W_std=1, b_std=0)
SIDE, CHANNELS = 4, 2


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)


def window(pairs: Pairs) -> Pairs:
    """tr over the 3 × 3 windows around both pixels, those outside of the image being zero."""
    found, places = np.zeros_like(pairs), range(SIDE)
    for i, j, k, m in np.ndindex(*pairs.shape):
        for a in (-1, 0, 1):
            for b in (-1, 0, 1):
                if i + a in places and j + b in places and k + a in places and m + b in places:
                    found[i, j, k, m] += pairs[i + a, j + b, k + a, m + b]
    return found


def arcs(sigma: Pairs, left: Pairs, right: Pairs) -> tuple[Pairs, Pairs]:
    """c E σ(u)σ(v) and c E σ′(u)σ′(v) with c = 2, of ReLU."""
    value, slope = np.zeros_like(sigma), np.zeros_like(sigma)
    for i, j, k, m in np.ndindex(*sigma.shape):
        size = sqrt(left[i, j, i, j] * right[k, m, k, m])
        rho = float(np.clip(sigma[i, j, k, m] / size, -1, 1))
        slope[i, j, k, m] = (pi - acos(rho)) / pi
        value[i, j, k, m] = size * (rho * (pi - acos(rho)) + sqrt(1 - rho * rho)) / pi
    return value, slope


def published(x: torch.Tensor, y: torch.Tensor, depth: int, *, pooling: bool, fixed: bool) -> float:
    """Arora et al. 2019, section 4: K⁰ the products of pixels, Σ its windows, then with q = 3

    K ← c/q² E σσ,  K̇ ← c/q² E σ′σ′,  Θ ← tr(K̇ ∘ Θ + K),  and at the last layer the sum over pixels of K̇ ∘ Θ + K.
    """
    pairs = {
        name: np.einsum("cij,ckl->ijkl", one.numpy(), two.numpy())
        for name, one, two in (("xy", x, y), ("xx", x, x), ("yy", y, y))
    }
    sigma = {name: window(each) for name, each in pairs.items()}
    theta = np.zeros_like(sigma["xy"]) if fixed else sigma["xy"]
    for layer in range(1, depth):
        value, slope = arcs(sigma["xy"], sigma["xx"], sigma["yy"])
        own = {name: arcs(sigma[name], sigma[name], sigma[name])[0] / 9 for name in ("xx", "yy")}
        value, slope = value / 9, slope / 9
        theta = slope * theta
        if layer == depth - 1:
            theta = theta if fixed else theta + value
        else:
            theta = window(theta + value)
            sigma = {"xy": window(value), **{name: window(each) for name, each in own.items()}}
    if pooling:
        return float(theta.mean())
    return float(np.einsum("ijij->", theta))


@pytest.mark.parametrize("pooling", [False, True], ids=["flatten", "pooling"])
@pytest.mark.parametrize("fixed", [False, True], ids=["all", "fixed"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_cntk(depth: int, pooling: bool, fixed: bool) -> None:
    net = CNTK(depth=depth, pooling=pooling, fixed=fixed).limit(INIT, LearningTask((CHANNELS, SIDE, SIDE), 1))
    x, place = images(), BlockSlices(slice(0, 1), slice(1, 2), same=False)
    expected = published(x[0], x[1], depth, pooling=pooling, fixed=fixed)
    assert float(compute(net, place, x, x).ntk) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fixed", [0, 1, 3])
def test_uci_ntk(fixed: int) -> None:
    depth, (x, y) = 3, images().flatten(1).numpy()
    sigma = {"xy": x @ y, "xx": x @ x, "yy": y @ y}
    theta = 0.0 if fixed > 0 else sigma["xy"]
    for layer in range(1, depth + 1):
        size = sqrt(sigma["xx"] * sigma["yy"])
        rho = sigma["xy"] / size
        slope = (pi - acos(rho)) / (2 * pi)
        value = size * (rho * (pi - acos(rho)) + sqrt(1 - rho * rho)) / (2 * pi)
        sigma = {"xy": value, "xx": sigma["xx"] / 2, "yy": sigma["yy"] / 2}
        theta = slope * theta + (value if layer >= fixed else 0.0)
    net = UCINtk(depth=depth, fixed=fixed).limit(INIT, LearningTask((CHANNELS, SIDE, SIDE), 1))
    found = compute(net, BlockSlices(slice(0, 1), slice(1, 2), same=False), images(), images()).ntk
    assert float(found) == pytest.approx(theta, rel=1e-12)
