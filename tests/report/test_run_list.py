"""The list of `ntkexp runs`: its numbers come from the files, and damaged files leave gaps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ntkexp.records.results import read_results
from ntkexp.report.inventory import list_runs
from ntkexp.report.run_list import FROZEN, LAST_BYTES, format_within, last_row, tabulate_runs
from ntkexp.text import MISSING
from tests.report.synthetic import digits, write_run, write_small_run


def cells(folder: Path, now: float, *keys: str) -> dict[str, dict[str, object]]:
    """The cells of each run, by the names of the columns."""
    table = tabulate_runs(list_runs(folder), keys, now)
    names = [column.name for column in table.columns]
    return {str(row[0]): dict(zip(names, row, strict=True)) for row in table.rows}


def test_a_line_holds_the_numbers_of_the_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mlp", digits())
    (run / "timings.csv").write_text("what,seconds,processor\nprepare,60.0,1.0\nrun,240.0,1.0\nmachine.left,9.0,\n")
    done_at = (run / "DONE.json").stat().st_mtime
    (line,) = cells(tmp_path, done_at + 7200).values()
    last = (run / "metrics.csv").read_text().splitlines()
    row = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
    accuracy = float(row.get("accuracy_query") or row["accuracy"])
    assert float(str(line["accuracy"]).removesuffix(" %")) == pytest.approx(100 * accuracy, abs=0.5)
    (frozen,) = (row for row in read_results(run / "results.csv") if (row.split, row.machine) == ("query", FROZEN))
    assert frozen.relative_error is not None
    assert float(str(line["frozen"]).removesuffix(" %")) == pytest.approx(100 * frozen.relative_error, abs=0.5)
    assert (line["age"], line["took"]) == ("2.0 h", "5.0 min")  # kernel machines are a part of the run
    assert "loss" not in line


def test_a_run_from_the_future_has_no_age(tmp_path: Path) -> None:
    """The clock was set back since."""
    for name, lead in (("old", -60), ("new", 60)):
        run = write_run(tmp_path / name, digits())
        os.utime(run / "DONE.json", (1e9 + lead, 1e9 + lead))
    lines = cells(tmp_path, 1e9)
    assert {name: line["age"] for name, line in lines.items()} == {"old": "60 s", "new": MISSING}


def test_runs_without_classes_list_their_loss_and_settings_that_differ(tmp_path: Path) -> None:
    for width in (32, 64):
        write_small_run(tmp_path / f"mlp-w{width}", width, 0, 0.1)
    lines = cells(tmp_path, 0.0, "model.width")
    assert [line["model.width"] for line in lines.values()] == ["32", "64"]
    assert {line["loss"] for line in lines.values()} == {"0.0537"}  # 0.5 · 0.8¹⁰
    assert "optimizer" not in lines["mlp-w32"]


@pytest.mark.parametrize("name", ["results.csv", "metrics.csv"])
def test_a_damaged_file_leaves_gaps(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "mlp", digits())
    write_run(tmp_path / "other", digits())
    (run / name).write_bytes(b"\xff\x00,nonsense\n\xfe")
    lines = cells(tmp_path, 0.0)
    column = "frozen" if name == "results.csv" else "accuracy"
    assert lines["mlp"][column] == MISSING != lines["other"][column]


def test_the_last_row_of_a_long_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{1 / (step + 1)}\n" for step in range(20_000)))
    assert os.path.getsize(path) > LAST_BYTES
    assert last_row(path) == {"step": "19999", "loss": str(1 / 20_000)}
    path.write_text("step,loss\n")
    assert last_row(path) == {}


def test_columns_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "mlp", digits())
    table = tabulate_runs(list_runs(tmp_path), ["model.width", "seed"], 0.0)
    for width in (10, 30, 50, 500):
        text = format_within(table, width)
        assert max(map(len, text.splitlines())) <= max(width, len("run  state"))
    assert text.splitlines()[0].split()[:4] == ["run", "state", "model.width", "seed"]
