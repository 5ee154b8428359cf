"""The journal: what was written can be read, whatever was cut off between."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ntkexp.sweep.plan import NAME, EventLog
from tests.torture.damage import HARMS


def test_the_last_event_counts(tmp_path: Path) -> None:
    journal = EventLog(tmp_path / "sweeps" / NAME, "width")
    assert journal.failures() == {}
    for name, event in (("a", "failed"), ("b", "failed"), ("a", "began"), ("c", "done")):
        journal.write(name, event, "too wide" * (event == "failed"))
    assert journal.failures() == {"b": "too wide"}
    assert EventLog(journal.path, "depth").failures() == {"b": "too wide"}
    assert journal.path.read_text().count("\n") == 4


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    journal = EventLog(tmp_path / NAME, "width")
    journal.write("a", "failed", "é")
    whole = journal.path.read_bytes()
    for length in range(1, len(whole)):
        journal.path.write_bytes(whole + whole[:length])
        journal.write("b", "failed", "too wide")
        assert journal.failures() == {"a": "é", "b": "too wide"}


@pytest.mark.parametrize("seed", range(20))
def test_a_line_that_was_damaged_says_nothing(tmp_path: Path, seed: int) -> None:
    """A failure that is told was one; one that is not told is tried again."""
    journal, luck = EventLog(tmp_path / NAME, "width"), Random(seed)
    for name in "abc":
        journal.write(name, "failed", f"too wide for {name}")
    content = journal.path.read_bytes()
    journal.path.write_bytes(luck.choice(HARMS)(luck, content, b"[1]\n{}\nnull\n"))
    assert journal.failures().items() <= {run: f"too wide for {run}" for run in "abc"}.items()
