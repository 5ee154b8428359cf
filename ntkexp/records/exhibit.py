"""claims/<name>-<digest>/picture.json: what is said below the picture of a claim, and the table that belongs to it.

{"caption": …, "columns": [NAME, …], "rows": [[NUMBER, WORD or null, …], …], "seal": of all this}    none: both are []
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.claim import of_claim
from ntkexp.records.seal import read_sealed, sealed_text

EXHIBIT = "picture.json"


@dataclass(frozen=True)
class Exhibit:
    """A picture is shown with these words and this table."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[float | str | None, ...], ...] = ()


def write_exhibit(folder: Path, exhibit: Exhibit) -> None:
    """Write it whole, or not at all."""
    rows: Sequence[Sequence[float | str | None]] = exhibit.rows
    fields = {"caption": exhibit.caption, "columns": list(exhibit.columns), "rows": [list(row) for row in rows]}
    write_atomically(folder / EXHIBIT, sealed_text(fields, of_claim(folder, EXHIBIT)))


def read_exhibit(folder: Path) -> Exhibit:
    """Read it; one that is not there, or is damaged, says nothing."""
    try:
        found = read_sealed(folder / EXHIBIT, of_claim(folder, EXHIBIT))
        rows = tuple(tuple(row) for row in found["rows"])
        return Exhibit(str(found["caption"]), tuple(map(str, found["columns"])), rows)
    except (Mistake, KeyError, TypeError):
        return Exhibit()
