"""Laws of metrics.csv: numbers survive, and a resumed file is the undisturbed one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.records.atomic import sealed
from ntkexp.records.results import MetricsWriter, cell

COLUMNS = ("step", "loss", "drift")


def rows(start: int, end: int) -> list[dict[str, float | int | None]]:
    return [{"step": s, "loss": 1 / (s + 3), "drift": 0.1 if s == 2 else None} for s in range(start, end)]


def append(path: Path, start: int, end: int, keep_bytes: int | None) -> int:
    with MetricsWriter(path, COLUMNS, keep_bytes) as metrics:
        for row in rows(start, end):
            metrics.write(row)
        return metrics.mark[0]


@given(st.floats())
def test_a_float_survives(number: float) -> None:
    read = float(cell(number))
    assert read == number or (math.isnan(read) and math.isnan(number))


def test_numpy_numbers_are_plain_numbers() -> None:
    assert [cell(np.float64(0.5)), cell(int(np.int64(3)))] == ["0.5", "3"]


def test_what_is_missing_is_empty(tmp_path: Path) -> None:
    append(tmp_path / "m.csv", 0, 1, None)
    assert (tmp_path / "m.csv").read_text() == "step,loss,drift\n0,0.3333333333333333,\n"


def test_a_resumed_file_is_the_undisturbed_one(tmp_path: Path) -> None:
    append(tmp_path / "whole.csv", 0, 9, None)
    position = append(tmp_path / "resumed.csv", 0, 4, None)
    append(tmp_path / "resumed.csv", 4, 6, position)
    with (tmp_path / "resumed.csv").open("a") as file:
        file.write("6,0.1")  # a line cut short by a kill
    append(tmp_path / "resumed.csv", 4, 9, position)
    assert (tmp_path / "resumed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_line_is_in_the_file_once_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.csv", COLUMNS) as metrics:
        metrics.write({"step": 7})
        assert (tmp_path / "m.csv").read_text().splitlines()[1] == "7,,"


def test_the_seal_is_that_of_the_lines_however_often_the_file_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    append(path, 4, 9, append(path, 0, 4, None))
    with MetricsWriter(path, COLUMNS, path.stat().st_size) as metrics:
        assert sealed(tmp_path, ["m.csv"]) == {"m.csv": metrics.mark}


def test_an_unknown_column_is_an_error(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.csv", COLUMNS) as metrics, pytest.raises(ValueError, match="accuracy"):
        metrics.write({"accuracy": 1.0})
