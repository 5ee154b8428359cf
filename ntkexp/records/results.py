"""The CSV files of a run: metrics.csv as it trains, results.csv with the ladder, timings.csv.

metrics.csv: one line per step, written as it happens and cut back to the checkpoint on resuming.

`mark` is the seal of the lines so far, for the checkpoint.

Floats are written with as many digits as tell them apart; a quantity that was not measured is an empty cell.

>>> format_cell(0.1), format_cell(3), format_cell(None), format_cell(float("nan"))
('0.1', '3', '', 'nan')

results.csv: the ladder of kernel machines, a row per machine and split.

    relative_error  ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all points and outputs of the split
    floor           what rounding alone explains of it
    max_error       max |f̂ − f_T|
    agreement       share of equal labels; empty for regression
    r2              of f̂ against f_T
    note            why a machine does not apply
    control         whether the machine knows nothing of the network

>>> row = Result("probe", "secant", "pieces=1", 4e-15, 1e-13, 1e-14, 1.0, 1.0)
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
"""The columns of metrics.csv that a second pass fills in, beside it."""


class MetricsWriter:
    """A writer appends rows to a CSV file; what was written before `keep_bytes` stays, None begins anew."""

    def __init__(self, path: Path, columns: Sequence[str], keep_bytes: int | None = None) -> None:
        self.sealing = Sealing() if keep_bytes is None else sealing_of(path, keep_bytes)
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
        self.rows.writerow({name: format_cell(value) for name, value in row.items()})
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()


def format_cell(value: float | int | str | None) -> str:
    """A value as the file holds it; `float` first, because numpy's floats name their type in `repr`."""
    if value is None:
        return ""
    return repr(float(value)) if isinstance(value, float) else as_cell(str(value))


def read_rows(path: Path) -> Iterator[dict[str, float | None]]:
    """The lines of metrics.csv as numbers, whatever was measured."""
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            yield {name: float(cell) if cell else None for name, cell in line.items()}


FOLLOWED = "followed"
"""The detail of a row that is of a training loop that was followed, and no run's."""

SPLITS = ("train", "probe", "test")
AT_POINTS = re.compile(r"at (\d{1,9}) of (\d{1,9}) points")


def at_points(few: int, whole: int) -> str:
    """What the note of a row says that was not measured at all points."""
    return f"at {few} of {whole} points"


ROUNDED = 100  # eps: of the outputs that a sum over a path is compared with


def rounding_floor(size: float, moved: float, eps: float, beside: float = 0.0) -> float | None:
    """Return the relative error that rounding explains: 100 eps · size / ‖f_T − f_0‖.

    `beside` is an error that was measured apart, such as the effect of casts. The floor is None if nothing moved.

    >>> rounding_floor(2.0, 0.5, 1e-16)
    4e-14
    """
    return (ROUNDED * eps * size + beside) / moved if moved else None


@dataclass(frozen=True)
class Result:
    """One machine reproduces the trained network so well on one split."""

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
        """The number of points at which the row was measured, of how many, if not at all of them, as its note says.

        >>> Result("probe", "secant", note=f"decay; {at_points(22, 128)}").points
        (22, 128)
        """
        counts = next(filter(None, map(AT_POINTS.fullmatch, self.note.split("; "))), None)
        return (int(counts[1]), int(counts[2])) if counts else None

    @property
    def remark(self) -> str:
        """The note without that.

        >>> Result("probe", "secant", note=f"decay; {at_points(22, 128)}").remark
        'decay'
        """
        return "; ".join(part for part in self.note.split("; ") if not AT_POINTS.fullmatch(part))

    @property
    def tolerance(self) -> float:
        """The largest relative error that still counts as exact."""
        return max(1e-12, self.floor or 0.0)

    @property
    def exact(self) -> bool:
        """Whether rounding explains the error."""
        return self.relative_error is not None and self.relative_error <= self.tolerance


COLUMNS = tuple(field.name for field in fields(Result))
NUMBER_COLUMNS = tuple(field.name for field in fields(Result) if field.type == "float | None")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[float | int | str | None]]) -> str:
    """Write rows under their headings, with every digit."""
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
                raise Mistake(f"{path} is damaged: its columns are not {', '.join(COLUMNS)}")
            return tuple(read_row(row) for row in rows)
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise (
            error
            if isinstance(error, Mistake)
            else Mistake(f"{path} is damaged: {first_line(error)}")
        ) from error


def read_row(row: Mapping[str, str]) -> Result:
    from ntkexp.records.schema import ResultRow, checked_row  # noqa: PLC0415  pydantic is slow to import

    cells = {**row} | {name: of_cell(row[name]) for name in ("split", "machine", "detail", "note")}
    return Result(**checked_row(cells, ResultRow).model_dump())


# --- timings.csv: the seconds of each part of a run, `what,seconds,processor`; machines of the ladder are
# `machine.NAME`.
#
# `seconds` passed on the wall, and `processor` are those of the work itself: empty where they were not counted, as
# in files that are older than the column. What a run took before it was resumed is its part `earlier`.


MACHINE = "machine."


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU seconds of one part; CPU seconds are NaN where they were not counted."""

    wall: float
    processor: float = math.nan

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.processor + other.processor)


def write_timings(path: Path, parts: Mapping[str, Seconds]) -> None:
    lines = ["what,seconds,processor\n"]
    for what, seconds in parts.items():
        lines.append(
            f"{what},{seconds.wall:.6f},{'' if math.isnan(seconds.processor) else f'{seconds.processor:.6f}'}\n"
        )
    write_atomically(path, "".join(lines))


def read_timings(path: Path) -> dict[str, Seconds]:
    """Read what each part took; nothing where the clock was not kept."""
    if not path.is_file():
        return {}
    from ntkexp.records.schema import LARGEST_TABLE, TimingRow, checked_row  # noqa: PLC0415  pydantic is slow to import

    try:
        refuse_special(path, str(path), LARGEST_TABLE)
        with path.open(encoding="utf-8", newline="") as file:
            rows = [checked_row(row, TimingRow) for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        raise (
            error
            if isinstance(error, Mistake)
            else Mistake(f"{path} is damaged: {first_line(error)}")
        ) from error
    unknown = math.nan
    return {
        row.what: Seconds(row.seconds, unknown if row.processor is None else row.processor)
        for row in rows
    }


def total_seconds(path: Path) -> Seconds:
    """Add up what all parts took; machines of the ladder are in them already."""
    parts = [
        total_seconds
        for what, total_seconds in read_timings(path).items()
        if not what.startswith(MACHINE)
    ]
    return sum(parts, start=Seconds(0.0, 0.0)) if parts else Seconds(math.nan)


def of_machines(parts: Mapping[str, Seconds]) -> dict[str, float]:
    """Take the seconds of the ladder, by machine.

    >>> of_machines({"run": Seconds(2.0), "machine.left": Seconds(0.5)})
    {'left': 0.5}
    """
    return {
        what.removeprefix(MACHINE): seconds.wall
        for what, seconds in parts.items()
        if what.startswith(MACHINE)
    }
