"""The record of a sweep is read as it was written, wherever it lies."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Fit, Sweep, SweepRun, read_sweep, write_sweep


def small(outputs: Path) -> Sweep:
    runs = [
        SweepRun(folder=outputs / "runs" / f"w{width}-{seed}", axes={"model.width": width, "data": None}, seed=seed,
                 state="failed" if seed else "done", reason="it is too large" * seed)
        for width in (64, 8) for seed in (0, 1)
    ]  # fmt: skip
    return Sweep(
        path=outputs / "sweeps" / "width.json",
        name="width",
        command="ntkexp sweep width",
        axes={"model.width": (64, 8), "data": (None,)},
        seeds=(0, 1),
        base=("steps=3",),
        fits=(
            Fit(quantity="drift", axis="model.width", exponent=-0.5, bound="upper"),
            Fit(quantity="loss", axis="data"),
        ),
        runs=tuple(runs),
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    write_sweep(small(tmp_path))
    assert read_sweep(tmp_path / "sweeps" / "width.json") == small(tmp_path)


def test_a_record_of_another_sweep_is_not_read(tmp_path: Path) -> None:
    write_sweep(small(tmp_path))
    other = Path(shutil.copyfile(tmp_path / "sweeps" / "width.json", tmp_path / "sweeps" / "depth.json"))
    with pytest.raises(Mistake, match="not as it was written for this place"):
        read_sweep(other)


def test_runs_lie_beside_a_record_that_was_moved(tmp_path: Path) -> None:
    write_sweep(small(tmp_path / "one"))
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert read_sweep(tmp_path / "two" / "sweeps" / "width.json") == small(tmp_path / "two")


def test_a_record_that_says_the_same_is_left_alone(tmp_path: Path) -> None:
    sweep = small(tmp_path)
    write_sweep(sweep)
    before = sweep.path.stat().st_ino
    write_sweep(sweep)
    assert sweep.path.stat().st_ino == before
    write_sweep(replace(sweep, base=()))
    assert sweep.path.stat().st_ino != before
    assert read_sweep(sweep.path).base == ()


def test_a_list_on_an_axis_goes_by_its_text(tmp_path: Path) -> None:
    rules: list[Any] = [["left"], ["secant", "left"]]
    runs = [SweepRun(folder=tmp_path, axes={"path.rule": each}, seed=0, state="unfinished") for each in rules]
    sweep = replace(small(tmp_path), axes={"path.rule": tuple(rules)}, fits=(), runs=tuple(runs))
    write_sweep(sweep)
    assert [run.point for run in read_sweep(sweep.path).runs] == [("['left']",), ("['secant', 'left']",)]
