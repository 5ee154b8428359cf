"""A picture and a command are one file in their folder: here the folder has a second place, outside the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ntkexp.cli import commands, main
from ntkexp.cli.main import run
from ntkexp.records.sweep import read_sweep
from ntkexp.report.analysis.tables import analyse
from ntkexp.report.plots import figures, run_plots, together
from ntkexp.report.plots.run_plots import exhibition, gallery, save
from ntkexp.report.run import load_run, load_tables
from tests.extension.outside import PARTS
from tests.report.sweeps import write_sweep
from tests.report.synthetic import digits, write_run


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders, each with a file more."""
    for package in (commands, figures, together):
        extend(package, monkeypatch)
    monkeypatch.setattr("ntkexp.cli.main.app", main.assembled())


def extend(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package have a second folder, and forget in the end what was imported from it."""
    place = PARTS / package.__name__.rpartition(".")[2]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    for file in place.glob("[!_]*.py"):
        name = f"{package.__name__}.{file.stem}"
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]


@pytest.mark.usefixtures("extended")
def test_a_new_command_is_in_the_help_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert re.search(r"greet +Say who asks\.", capsys.readouterr().out)
    assert run(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "it is Ada who asks\n"


@pytest.mark.usefixtures("extended")
def test_a_new_picture_is_drawn_with_its_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is among the pictures, and here drawn alone."""
    draw = dict(gallery())["gap"]
    monkeypatch.setattr(run_plots, "gallery", lambda: [("gap", draw)])
    path = write_run(tmp_path / "run", digits(steps=20, counts=(12, 8, 8), snapshots=(0, 20)))
    names = {file.name for file in save(load_run(path), tmp_path / "plots")}
    assert names == {"gap.svg", "gap.csv"}


@pytest.mark.usefixtures("extended")
def test_a_new_picture_of_sweeps_is_among_theirs(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, axes={"model.width": (8, 16)}, seeds=(0,)))
    runs = {place.folder: load_tables(place.folder) for place in sweep.runs}
    assert "spread" in [picture.name for picture in exhibition(analyse(sweep, runs), runs)]
