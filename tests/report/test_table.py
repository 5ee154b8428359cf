"""Tables are aligned, whatever is in them."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.records.results import Result
from ntkexp.report.run import combined, load_tables
from ntkexp.report.sentence import format_ladder
from ntkexp.report.tables import format_text, of_frame
from ntkexp.text import aligned, short

WORD = st.text("abc μ", min_size=1, max_size=9).map(str.strip).filter(bool)


@given(st.lists(st.tuples(WORD, WORD), max_size=5))
def test_columns_begin_and_end_together(rows: list[tuple[str, str]]) -> None:
    lines = aligned(("name", "number"), rows, (False, True)).split("\n")
    assert len({len(line) for line in lines}) == 1
    for line, (name, number) in zip(lines[1:], rows, strict=True):
        assert line.startswith(name)
        assert line.endswith("  " + number)


@given(st.floats(-1e300, 1e300))
def test_short_numbers_are_near(number: float) -> None:
    # half a unit of the only digit is 50 % of 1 at most; a number below the least normal one has no digits to keep
    assert float(short(number)) == pytest.approx(number, rel=0.5, abs=3e-308)


@given(st.floats(1e-3, 9999))
def test_ordinary_numbers_keep_three_digits(number: float) -> None:
    assert float(short(number)) == pytest.approx(number, rel=0.0051)


def ladder() -> list[Result]:
    rows = product(("train", "probe", "test"), ("secant", "left"))
    errors = {"secant": 4e-15, "left": 0.12}
    found = [
        Result(split, name, "n=1" if name == "secant" else "", errors[name], agreement=1.0) for split, name in rows
    ]
    return [*found, *(Result(split, "nngp", note="no limit") for split in ("train", "probe", "test"))]


def test_the_ladder_has_a_line_per_machine_and_notes_below() -> None:
    assert format_ladder(ladder()) == "\n".join(
        [
            "machine  detail  train  probe   test  agreement (probe)  R²",
            "secant   n=1     4e-15  4e-15  4e-15                  1   –",
            "left              0.12   0.12   0.12                  1   –",
            "",
            "nngp: no limit",
        ]
    )


def test_seconds_stand_beside_it_when_they_are_known() -> None:
    header, secant, left, *_ = format_ladder(ladder(), {"secant": 1.5}).split("\n")
    assert header.split()[-1] == "seconds"
    assert (secant.split()[-1], left.split()[-1]) == ("1.5", "–")


@pytest.mark.parametrize("rows", [[], [Result("train", "secant", relative_error=math.nan)]])
def test_a_ladder_with_nothing_in_it_is_still_a_table(rows: list[Result]) -> None:
    assert len(format_ladder(rows).split("\n")) == 1 + len(rows)


def test_runs_side_by_side_name_what_differs(finished: dict[str, Path]) -> None:
    table = combined([load_tables(finished[name]) for name in ("two classes", "one step", "no probes")])
    assert list(table["steps"]) == [60, 1, 60]
    assert list(table["split"]) == ["probe", "probe", "test"]
    assert "seed" not in table
    assert "nngp" not in table
    assert (table["secant"] < 1e-12).all()
    assert len(format_text(of_frame(table)).split("\n")) == 4


def test_one_run_alone_differs_in_nothing(finished: dict[str, Path]) -> None:
    table = combined([load_tables(finished["two classes"])])
    assert list(table.columns)[:3] == ["run", "split", "secant"]
