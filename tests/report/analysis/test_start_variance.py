"""The variance of the first kernel over seeds: the textbook's, with intervals that hold its exponent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ntkexp.records.data import write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.records.kernels import create_kernels, write_snapshot
from ntkexp.records.seal import read_sealed, sealed_text
from ntkexp.records.sweep import read_sweep
from ntkexp.report.analysis.start_variance import dependence, spread
from ntkexp.report.analysis.tables import Analysis, analyse
from ntkexp.report.quantity import START_VARIANCE
from ntkexp.report.run import load_tables
from tests.report.analysis.trials import variances
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
        assert found.runs[START_VARIANCE].notna().all()
    (law,) = found.laws
    assert law.law is not None
    assert law.law.exponent.covers(-1.0)
    assert law.verdict is not None


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
    assert again.runs[START_VARIANCE].isna().tolist() == [True] + [False] * (len(sweep.runs) - 1)
    (law,) = again.laws
    assert law.law is not None
    assert law.law.left_out == 1


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("modes", [1, 4, 30])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_intervals_hold_the_exponent_as_often_as_they_say(seeds: int, modes: int, shared: float) -> None:
    """However many modes of the kernel vary, and whether or not a seed's kernels resemble each other along the axis."""
    found = variances(seeds, modes, shared)
    held, tight = (np.mean([law.widened(factor).covers(-1.0) is True for law in found])
                   for factor in (dependence(seeds), 1.0))  # fmt: skip
    assert 0.93 <= held <= 0.975
    assert tight < held - 0.01


def test_every_number_is_the_distance_from_the_other_seeds() -> None:
    kernels = list(np.random.default_rng(0).normal(1.0, 0.1, size=(3, 5)))
    mean = np.mean(kernels, axis=0)
    for k, found in enumerate(spread(kernels, lambda seed: seed)):
        others = np.mean([other for j, other in enumerate(kernels) if j != k], axis=0)
        # ‖K_s − mean of the n − 1 others‖² = (n/(n − 1))² ‖K_s − K̄‖²
        assert found == pytest.approx(2 / 3 * ((kernels[k] - others) ** 2).sum() / (mean**2).sum())
