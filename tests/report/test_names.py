"""Names are text, whatever letters they are of, and pictures are drawn in one style, whatever the user's settings."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pandas as pd
import pytest

from ntkexp.cli.commands.kernel.predict import save
from ntkexp.records.results import Result, read_results, write_results
from ntkexp.report.explain import explain, format_explanations
from ntkexp.report.plots.run_plots import figure_of, gallery, svg
from ntkexp.report.run import load_run
from ntkexp.report.tables import format_csv
from ntkexp.text import shown_name
from tests.report.test_plots import assert_inside

PICTURES = dict(gallery())
WITH_NAMES = ("contributions", "path_kernel", "predictions")


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
    told = format_explanations(explain(run, "probe", range(20)), 30)
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


@pytest.mark.parametrize("name", ["ladder"])
def test_settings_of_matplotlibs_change_no_picture(finished: dict[str, Path], name: str) -> None:
    run = load_run(finished["two classes"])

    def drawn() -> str:
        figure = figure_of(run, PICTURES[name])
        assert figure is not None
        return svg(figure)

    expected = drawn()
    with mpl.rc_context(mpl.RcParams(STYLES)):
        assert drawn() == expected


def test_no_settings_are_read(tmp_path: Path) -> None:
    """A file of them that cannot be read, in the working folder and in the home, and a backend that is none."""
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
    """An apostrophe stands before it, which the reader of a run's table takes away; numbers are numbers."""
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
