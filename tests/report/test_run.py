"""A run is read as it was written, or refused in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import walk_packages
from random import Random

import numpy as np
import pytest

from ntkexp import records
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.report.run import Run, load_run, load_runs, read_run
from tests.torture.damage import damage


def test_a_run_reads_back(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    assert run.config["steps"] == 60
    assert run.metrics["step"].tolist() == list(range(61))
    assert set(run.results["machine"]) >= {"secant", "left", "nngp"}
    assert run.kernels["tangent"].dims == ("snapshot", "probe", "out", "train", "out_")
    assert run.kernels["step"].values.tolist()[-1] == 60
    assert run.points == {"train": slice(0, 40), "probe": slice(40, 64), "test": slice(64, 94)}
    assert run.data["probe_shown"].shape == (24, 1, 8, 8)


@pytest.mark.parametrize("kind", ["two classes", "ten classes", "regression"])
def test_contributions_make_the_prediction(finished: dict[str, Path], kind: str) -> None:
    run = load_run(finished[kind])
    f = run.predictions
    made = f.sel(machine="f_0").values + run.contributions["contribution"].sum("example").values
    parts = float(np.abs(run.contributions["contribution"].values).sum(axis=2).max())
    # 60 steps, each rounded a few times at the size of what is added up
    np.testing.assert_allclose(made, f.sel(machine="f_T").values, atol=10 * 60 * np.finfo(float).eps * parts)


def test_a_run_can_be_copied(finished: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(finished["two classes"], tmp_path / "copy", ignore=shutil.ignore_patterns(".lock"))
    assert load_run(copy).metrics.equals(load_run(finished["two classes"]).metrics)


DAMAGE = {
    "config.json": b"{",
    "metrics.csv": b"step,loss\n0,word\n",
    "results.csv": b"split\n",
    "kernels.zarr/zarr.json": b"{",
    "DONE.json": b"[]",
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("declared", [False, True])
def test_a_damaged_run_is_one_line(finished: dict[str, Path], tmp_path: Path, name: str, declared: bool) -> None:
    copy = shutil.copytree(finished["regression"], tmp_path / "run")
    (copy / name).write_bytes(DAMAGE[name])
    if declared:  # as if the damage had been there before the sizes were taken
        RunFolder(copy).finish(["config.json", "metrics.csv", "results.csv", "kernels.zarr"])
        (copy / name).write_bytes(DAMAGE[name])
    with pytest.raises(Mistake, match=rf"^[^\n]*{copy}[^\n]*$"):
        load_run(copy)


SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 100))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_read_is_what_was_written(finished: dict[str, Path], tmp_path: Path, seed: int) -> None:
    copy, right = Path(shutil.copytree(finished["regression"], tmp_path / "run")), load_run(finished["regression"])
    done = damage(Random(seed), copy, finished["two classes"])
    try:
        found = load_run(copy)
        assert (found.outcome, found.config, found.ladder) == (right.outcome, right.config, right.ladder), done
        assert found.metrics.equals(right.metrics), done
        assert found.kernels.identical(right.kernels), done
        assert found.contributions.identical(right.contributions), done
        assert found.predictions.identical(right.predictions), done
        assert all(np.array_equal(found.data[name], right.data[name]) for name in right.data), done
    except Mistake as mistake:
        assert str(copy) in str(mistake)  # noqa: PT017  either end is right


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, reason in {"empty": "no run folder", "file": "not a folder", "nowhere": "does not exist"}.items():
        with pytest.raises(Mistake, match=rf"^[^\n]*{name}[^\n]*{reason}[^\n]*$"):
            load_run(tmp_path / name)


def test_an_unfinished_run_is_refused_but_can_be_read_by_its_writer(finished: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(finished["regression"], tmp_path / "run")
    (copy / "DONE.json").unlink()
    with pytest.raises(Mistake, match="not finished"):
        load_run(copy)
    with RunFolder(copy).claim(), pytest.raises(Mistake, match="still being written"):
        load_run(copy)
    assert len(read_run(copy).metrics) == 61


def test_runs_that_cannot_be_read_do_not_stand_in_the_way(finished: dict[str, Path], tmp_path: Path) -> None:
    run, mistake = load_runs([finished["regression"], tmp_path])
    assert isinstance(run, Run)
    assert run.path == finished["regression"]
    assert isinstance(mistake, Mistake)
    assert str(tmp_path) in str(mistake)


def test_reading_needs_no_torch_and_a_table_no_matplotlib() -> None:
    code = "import sys, ntkexp.report.run, ntkexp.report.run, ntkexp.report.sentence; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "matplotlib"} & set(modules)


def test_writing_needs_neither_torch_nor_pandas() -> None:
    names = [module.name for module in walk_packages(records.__path__, "ntkexp.records.")]
    code = "import sys\n" + "".join(f"import {name}\n" for name in names) + "print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pandas", "matplotlib"} & set(modules)


def test_drawing_needs_no_torch() -> None:
    code = "import sys; from ntkexp.report.plots.run_plots import gallery; list(gallery()); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules
