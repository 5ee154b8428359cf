"""The files of a claim's folder: verdict.json contains the verdict, and picture.json
the caption of the picture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import (
    Json,
    finite_json,
    read_sealed,
    sealed_text,
    write_atomically,
)
from ntkexp.records.folder import results_version
from ntkexp.records.results import Seconds, read_timings

# --- claims/<name>-<digest>/verdict.json: the verdict on a claim.
# It is byte-identical each time.
#
# {"name": …, "digest": …, "size": …, "statement": …, "source": …, "refutes": …,
# "command": …,
#  "identity": true or false,
#  "looks": {"main": {"verdict": …, "figure": …, "interval": [LOW, HIGH], "p": …, "more_seeds": …,
#                     "expected": …, "seeds": […], "draws": …, "note": …},
#            "control": …, "second": …},
#  "seal": the seal of all other keys}
#
# A claim without a control has no key "control".
#
# A look is a test of the claim. If a look tests several expectations, `figure` is the
# estimate for the expectation that decides the verdict.


VERDICT, PICTURE, TIMINGS = "verdict.json", "picture.svg", "timings.csv"
NOT_REPLICATED = "not replicated"
BELOW_MINIMUM = "below minimum"
"""The verdict on an effect whose direction is significant, and whose size is
significantly below the stated minimum."""
DECIDED = ("supported", "refuted", BELOW_MINIMUM)
"""The verdicts that need the agreement of two looks. Holm's correction for several
claims may withdraw such a verdict."""
EXACT = "exact"
"""The word for a claim that is exact by construction (an identity), if both looks
confirm the claim."""
WHOLE = "runs"
"""The part of timings.csv that covers all runs.
The other parts are named after looks."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of one statistical test (look) of a claim."""

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
        return {
            "verdict": self.verdict,
            "figure": self.figure,
            "interval": [self.low, self.high],
            "p": self.p,
            "more_seeds": self.more_seeds,
            "expected": self.expected,
            "seeds": list(self.seeds),
            "draws": self.draws,
            "note": self.note,
        }

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Judgement:
        """Return a judgement from its JSON fields. Null becomes NaN."""
        low, high = fields["interval"]
        return cls(
            verdict=fields["verdict"],
            figure=number_of(fields["figure"]),
            low=number_of(low),
            high=number_of(high),
            p=fields["p"],
            more_seeds=fields["more_seeds"],
            expected=fields["expected"],
            seeds=tuple(map(int, fields["seeds"])),
            draws=fields["draws"],
            note=fields["note"],
        )


def number_of(value: float | None) -> float:
    """Return a number from JSON, or NaN for null."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A claim with the results of its statistical tests (looks)."""

    path: Path
    name: str
    digest: str
    size: str
    statement: str
    source: str
    refutes: str
    command: str
    looks: Mapping[str, Judgement]
    identity: bool = False

    @property
    def cpu_minutes(self) -> float:
        """The CPU minutes of all runs, or NaN if they were not measured."""
        return self.minutes_of(WHOLE)

    def minutes_of(self, part: str) -> float:
        """Return the CPU minutes of the runs of one look,
        or of all runs if `part` is `WHOLE`."""
        return (
            read_timings(self.path / TIMINGS).get(part, Seconds(math.nan)).processor
            / 60
        )

    @property
    def main(self) -> Judgement:
        return self.looks["main"]

    @property
    def verdict(self) -> str:
        """The verdict from the main and the second look (see `pair_verdict`)."""
        return pair_verdict(self.main.verdict, self.looks["second"].verdict)

    @property
    def p(self) -> float | None:
        """The p-value of the verdict: the larger p-value of the main
        and the second look.

        The value is None if both looks are deterministic, and 1 if the claim is
        undecided or not replicated."""
        if self.verdict not in DECIDED:
            return 1.0
        looks = (self.main, self.looks["second"])
        return max((look.p for look in looks if look.p is not None), default=None)

    @property
    def fields(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "digest": self.digest,
            "size": self.size,
            "statement": self.statement,
            "source": self.source,
            "refutes": self.refutes,
            "command": self.command,
            "identity": self.identity,
            "looks": {name: look.fields for name, look in self.looks.items()},
        }

    @property
    def looks_fields(self) -> dict[str, dict[str, Json]]:
        """The fields of each look, with null instead of NaN."""
        return {
            name: {key: finite_json(value) for key, value in look.fields.items()}
            for name, look in self.looks.items()
        }

    @property
    def json_fields(self) -> dict[str, Json]:
        """The fields for JSON: the fields of the claim, the fields of its main look,
        and all looks by name.

        `verdict` is the verdict from the main and the second look.
        """
        looks = {name: look.fields for name, look in self.looks.items()}
        about = {key: value for key, value in self.fields.items() if key != "looks"}
        return {
            **about,
            **self.main.fields,
            "verdict": self.verdict,
            **looks,
            "cpu_minutes": self.cpu_minutes,
        }


FIXED_POOL = ", for these "
"""The words that precede the pool of examples in `Judgement.draws`."""


def pool_of(draws: str) -> str:
    """Return the pool of examples for which a confidence interval holds. `draws` is a
    text about the random draws of each seed.

    >>> pool_of("each drawing data, for these 357 examples of digits")
    '357 examples of digits'
    >>> pool_of("each drawing data"), pool_of("")
    ('generated data', '')
    """
    if not draws:
        return ""
    return draws.partition(FIXED_POOL)[2] or "generated data"


def pair_verdict(main: str, second: str) -> str:
    """Return the verdict on a claim, given the verdicts on its main look
    and its second look.

    If both looks have the same verdict, or if the main look is not in `DECIDED`, return
    the verdict of the main look. If one look is `below minimum` and the other is
    `refuted`, return `refuted`. Otherwise return `not replicated`.

    (The reports of claims must not import `ntkexp.claim`, so this function is defined
    here.)

    >>> [pair_verdict(main, "supported") for main in ("supported", "refuted", "undecided")]
    ['supported', 'not replicated', 'undecided']
    >>> pair_verdict("below minimum", "refuted"), pair_verdict("refuted", "undecided")
    ('refuted', 'not replicated')
    """
    if main == second or main not in DECIDED:
        return main
    if {main, second} == {"refuted", BELOW_MINIMUM}:
        return "refuted"
    return NOT_REPLICATED


def of_claim(path: Path, name: str) -> str:
    """Return the text that identifies a claim's file. The digest (seal) of the file
    covers this text too. The text contains the name of the folder, which ends with the
    digest of the claim."""
    return f"{name} of {Path(os.path.abspath(path)).name} by {results_version}"


def write_claim(claim: ClaimRecord) -> None:
    write_atomically(
        claim.path / VERDICT, sealed_text(claim.fields, of_claim(claim.path, VERDICT))
    )


def read_claim_record(path: Path) -> ClaimRecord:
    fields = read_sealed(path / VERDICT, of_claim(path, VERDICT))
    try:
        looks = {
            str(name): Judgement.of_fields(look)
            for name, look in fields.pop("looks").items()
        }
        return ClaimRecord(path=path, looks=looks, **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Mistake(
            f"{path / VERDICT} is damaged: it does not describe a claim ({type(error).__name__})"
        ) from error


def claim_records(
    folder: Path, is_wanted: Callable[[ClaimRecord], bool] = lambda record: True
) -> list[ClaimRecord]:
    """Read the judged claims in a folder. For each name and size, return the latest
    wanted record that can be read.

    The times of files may be wrong, for example after a copy. So `is_wanted` should
    choose the version of each claim, if it is known."""
    records: dict[tuple[str, str], ClaimRecord] = {}
    for file in sorted(
        folder.glob(f"*/{VERDICT}"),
        key=lambda file: (file.stat().st_mtime, file.parent.name),
    ):
        try:
            record = read_claim_record(file.parent)
        except Mistake:
            continue  # the command that judges the claim will write the record again
        if is_wanted(record):
            records[record.name, record.size] = record
    return [records[key] for key in sorted(records)]


# --- claims/<name>-<digest>/picture.json: the caption of a claim's picture,
# and the table below it.
#
# {"caption": …, "columns": [NAME, …], "rows": [[NUMBER, WORD or null, …], …],
# "seal": …}
#
# `columns` and `rows` are empty if there is no table.


EXHIBIT = "picture.json"


@dataclass(frozen=True)
class Exhibit:
    """The caption and the table of a picture."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[float | str | None, ...], ...] = ()


def write_exhibit(folder: Path, exhibit: Exhibit) -> None:
    fields: dict[str, Json] = {
        "caption": exhibit.caption,
        "columns": list(exhibit.columns),
        "rows": [list(row) for row in exhibit.rows],
    }
    write_atomically(folder / EXHIBIT, sealed_text(fields, of_claim(folder, EXHIBIT)))


def read_exhibit(folder: Path) -> Exhibit:
    """Read the caption and the table. Return empty ones if the file is missing
    or damaged."""
    try:
        fields = read_sealed(folder / EXHIBIT, of_claim(folder, EXHIBIT))
        rows = tuple(tuple(row) for row in fields["rows"])
        return Exhibit(str(fields["caption"]), tuple(map(str, fields["columns"])), rows)
    except (Mistake, KeyError, TypeError):
        return Exhibit()
