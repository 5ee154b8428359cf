"""The page on following cannot lie about the bugs that the tests plant."""

from __future__ import annotations

from tests.docs.follow import PAGE, page, table


def test_the_table_is_as_it_would_be_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.docs.follow`"


def test_it_holds_twenty_bugs_and_says_of_each_what_is_wrong() -> None:
    rows = [line.split("|")[1].strip() for line in table().splitlines()[2:]]
    assert len(set(rows)) == len(rows) >= 20
    assert all(row.endswith(".") for row in rows)
