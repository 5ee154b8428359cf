"""results.csv: the ladder of kernel machines, a row per machine and split.

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
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.metrics import cell
from ntkexp.text import of_cell

FOLLOWED = "followed"
"""The detail of a row that is of a training loop that was followed, and no run's."""

SPLITS = ("train", "probe", "test")
AT_POINTS = re.compile(r"at (\d+) of (\d+) points")


def at_points(few: int, whole: int) -> str:
    """What the note of a row says that was not measured at all points."""
    return f"at {few} of {whole} points"


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
        found = next(filter(None, map(AT_POINTS.fullmatch, self.note.split("; "))), None)
        return (int(found[1]), int(found[2])) if found else None

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


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write the whole table, or nothing."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    rows.writerows([cell(value) for value in astuple(result)] for result in results)
    write_atomically(path, text.getvalue())


def read_results(path: Path) -> tuple[Result, ...]:
    """The table as it was written."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, restval=None, strict=True)
            if tuple(rows.fieldnames or ()) != COLUMNS:
                raise Mistake(f"{path} is damaged: its columns are not {', '.join(COLUMNS)}")
            return tuple(parse(row) for row in rows)
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise error if isinstance(error, Mistake) else Mistake(f"{path} is damaged: {error}") from error


def parse(row: Mapping[str, str]) -> Result:
    """Read one line of the file."""
    return Result(
        split=of_cell(row["split"]),
        machine=of_cell(row["machine"]),
        detail=of_cell(row["detail"]),
        relative_error=number(row["relative_error"]),
        floor=number(row["floor"]),
        max_error=number(row["max_error"]),
        agreement=number(row["agreement"]),
        r2=number(row["r2"]),
        note=of_cell(row["note"]),
        control=flag(row["control"]),
    )


def flag(text: str) -> bool:
    """A cell that says yes or no."""
    return {"True": True, "False": False}[text]


def number(text: str) -> float | None:
    """Read a cell's number; an empty cell has none."""
    return float(text) if text else None
