"""metrics.csv: one line per step, written as it happens and cut back to the checkpoint on resuming.

Floats are written with as many digits as tell them apart; a quantity that was not measured is an empty cell.

>>> cell(0.1), cell(3), cell(None), cell(float("nan"))
('0.1', '3', '', 'nan')
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ntkexp.mistake import Mistake

RETRACED = "retraced.csv"
"""The columns of metrics.csv that a second pass fills in, beside it."""


class MetricsWriter:
    """Appends rows to a CSV file; what was written before `keep_bytes` stays, None begins anew."""

    def __init__(self, path: Path, columns: Sequence[str], keep_bytes: int | None = None) -> None:
        if keep_bytes is not None:
            cut(path, keep_bytes)
        # line buffered: a kill loses at most the line that was being written
        self.file = path.open("w" if keep_bytes is None else "a", buffering=1, encoding="utf-8", newline="")
        self.rows = csv.DictWriter(self.file, columns, lineterminator="\n")
        if keep_bytes is None:
            self.rows.writeheader()

    def write(self, row: Mapping[str, float | int | str | None]) -> None:
        """One line; columns that the row lacks stay empty."""
        self.rows.writerow({name: cell(value) for name, value in row.items()})

    @property
    def position(self) -> int:
        """How many bytes are in the file, for `keep_bytes`."""
        self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close()


def cell(value: float | int | str | None) -> str:
    """A value as the file holds it; `float` first, because numpy's floats name their type in `repr`."""
    if value is None:
        return ""
    return repr(float(value)) if isinstance(value, float) else str(value)


def cut(path: Path, keep_bytes: int) -> None:
    """Forget what was written after a checkpoint."""
    size = path.stat().st_size if path.is_file() else 0
    if size < keep_bytes:
        raise Mistake(f"{path} has {size} bytes, but its checkpoint was made at {keep_bytes}; start again with --force")
    os.truncate(path, keep_bytes)
