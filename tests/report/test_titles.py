"""Titles of pictures and lines of tables on numbers made to contradict them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ntkexp.cli.commands.kernel.ensemble import answer as of_ensemble
from ntkexp.config.compose import compose
from ntkexp.ensemble import Comparison
from ntkexp.records.results import Result, at_points
from ntkexp.records.sweep import Sweep, SweepRun, read_sweep
from ntkexp.report.analysis.tables import analyse
from ntkexp.report.material import extent, tabulate_points
from ntkexp.report.plots.figures import loss_and_drift, spectrum
from ntkexp.report.plots.together.errors import errors_title
from ntkexp.report.plots.together.over_steps import courses_title
from ntkexp.report.run import Run, load_tables
from ntkexp.report.sentence import format_ladder, notes
from tests.report.sweeps import write_sweep


def run(**metrics: Sequence[float]) -> Run:
    steps = range(len(next(iter(metrics.values()))))
    return Run(Path("run"), {}, pd.DataFrame({"step": steps, **metrics}), ())


NAN = math.nan


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (run(loss=[1.0, 0.5], drift=[0.0, 0.1]), "The kernel moves by 10 % while the loss falls 2-fold"),
        (
            run(loss=[1.0, 0.5, 0.5], drift=[0.0, 0.1, NAN]),
            "The kernel moves by 10 % until step 1, where it is last a number, while the loss falls 2-fold",
        ),
        (run(loss=[1.0, NAN, 0.5], drift=[0.0, 0.0, 0.0]), "Training diverges: at step 1 the loss is no number"),
    ],
)
def test_what_ends_in_no_number_is_not_said_to_end(measured: Run, expected: str) -> None:
    assert loss_and_drift.answer(measured) == expected


def test_an_eigenvalue_that_comes_back_did_not_stay() -> None:
    assert "goes from 1 to 1, through 9" in spectrum.answer(np.array([1.0, 9.0, 1.0]), np.array([]))


def test_a_point_without_an_end_is_counted() -> None:
    lines = {"width 8": run(drift=[0, 0.5]), "width 16": run(drift=[0, 0.2]), "width 32": run(drift=[0.1, NAN])}
    assert courses_title(lines).endswith("at width 8, and 20 % at width 16; 1 of 3 runs end in no number")


def test_an_axis_is_named_where_it_has_numbers() -> None:
    """Its first level has none, and its levels are not in order."""
    table = pd.DataFrame({"width": [64, 8, 8, 16], "left.test": [NAN, 0.4, 0.1, 0.5]})
    said = errors_title(table, "width", {"left": "left.test"}, [64, 8, 16])
    assert said == "The error of left goes from 0.2 at width=8 to 0.5 at 16 (geometric means, 3 of 4 runs)"


def test_an_axis_that_is_not_sorted_has_both_its_ends_named() -> None:
    widths = {9: "done", 1: "done", 0: "failed"}
    runs = [SweepRun(folder=Path("run"), axes={"width": width}, seed=0, state=widths[width]) for width in widths]
    axes: dict[str, tuple[int, ...]] = {"width": (9, 1, 20)}
    sweep = Sweep(path=Path(), name="width", command="", axes=axes, seeds=(0,), base=(), fits=(), runs=tuple(runs))
    assert extent(sweep) == "width 3 values from 1 to 20; 2 of 3 runs done"


def test_what_was_measured_and_is_no_number_is_told_from_what_was_not_measured() -> None:
    ladder = [Result("probe", "left", "", NAN, 1e-13, NAN, note="odd"), Result("test", "left", note="none here")]
    assert "nan     –" in format_ladder(ladder)
    assert notes(ladder) == ["left (probe): odd", "left (test): none here"]


def test_points_of_all_splits_are_counted_together() -> None:
    ladder = [Result(split, "left", note=at_points(2, 9)) for split in ("train", "test")]
    assert notes(ladder) == ["left: at 4 of 18 points"]


def row(networks: str, process: str, mean: float, chance: float) -> Comparison:
    """Networks held against a process."""
    return Comparison(networks, process, 9, mean, 1.0, 3.0, 5, 8, 1.5, chance)


NTK, NNGP = "the NTK process", "the NNGP process"


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ((0.3, 0.01), f"could be draws of {NTK} (off) and are no draws of {NNGP} (off)"),
        ((0.01, 0.3), f"could be draws of {NNGP} (off) and are no draws of {NTK} (off)"),
        ((0.3, 0.3), f"could be draws of {NTK} (off) or {NNGP} (off)"),
        ((0.01, 0.01), f"are no draws of {NTK} (off) or {NNGP} (off)"),
        ((NAN, 0.3), f"could be draws of {NNGP} (off) and have no distance to {NTK} (it or"),
        (
            (NAN, NAN),
            f"have no distance to {NTK} (it or networks are not finite, or it has no spread) or {NNGP} (it or",
        ),
    ],
)
def test_an_ensemble_is_said_to_follow_what_it_could_be_drawn_from(chances: tuple[float, float], expected: str) -> None:
    one, other = zip(("ntk", "nngp"), chances, strict=True)
    kinds = {"all layers": (one, other), "readout": (("nngp", 0.5), ("ntk", 0.5))}
    table = [row(name, process, 0.81, chance) for name, rows in kinds.items() for process, chance in rows]
    said = of_ensemble(table, compose(["data=circle"])).replace("mean off by 0.81, covariance by 1.50", "off")
    assert said.startswith("9 networks of width 512 after 300 steps: where all layers learn, they " + expected)
    assert f"; where the readout alone learns, they could be draws of {NNGP} (off) or {NTK} (off)" in said


def test_a_mean_says_of_how_many_runs_it_is(tmp_path: Path) -> None:
    """One run of the first point failed, and one of the second has no kernel that moved."""
    record = write_sweep(tmp_path, failed=[0])
    metrics = sorted((tmp_path / "runs").glob("mlp-w64-*"))[0] / "metrics.csv"
    sweep, runs = read_sweep(record), {}
    for place in sweep.runs:
        if place.state == "done":
            runs[place.folder] = load_tables(place.folder)
    (found,) = (run for run in runs.values() if run.path == metrics.parent)
    runs[found.path] = replace(found, metrics=found.metrics.drop(columns="drift"))
    assert tabulate_points(analyse(sweep, runs))["runs"].tolist() == ["2", "2 to 3", "3", "3"]
