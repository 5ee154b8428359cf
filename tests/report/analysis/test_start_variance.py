"""The variance of the first kernel over seeds: the textbook's, with intervals that hold its exponent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ntkexp.records.atomic import Json, read_sealed, sealed_text
from ntkexp.records.data import write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import create_kernels, write_snapshot
from ntkexp.records.sweep import read_sweep
from ntkexp.report.analysis.laws import dependence, spread
from ntkexp.report.analysis.tables import Analysis, analyse
from ntkexp.report.run import START_VARIANCE, load_tables
from tests.report.analysis.trials import AMOUNTS, exponents, fluctuating, from_the_mean, variances
from tests.report.sweeps import WIDTHS, write_sweep

Array = NDArray[np.float64]


def kernel(width: int, seed: int) -> Array:
    """K_0 of three points with two training examples; its variance falls as 1/width."""
    chance = np.random.default_rng([width, seed]).normal(size=(3, 1, 2, 1))
    return np.asarray(1 + chance / np.sqrt(width))


def swept(outputs: Path, *, seeds: int = 4, own_data: bool = False) -> Analysis:
    """A sweep whose runs kept their first kernel."""
    path = write_sweep(outputs, seeds=range(seeds))
    fits: list[Json] = [{"quantity": START_VARIANCE, "axis": "model.width", "exponent": -1.0, "margin": 5.0}]
    path.write_text(sealed_text(read_sealed(path, path.name) | {"fits": fits}, path.name))
    sweep = read_sweep(path)
    for place in sweep.runs:
        create_kernels(place.folder / "kernels.zarr", 3, 1, 2, 1)
        start = kernel(int(str(place.axes["model.width"])), place.seed)
        write_snapshot(place.folder / "kernels.zarr", 0, 0, start, np.zeros((2, 1)))
        write_data(place.folder / "data.npz", {"train_inputs": np.full((2, 3), place.seed if own_data else 0)})
        names = ["config.json", "metrics.csv", "results.csv", "data.npz", "kernels.zarr"]
        RunFolder(place.folder).finish(names, outcome="trained for 10 steps", diverged=False)
    return analyse(sweep, {place.folder: load_tables(place.folder) for place in sweep.runs})


def test_it_is_the_variance_over_seeds_among_the_training_examples(tmp_path: Path) -> None:
    found = swept(tmp_path)
    for k, width in enumerate(WIDTHS):
        drawn = np.stack([kernel(width, seed)[:2] for seed in range(4)])
        oracle = drawn.var(axis=0, ddof=1).sum() / (drawn.mean(axis=0) ** 2).sum()
        assert found.points[f"{START_VARIANCE}.mean"][k] == pytest.approx(oracle, rel=1e-12)
        assert found.points[f"{START_VARIANCE}.high"].isna().all()  # a mean of three squares
    numbers = found.runs.groupby("seed")[START_VARIANCE].count().sort_values().tolist()
    assert numbers == [0, len(WIDTHS), len(WIDTHS), len(WIDTHS)]  # one seed begins, the same at every width
    (law,) = found.laws
    assert law.law is not None
    assert (law.law.runs, law.law.seeds, law.law.units, law.law.left_out) == (4 * len(WIDTHS), 4, 3, 0)
    assert law.law.exponent.covers(-1.0)
    assert law.comparison is not None


def test_kernels_of_different_data_are_not_compared(tmp_path: Path) -> None:
    (law,) = swept(tmp_path, own_data=True).laws
    assert law.law is None
    assert "data.seed=0" in law.reason


def test_two_seeds_have_one_number_in_common_and_no_interval(tmp_path: Path) -> None:
    found = swept(tmp_path, seeds=2)
    (law,) = found.laws
    assert law.law is not None
    assert np.isfinite(law.law.exponent.value)
    assert not law.law.exponent.known
    assert not law.law.curvature.known
    assert found.points[f"{START_VARIANCE}.high"].isna().all()


def test_a_damaged_kernel_has_no_say(tmp_path: Path) -> None:
    found = swept(tmp_path)
    sweep = found.sweep
    runs = {place.folder: load_tables(place.folder) for place in sweep.runs}  # of large files, it checks the sizes
    place = sweep.runs[0].folder
    (chunk,) = (place / "kernels.zarr" / "tangent").rglob("c/0/0/0/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    again = analyse(sweep, runs)
    assert again.runs[START_VARIANCE].isna().sum() == 1 + len(WIDTHS)  # and a seed at each width that begins
    assert np.isnan(again.runs[START_VARIANCE][0])
    (law,) = again.laws
    assert law.law is not None
    assert law.law.left_out == 1


@pytest.mark.sample(16)
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("modes", [1, 4, 30])
@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("amounts", AMOUNTS)
def test_intervals_hold_the_exponent_as_often_as_they_say(seeds: int, modes: int, shared: float, amounts: str) -> None:
    """However many modes of the kernel vary, whether or not a seed's kernels resemble each other along the axis, and
    however much more some seeds vary than others."""
    found = variances(fluctuating(seeds, modes, shared, amounts))
    held = np.mean([law.widened(dependence(seeds)).covers(-1.0) is True for law in found])
    assert 0.93 <= held <= 0.995  # of 1000 sweeps, so that 0.94 may look like 0.93


@pytest.mark.parametrize("seeds", [3, 4, 5])
def test_distances_from_the_mean_of_all_would_not(seeds: int) -> None:
    """A seed that is far off moves the mean, and so every distance from it: the law above has teeth."""
    found = exponents(from_the_mean(fluctuating(seeds, 30, 0.0, "one far")))
    as_if_alike = ((seeds - 1) / (seeds - 2)) ** 0.5
    assert np.mean([law.widened(as_if_alike).covers(-1.0) is True for law in found]) < 0.91


def test_numbers_are_distances_from_the_mean_of_those_before() -> None:
    kernels = list(np.random.default_rng(0).normal(1.0, 0.1, size=(4, 5)))
    size = (np.mean(kernels, axis=0) ** 2).sum()
    found = spread(kernels)
    expected = [k / (k + 1) * ((kernels[k] - np.mean(kernels[:k], axis=0)) ** 2).sum() / size for k in (1, 2, 3)]
    assert found == pytest.approx(expected)
    assert np.mean(found) == pytest.approx(np.var(kernels, axis=0, ddof=1).sum() / size)
    assert np.mean(spread(kernels[::-1])) == pytest.approx(np.mean(found))
