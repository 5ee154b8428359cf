"""metrics.csv: one line per step, written as it happens and cut back to the checkpoint on resuming.

`mark` is the seal of the lines so far, for the checkpoint.

Floats are written with as many digits as tell them apart; a quantity that was not measured is an empty cell.

>>> cell(0.1), cell(3), cell(None), cell(float("nan"))
('0.1', '3', '', 'nan')
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ntkexp.records.seal import Sealing, taken
from ntkexp.text import as_cell

RETRACED = "retraced.csv"
"""The columns of metrics.csv that a second pass fills in, beside it."""


class MetricsWriter:
    """A writer appends rows to a CSV file; what was written before `keep_bytes` stays, None begins anew."""

    def __init__(self, path: Path, columns: Sequence[str], keep_bytes: int | None = None) -> None:
        self.sealing = Sealing() if keep_bytes is None else taken(path, keep_bytes)
        if keep_bytes is None:
            path.unlink(missing_ok=True)  # a link that lies there is not followed
        self.file = path.open("xb" if keep_bytes is None else "ab")
        self.file.truncate(self.sealing.position)
        self.line = io.StringIO(newline="")
        self.rows = csv.DictWriter(self.line, columns, lineterminator="\n")
        if keep_bytes is None:
            self.rows.writeheader()
            self.flush()

    def write(self, row: Mapping[str, float | int | str | None]) -> None:
        """Write one line; columns that the row lacks stay empty."""
        self.rows.writerow({name: cell(value) for name, value in row.items()})
        self.flush()

    def flush(self) -> None:
        """What was written goes to the file: a kill loses at most the line that was being written."""
        content = self.line.getvalue().encode()
        self.sealing.take(content)
        self.file.write(content)
        self.file.flush()
        self.line.seek(0)
        self.line.truncate()

    @property
    def mark(self) -> tuple[int, str]:
        """How many bytes are in the file, for `keep_bytes`, and their seal."""
        return self.sealing.mark

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
    return repr(float(value)) if isinstance(value, float) else as_cell(str(value))
