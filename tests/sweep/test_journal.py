"""The journal: what was written can be read, whatever was cut off between."""

from __future__ import annotations

from pathlib import Path

from ntkexp.sweep.journal import NAME, Journal


def test_the_last_event_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "sweeps" / NAME, "width")
    assert journal.failures() == {}
    for run, event in (("a", "failed"), ("b", "failed"), ("a", "began"), ("c", "done")):
        journal.write(run, event, "too wide" * (event == "failed"))
    assert journal.failures() == {"b": "too wide"}
    assert Journal(journal.path, "depth").failures() == {"b": "too wide"}
    assert journal.path.read_text().count("\n") == 4


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / NAME, "width")
    journal.write("a", "failed", "é")
    whole = journal.path.read_bytes()
    for length in range(1, len(whole)):
        journal.path.write_bytes(whole + whole[:length])
        journal.write("b", "failed", "too wide")
        assert journal.failures() == {"a": "é", "b": "too wide"}
