"""A run is read unchanged, or refused in one line."""

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import walk_packages
from random import Random
from typing import TypeAlias
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ntkexp import records
from ntkexp.cli.kernel_predict import save
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import Result, read_results, write_results
from ntkexp.report.explain import explain, format_explanations
from ntkexp.report.live_log import NAME, PLACE
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import what_came_out
from ntkexp.report.plots.rendering import png, svg
from ntkexp.report.plots.run_plots import figure_of, gallery, strip
from ntkexp.report.run import Run, read_run
from ntkexp.report.tables import format_csv
from ntkexp.text import shown_name
from tests.report.test_plots import assert_inside
from tests.run.commands import TINY, only_run
from tests.torture.damage import damage


def test_a_run_reads_back(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    assert run.config["steps"] == 60
    assert run.metrics["step"].tolist() == list(range(61))
    assert set(run.results["machine"]) >= {"secant", "left", "nngp"}
    assert run.kernels["tangent"].dims == ("snapshot", "query", "out", "train", "out_")
    assert run.kernels["step"].values.tolist()[-1] == 60
    assert run.points == {"train": slice(0, 40), "query": slice(40, 64), "test": slice(64, 94)}
    assert run.data["query_shown"].shape == (24, 1, 8, 8)


SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_run_is_read_as_written_or_refused(finished: dict[str, Path], tmp_path: Path, seed: int) -> None:
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
    for name, reason in {"empty": "not a run folder", "file": "not a folder", "nowhere": "does not exist"}.items():
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


RECORDS = [module.name for module in walk_packages(records.__path__, "ntkexp.records.")]


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import ntkexp.report.run, ntkexp.report.sentence", {"torch", "matplotlib"}),
        (f"import {', '.join(RECORDS)}", {"torch", "pandas", "matplotlib"}),
        ("from ntkexp.report.plots.run_plots import gallery; list(gallery())", {"torch"}),
    ],
    ids=["reading", "writing", "drawing"],
)
def test_records_and_reports_import_no_more_than_they_need(program: str, absent: set[str]) -> None:
    command = [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not absent & set(modules)


# Sentences about many runs count every run.


Errors: TypeAlias = Mapping[str, float | None]


def run_of(train: Errors, test: Errors | None = None, floor: float = 1e-13, controls: tuple[str, ...] = ()) -> Run:
    """Return a run with these errors. The test split has the errors of the training split by default."""
    both = {"train": train, "test": train if test is None else test}
    ladder = tuple(
        Result(split, name, "", error, floor, error, control=name in controls)
        for split, errors in both.items()
        for name, error in errors.items()
    )
    return Run(Path("run"), {}, pd.DataFrame(), ladder)


EXACT, OFF = {"secant": 4e-15}, {"secant": 0.3}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run_of(EXACT)] * 3, "reproduces all 3 trained networks to rounding (4e-15 at worst)."),
        (
            [*[run_of(EXACT)] * 99, run_of(EXACT, OFF)],
            "reproduces 99 of 100 trained networks to rounding (4e-15 at worst) and misses 1 by 30 %.",
        ),
        (
            [run_of({"secant": error}) for error in (0.3, 0.01, 0.02)],
            "misses all 3 trained networks by 2 % at the median and 30 % at worst.",
        ),
        (
            [run_of(EXACT), run_of({"left": 0.1})],  # one run has no secant
            "reproduces 1 of 2 trained networks to rounding (4e-15) and has no result for 1; the textbook sum "
            "misses 1 of 2 trained networks by 10 % and has no result for 1.",
        ),
        (
            [run_of(EXACT), run_of(EXACT, {"secant": math.nan})],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and is not finite for 1.",
        ),
        (
            [run_of(EXACT), run_of({"secant": math.nan}, floor=math.nan)],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and cannot be compared with 1 that is not finite.",
        ),
        (
            [run_of(EXACT), run_of({"secant": 0.5}, floor=2.0)],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and cannot be distinguished from 1 that moved by "
            "no more than rounding.",
        ),
        (
            [run_of(EXACT), run_of(EXACT, {"secant": None})],
            "reproduces both trained networks to rounding (4e-15 at worst) (in 1, at some points only).",
        ),
    ],
)
def test_a_sentence_covers_every_run(runs: list[Run], expected: str) -> None:
    assert what_came_out(runs) == f"The secant kernel machine {expected}"


def test_runs_without_kernel_machines_have_a_sentence() -> None:
    assert what_came_out([run_of({}), run_of({})]) == "No kernel machine was compared with any of 2 trained networks."


LINEAR = {"left": 0.3, "linearised": 0.2}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run_of({"left": 0.1, "linearised": 0.2, "mine": 1e-15}, controls=("mine",))], "to the network: left"),
        ([run_of({"secant": 4e-15, "gauss": 5e-15, "left": 0.1})], "to the network: secant and gauss"),
        ([run_of(LINEAR | {"left": 0.1}), *[run_of(LINEAR)] * 2], "to the network: linearised in 2 of 3 runs"),
        (
            [run_of(LINEAR | {"left": math.nan}), run_of({"left": 0.1})],
            "to the network: linearised and left in 1 of 2 runs",
        ),
        (
            [run_of({"left": math.inf, "mine": 0.1}, controls=("mine",))],
            "No machine that knows the network has a finite error",
        ),
    ],
)
def test_the_nearest_machine_is_one_that_knows_the_network(runs: list[Run], expected: str) -> None:
    picture = strip(runs)
    assert picture is not None
    title = picture.figure.get_suptitle().replace("\n", " ")
    assert title.startswith(expected if expected[0] == "N" else f"Nearest {expected}")


def test_errors_that_are_no_numbers_are_counted_in_their_row() -> None:
    picture = strip([run_of({"left": math.nan}), run_of({"left": 0.1}), run_of({"left": 0.3})])
    assert picture is not None
    assert "0.2, worst 0.3; 1 not finite" in [text.get_text() for text in picture.figure.axes[0].texts]
    assert strip([run_of({"left": math.nan})]) is None


# TensorBoard has the records of a run, each point once.


FLOAT32 = 2.0**-23  # TensorBoard keeps single precision: the rounding of one number


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its events."""
    out = tmp_path_factory.mktemp("outputs")
    assert run(["train", *TINY, "--quiet", "--tensorboard", f"--out={out}"]) == 0
    return only_run(out)


@pytest.mark.slow
def test_tensorboard_has_metrics_errors_and_pictures(logged_run: Path) -> None:
    events = EventAccumulator(str(logged_run / PLACE), {"scalars": 0, "images": 0})
    events.Reload()
    metrics = load_run(logged_run).metrics
    for column in ("loss", "kernel_change", "weights_moved"):
        scalars, known = events.Scalars(f"metrics/{column}"), metrics[column].dropna()
        assert [event.step for event in scalars] == metrics.loc[known.index, "step"].tolist()
        np.testing.assert_allclose([event.value for event in scalars], known, rtol=FLOAT32, atol=1e-38)
    assert len(events.Scalars("metrics/kernel_change")) < len(events.Scalars("metrics/loss"))
    for result in read_results(logged_run / "results.csv"):
        if result.relative_error is not None:
            (scalar,) = events.Scalars(f"ladder/{result.split}/{result.machine}")
            assert (scalar.step, scalar.value) == (30, pytest.approx(result.relative_error, rel=FLOAT32))
    figures = {name: figure_of(load_run(logged_run), draw) for name, draw in gallery()}
    drawn = {f"plots/{name}": png(figure) for name, figure in figures.items() if figure is not None}
    assert {tag: events.Images(tag)[0].encoded_image_string for tag in events.Tags()["images"]} == drawn
    stored = {f"plots/{path.stem}" for path in (logged_run / "plots").glob("*.svg")}
    assert drawn.keys() == stored | {"plots/cost"}  # timings are not known before the run is finished


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "resume", "sweep"])
def test_finished_runs_get_their_events_once(command: str, logged_run: Path) -> None:
    (path,), out = (logged_run / PLACE).iterdir(), logged_run.parents[1]
    before = path.read_bytes()
    path.unlink()
    words = [str(logged_run)] if command == "resume" else [*TINY, f"--out={out}"]
    for _ in range(2):
        (path.parent / f"{NAME}0123456789ab").write_text("those of another run")
        assert run([command, *words, "--quiet", "--tensorboard"]) == 0
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert RunFolder(logged_run).done


# Names with any letters are shown as text, and pictures have one style, whatever the settings of the user.


PICTURES = dict(gallery())
WITH_NAMES = ("contributions", "path_kernel")


@pytest.mark.parametrize("name", WITH_NAMES)
def test_a_picture_of_classes_with_strange_names(finished: dict[str, Path], name: str) -> None:
    figure = figure_of(load_run(finished["strange names"]), PICTURES[name])
    assert figure is not None
    written = " ".join(ElementTree.fromstring(svg(figure)).itertext())  # raises where it is no XML
    assert_inside(figure)
    if name == "path_kernel":
        assert all(said in written for said in ("$x^{$", "$5-$10", r"a_b % \frac", "<b>&amp;"))
    assert not any(ord(letter) < 32 and letter != "\n" for letter in written)


def test_no_name_acts_on_a_terminal(finished: dict[str, Path]) -> None:
    run = load_run(finished["strange names"])
    told = format_explanations(explain(run, "query", range(20)), 30)
    assert all(line.isprintable() for line in told.replace("\u200d", "").splitlines())
    assert r"\x1b[31m" in told
    assert max(map(len, told.splitlines())) < 200


STYLES = {
    "axes.grid": True,
    "lines.linestyle": "--",
    "font.family": "serif",
    "text.usetex": True,
    "svg.fonttype": "path",
}


def test_settings_of_matplotlib_change_no_picture(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])

    def drawn() -> str:
        figure = figure_of(run, PICTURES["ladder"])
        assert figure is not None
        return svg(figure)

    expected = drawn()
    with mpl.rc_context(mpl.RcParams(STYLES)):
        assert drawn() == expected


def test_no_settings_are_read(tmp_path: Path) -> None:
    """Neither an unreadable file of settings, in the working folder or the home, nor an unknown backend."""
    home = tmp_path / "home" / "matplotlib"
    home.mkdir(parents=True)
    for place in (tmp_path, home):
        (place / "matplotlibrc").write_bytes(b"lines.linewidth: 9\n\xff")
    around = {"MPLBACKEND": "nonsense", "MATPLOTLIBRC": str(tmp_path), "XDG_CONFIG_HOME": str(home.parent)}
    program = (
        "import os, ntkexp.report.plots, matplotlib; assert matplotlib.rcParams['lines.linewidth'] == 1.5;"
        "assert os.environ['MPLBACKEND'] == 'nonsense'"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | around, cwd=tmp_path, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["=1", "", "a\u200db", "\u202e", "x" * 1000, "日本 語", "\ud800"])
def test_a_shown_name_is_one_short_line(name: str) -> None:
    said = shown_name(name)
    assert 0 < len(said) <= 60
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\tx", "'=x", "''-", "-1_0"])
def test_no_cell_of_a_table_is_a_formula(text: str, tmp_path: Path) -> None:
    """An apostrophe is written before it, and removed by the reader of a run's table. Numbers are unchanged."""
    row = Result("train", text, "", -0.5, None, None, None, None, text)
    write_results(tmp_path / "results.csv", [row])
    assert read_results(tmp_path / "results.csv") == (row,)
    with (tmp_path / "results.csv").open(newline="") as file:
        written = next(csv.DictReader(file))
    assert (written["machine"][0], written["relative_error"]) == ("'", "-0.5")
    table = format_csv(pd.DataFrame({text: [text, "1"], "x": [-1.0, 2.0], "y": [None, 3]}))
    assert [cell for line in csv.reader(table.splitlines()) for cell in line if cell and cell[0] in "=+@\t\r"] == []
    saved = save(tmp_path, "a.csv", [text], [[text], [-0.5], ["-0.5"]])
    assert list(csv.reader(saved.read_text().splitlines()))[1:] == [[f"'{text}"], ["-0.5"], ["-0.5"]]
