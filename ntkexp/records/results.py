"""The CSV files of a run: metrics.csv, results.csv and timings.csv.

metrics.csv has one line per step, which is written during the step. The checkpoint
contains the length and the seal of the file. When a run is resumed, the file is cut
back to this length. Floats have enough digits to be read back exactly. If a quantity
was not measured, its cell is empty.

>>> format_cell(0.1), format_cell(3), format_cell(None), format_cell(float("nan"))
('0.1', '3', '', 'nan')

results.csv compares the outputs f̂ of kernel machines with the outputs f_T of the
trained network. It has one row per kernel machine and split.

    relative_error  ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all queries and outputs of the split
    floor           the bound on the relative rounding error
    max_error       max |f̂ − f_T|
    agreement       fraction of equal predicted labels; empty for regression, and if an output
                    is not finite
    r2              R² of f̂ against f_T
    note            remarks, such as the reason why the kernel machine does not apply
    control         True if the kernel machine is independent of the network

>>> row = Result("query", "secant", "substeps=1", 4e-15, 1e-13, 1e-14, 1.0, 1.0)
>>> row.exact
True
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from ntkexp.mistake import Mistake, first_line, refuse_special
from ntkexp.records.atomic import Sealing, sealing_of, write_atomically
from ntkexp.text import as_cell, of_cell

RETRACED = "retraced.csv"
"""The file with the columns of metrics that only a backward pass computes."""


class MetricsWriter:
    """A writer that appends rows to a CSV file.

    It keeps the first `keep_bytes` bytes of an existing file. If `keep_bytes` is None,
    it starts a new file."""

    def __init__(
        self, path: Path, columns: Sequence[str], keep_bytes: int | None = None
    ) -> None:
        self.sealing = Sealing() if keep_bytes is None else sealing_of(path, keep_bytes)
        if keep_bytes is None:
            # remove the file first, so that a link at this path is not followed
            path.unlink(missing_ok=True)
        self.file = path.open("xb" if keep_bytes is None else "ab")
        self.file.truncate(self.sealing.position)
        self.line = io.StringIO(newline="")
        self.rows = csv.DictWriter(self.line, columns, lineterminator="\n")
        if keep_bytes is None:
            self.rows.writeheader()
            self.flush()

    def write(self, row: Mapping[str, float | int | str | None]) -> None:
        """Write one line. Cells of missing columns are empty."""
        self.rows.writerow({name: format_cell(value) for name, value in row.items()})
        self.flush()

    def flush(self) -> None:
        """Write the buffered lines to the file.
        A kill loses at most the current line."""
        content = self.line.getvalue().encode()
        self.sealing.update(content)
        self.file.write(content)
        self.file.flush()
        self.line.seek(0)
        self.line.truncate()

    @property
    def size_and_digest(self) -> tuple[int, str]:
        """The number of bytes in the file, and their digest (seal). A resumed run
        passes this number as `keep_bytes`."""
        return self.sealing.size_and_digest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()


def format_cell(value: float | int | str | None) -> str:
    """Return the text of a value in a CSV cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(float(value))  # the `repr` of NumPy's floats contains their type
    return as_cell(str(value))


def read_rows(path: Path) -> Iterator[dict[str, float | None]]:
    """Yield the rows of metrics.csv. Empty cells are None."""
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            yield {name: float(cell) if cell else None for name, cell in line.items()}


FOLLOWED = "followed"
"""The value of the column `detail` in rows of a followed loop."""

SPLITS = ("train", "query", "test")
AT_POINTS = re.compile(r"at (\d{1,9}) of (\d{1,9}) points")


def at_points(measured: int, points: int) -> str:
    """Return a note on a row whose error was measured at `measured` of all points."""
    return f"at {measured} of {points} points"


# bound on the relative rounding error of a sum over a path, in machine epsilons
FLOOR_EPS = 100


def rounding_floor(
    size: float, change: float, eps: float, measured: float = 0.0
) -> float | None:
    """Return the bound (100 eps · size + measured) / change
    on the relative rounding error.

    `change` is ‖f_T − f_0‖, and `size` is the norm of the terms that add up to the
    outputs. `measured` is a rounding error that was measured separately, such as the
    effect of casts. Return None if the outputs did not change.

    >>> rounding_floor(2.0, 0.5, 1e-16)
    4e-14
    """
    return (FLOOR_EPS * eps * size + measured) / change if change else None


@dataclass(frozen=True)
class Result:
    """A row of results.csv: the error of one kernel machine on one split."""

    split: str
    machine: str
    detail: str = ""
    relative_error: float | None = None
    floor: float | None = None
    max_error: float | None = None
    agreement: float | None = None
    r2: float | None = None
    note: str = ""
    control: bool = False

    @property
    def points(self) -> tuple[int, int] | None:
        """The number of measured points and of all points,
        or None if all points were measured.

        >>> Result("query", "secant", note=f"decay; {at_points(22, 128)}").points
        (22, 128)
        """
        counts = next(
            filter(None, map(AT_POINTS.fullmatch, self.note.split("; "))), None
        )
        return (int(counts[1]), int(counts[2])) if counts else None

    @property
    def remark(self) -> str:
        """The note without the number of points.

        >>> Result("query", "secant", note=f"decay; {at_points(22, 128)}").remark
        'decay'
        """
        return "; ".join(
            part for part in self.note.split("; ") if not AT_POINTS.fullmatch(part)
        )

    @property
    def tolerance(self) -> float:
        """The largest relative error that counts as exact:
        the floor, but at least 1e-12."""
        return max(1e-12, self.floor or 0.0)

    @property
    def exact(self) -> bool:
        """True if the error is within the bound on the rounding error."""
        return self.relative_error is not None and self.relative_error <= self.tolerance


COLUMNS = tuple(field.name for field in fields(Result))
NUMBER_COLUMNS = tuple(
    field.name for field in fields(Result) if field.type == "float | None"
)


def csv_text(
    header: Sequence[str], rows: Iterable[Sequence[float | int | str | None]]
) -> str:
    """Return the CSV text of a header and rows. Floats have all digits."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([format_cell(value) for value in row] for row in (header, *rows))
    return text.getvalue()


def write_results(path: Path, results: Iterable[Result]) -> None:
    write_atomically(path, csv_text(COLUMNS, map(astuple, results)))


def read_results(path: Path) -> tuple[Result, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, restval=None, strict=True)
            if tuple(rows.fieldnames or ()) != COLUMNS:
                raise Mistake(
                    f"{path} is damaged: its columns are not {', '.join(COLUMNS)}"
                )
            return tuple(read_row(row) for row in rows)
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror})") from error
    except Mistake:
        raise
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise Mistake(f"{path} is damaged: {first_line(error)}") from error


def read_row(row: Mapping[str, str]) -> Result:
    from ntkexp.records.schema import ResultRow, checked_row  # noqa: PLC0415  pydantic is slow to import

    cells = {**row} | {
        name: of_cell(row[name]) for name in ("split", "machine", "detail", "note")
    }
    return Result(**checked_row(cells, ResultRow).model_dump())


# --- timings.csv: the time of each part of a run, in the columns
# `what,seconds,processor`.
#
# `seconds` is wall time. `processor` is CPU time in seconds, or empty if it was not
# measured. The parts `machine.NAME` are the kernel machines. The part `earlier` is the
# time before the run was resumed.


MACHINE = "machine."


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU seconds of one part. CPU seconds are NaN
    if they were not measured."""

    wall: float
    processor: float = math.nan

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.processor + other.processor)


def write_timings(path: Path, parts: Mapping[str, Seconds]) -> None:
    lines = ["what,seconds,processor\n"]
    for part, seconds in parts.items():
        processor = "" if math.isnan(seconds.processor) else f"{seconds.processor:.6f}"
        lines.append(f"{part},{seconds.wall:.6f},{processor}\n")
    write_atomically(path, "".join(lines))


def read_timings(path: Path) -> dict[str, Seconds]:
    """Read the time of each part. Return an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    from ntkexp.records.schema import LARGEST_TABLE, TimingRow, checked_row  # noqa: PLC0415  pydantic is slow to import

    try:
        refuse_special(path, str(path), LARGEST_TABLE)
        with path.open(encoding="utf-8", newline="") as file:
            rows = [checked_row(row, TimingRow) for row in csv.DictReader(file)]
    except Mistake:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise Mistake(f"{path} is damaged: {first_line(error)}") from error
    return {
        row.what: Seconds(
            row.seconds, math.nan if row.processor is None else row.processor
        )
        for row in rows
    }


def total_seconds(path: Path) -> Seconds:
    """Return the total time. It does not include kernel machines, because other parts
    contain their time."""
    parts = [
        seconds
        for part, seconds in read_timings(path).items()
        if not part.startswith(MACHINE)
    ]
    return sum(parts, start=Seconds(0.0, 0.0)) if parts else Seconds(math.nan)


def of_machines(parts: Mapping[str, Seconds]) -> dict[str, float]:
    """Return the wall seconds of each kernel machine.

    >>> of_machines({"run": Seconds(2.0), "machine.left": Seconds(0.5)})
    {'left': 0.5}
    """
    return {
        part.removeprefix(MACHINE): seconds.wall
        for part, seconds in parts.items()
        if part.startswith(MACHINE)
    }
