"""`ntkexp report`: finished runs side by side, without torch."""

# ruff: noqa: PLC0415  what is slow to import waits until it is needed

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    import pandas as pd


def report(folders: Sequence[Path], form: str, out: Path | None) -> None:
    """One table; folders that cannot be read are named together."""
    from ntkexp.report.run import load_runs
    from ntkexp.report.table import combined

    runs, mistakes = load_runs(folder.expanduser() for folder in folders)
    left_out = "; ".join(str(mistake) for mistake in mistakes)
    if not runs:
        raise Mistake(f"nothing is left to report: {left_out}")
    if mistakes:
        sys.stderr.write(f"ntkexp: left out: {left_out}\n")
    text = WRITTEN[form](combined(runs))
    if out is None:
        sys.stdout.write(text)
    else:
        save(text, out.expanduser())


def save(text: str, out: Path) -> None:
    """A file of the user's choice."""
    try:
        out.write_text(text, encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--out={out}: {error.strerror}; it takes the name of a file in a folder that exists") from None


def as_text(table: pd.DataFrame) -> str:
    """Columns aligned for a reader."""
    from ntkexp.report.table import to_text

    return to_text(table).rstrip("\n") + "\n"


def as_csv(table: pd.DataFrame) -> str:
    """Every digit, comma-separated."""
    return str(table.to_csv(index=False))


def as_json(table: pd.DataFrame) -> str:
    """A list with an object per run."""
    from ntkexp.records.json_file import to_text

    return to_text([{str(name): value for name, value in row.items()} for row in table.to_dict("records")])


WRITTEN = {"text": as_text, "csv": as_csv, "json": as_json}
