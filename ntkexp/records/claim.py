"""claims/<name>-<digest>/: verdict.json, what was found of a claim, and picture.json, what stands below its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, read_sealed, sealed_text, write_atomically
from ntkexp.records.folder import results_version
from ntkexp.records.results import Seconds, read_timings

# --- claims/<name>-<digest>/verdict.json: what was found of a claim, each time the same bytes.
#
# {"name": …, "digest": …, "size": …, "statement": …, "source": …, "refutes": …, "command": …,
#  "looks": {"main": {"verdict": …, "figure": …, "interval": [LOW, HIGH], "p": …, "more_seeds": …, "expected": …,
#                     "seeds": […], "draws": …, "note": …}, "control": …, "second": …}, "seal": of all this}
#
# Of several parts that are expected the one whose figure is given, which decides, stands first.


VERDICT, PICTURE, TIMINGS = "verdict.json", "picture.svg", "timings.csv"
NOT_REPLICATED = "not replicated"
WHOLE = "runs"
"""The part of the timings that is of all runs; looks have theirs, by their names."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one look at a claim came to."""

    verdict: str
    figure: float
    low: float
    high: float
    p: float | None
    more_seeds: int | None
    expected: str
    seeds: tuple[int, ...]
    draws: str
    note: str

    @property
    def fields(self) -> dict[str, Json]:
        fields: dict[str, Json] = {
            "verdict": self.verdict,
            "figure": self.figure,
            "interval": [self.low, self.high],
        }
        fields |= {
            "p": self.p,
            "more_seeds": self.more_seeds,
            "expected": self.expected,
            "seeds": list(self.seeds),
        }
        return fields | {"draws": self.draws, "note": self.note}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Judgement:
        """Read it; a number that JSON could not write is NaN."""
        numbers = (fields["figure"], *fields["interval"])
        figure, low, high = (math.nan if number is None else float(number) for number in numbers)
        rest = {
            key: fields[key] for key in ("verdict", "p", "more_seeds", "expected", "draws", "note")
        }
        return cls(
            figure=figure, low=low, high=high, seeds=tuple(map(int, fields["seeds"])), **rest
        )


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A claim that was judged."""

    path: Path
    name: str
    digest: str
    size: str
    statement: str
    source: str
    refutes: str
    command: str
    looks: Mapping[str, Judgement]

    @property
    def cpu_minutes(self) -> float:
        """The minutes that one core alone takes for its runs; NaN where they were not counted."""
        return self.minutes_of(WHOLE)

    def minutes_of(self, part: str) -> float:
        """The same for the runs of a look."""
        return read_timings(self.path / TIMINGS).get(part, Seconds(math.nan)).processor / 60

    @property
    def main(self) -> Judgement:
        return self.looks["main"]

    @property
    def verdict(self) -> str:
        """The verdict of the pair: what the claim's own look found, which supports it only if the second look does."""
        return pair_verdict(self.main.verdict, self.looks["second"].verdict)

    @property
    def p(self) -> float | None:
        """The p of the pair: the larger of two that both support it; None where chance has no part in either.

        It is 1 where nothing was decided.
        """
        if self.verdict not in {"supported", "refuted"}:
            return 1.0
        looks = [self.main, self.looks["second"]] if self.verdict == "supported" else [self.main]
        return max((look.p for look in looks if look.p is not None), default=None)

    @property
    def fields(self) -> dict[str, Json]:
        fields: dict[str, Json] = {"name": self.name, "digest": self.digest, "size": self.size}
        fields |= {
            "statement": self.statement,
            "source": self.source,
            "refutes": self.refutes,
            "command": self.command,
        }
        return fields | {"looks": {name: look.fields for name, look in self.looks.items()}}

    @property
    def json_fields(self) -> dict[str, Json]:
        """The claim as JSON shows it: the verdict of the pair, the figures of its own look, then all looks by name."""
        looks = {name: look.fields for name, look in self.looks.items()}
        about = {key: value for key, value in self.fields.items() if key != "looks"}
        return {
            **about,
            **self.main.fields,
            "verdict": self.verdict,
            **looks,
            "cpu_minutes": self.cpu_minutes,
        }


def pair_verdict(main: str, second: str) -> str:
    """The verdict of a claim by those of its own look and of the second.

    >>> pair_verdict("supported", "refuted"), pair_verdict("refuted", "supported")
    ('not replicated', 'refuted')
    """
    return NOT_REPLICATED if main == "supported" != second else main


def of_claim(path: Path, name: str) -> str:
    """What a file is sealed for in a claim's folder, whose name tells all that was said beforehand."""
    return f"{name} of {Path(os.path.abspath(path)).name} by {results_version}"


def write_claim(claim: ClaimRecord) -> None:
    write_atomically(claim.path / VERDICT, sealed_text(claim.fields, of_claim(claim.path, VERDICT)))


def read_claim_record(path: Path) -> ClaimRecord:
    fields = read_sealed(path / VERDICT, of_claim(path, VERDICT))
    try:
        looks = {str(name): Judgement.of_fields(look) for name, look in fields.pop("looks").items()}
        return ClaimRecord(path=path, looks=looks, **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Mistake(
            f"{path / VERDICT} is damaged: it does not tell of a claim ({type(error).__name__})"
        ) from error


def claim_records(folder: Path) -> list[ClaimRecord]:
    """Read the claims that were judged in a folder, by name: of each name and size the latest that can be read."""
    records: dict[tuple[str, str], ClaimRecord] = {}
    for file in sorted(
        folder.glob(f"*/{VERDICT}"), key=lambda file: (file.stat().st_mtime, file.parent.name)
    ):
        try:
            record = read_claim_record(file.parent)
        except Mistake:
            continue  # its command writes it again
        records[record.name, record.size] = record
    return [records[key] for key in sorted(records)]


# --- claims/<name>-<digest>/picture.json: what is said below the picture of a claim, and the table that belongs to
# it.
#
# {"caption": …, "columns": [NAME, …], "rows": [[NUMBER, WORD or null, …], …], "seal": of all this}    none: both
# are []


EXHIBIT = "picture.json"


@dataclass(frozen=True)
class Exhibit:
    """A picture is shown with these words and this table."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[float | str | None, ...], ...] = ()


def write_exhibit(folder: Path, exhibit: Exhibit) -> None:
    rows: Sequence[Sequence[float | str | None]] = exhibit.rows
    fields = {
        "caption": exhibit.caption,
        "columns": list(exhibit.columns),
        "rows": [list(row) for row in rows],
    }
    write_atomically(folder / EXHIBIT, sealed_text(fields, of_claim(folder, EXHIBIT)))


def read_exhibit(folder: Path) -> Exhibit:
    """Read it; one that is not there, or is damaged, says nothing."""
    try:
        fields = read_sealed(folder / EXHIBIT, of_claim(folder, EXHIBIT))
        rows = tuple(tuple(row) for row in fields["rows"])
        return Exhibit(str(fields["caption"]), tuple(map(str, fields["columns"])), rows)
    except (Mistake, KeyError, TypeError):
        return Exhibit()
