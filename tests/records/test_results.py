"""Laws of results.csv."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.mistake import Mistake
from ntkexp.records.results import COLUMNS, Result, read_results, write_results

NUMBER = st.none() | st.floats(allow_nan=False)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)  # csv reads \r as \n
RESULTS = st.lists(
    st.builds(Result, WORD, WORD, WORD, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, WORD, st.booleans()), max_size=4
)


@given(results=RESULTS)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, results: list[Result]) -> None:
    path = tmp_path_factory.mktemp("results") / "results.csv"
    write_results(path, results)
    assert list(read_results(path)) == results


def test_the_columns_are_a_promise(tmp_path: Path) -> None:
    write_results(tmp_path / "r.csv", [Result("probe", "left", "", 0.1, 1e-13, 0.2, None, 0.9)])
    assert (tmp_path / "r.csv").read_text() == (
        "split,machine,detail,relative_error,floor,max_error,agreement,r2,note,control\n"
        "probe,left,,0.1,1e-13,0.2,,0.9,,False\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "floor", "exact"),
    [(1e-13, None, True), (1e-11, 1e-13, False), (1e-6, 1e-5, True), (None, 1.0, False), (float("nan"), 1.0, False)],
)
def test_exact_means_no_worse_than_rounding(error: float | None, floor: float | None, exact: bool) -> None:
    assert Result("test", "secant", relative_error=error, floor=floor).exact is exact


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", ",".join(COLUMNS) + "\nx,y,,word,,,,,,False\n", ",".join(COLUMNS) + "\nx,y,,,,,,,,maybe\n"],
)
def test_a_damaged_table_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(Mistake, match=r"^[^\n]*results\.csv[^\n]*$"):
        read_results(tmp_path / "results.csv")
