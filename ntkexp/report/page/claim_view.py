"""What the page of claims shows: all of them in one table, and each with its picture, its looks and its command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.records.claim import PICTURE, VERDICT, ClaimRecord, Exhibit, Judgement, read_exhibit
from ntkexp.report.claims import outlook, tabulate_claims
from ntkexp.report.page.picture import Shown, inline, link, slug
from ntkexp.report.tables import PageTable, format_html, tabulate
from ntkexp.text import listed

ON_PAGE = (
    *("claim", "verdict", "stands", "figure", "low", "high", "control", "second look", "CPU minutes", "size"),
    *("source", "expected", "digest"),
)
NUMBERS = ("figure", "low", "high")
OF_A_LOOK = ("look", "verdict", "figure", "low", "high", "seeds", "a seed draws", "expected")
SPOKEN = {"main": "the claim", "second": "second look"}
RULE = (
    "Each claim said beforehand what would support it. Supported: the whole 95 % interval over seeds lies in what was "
    "expected; refuted: it lies outside; undecided: anything else, and also where the control is supported too. CPU "
    "minutes are those of one core that does all runs of a claim by itself: two idle cores need half as long, and what "
    "else a machine is doing does not count. Runs that claims share are counted for each."
)


@dataclass(frozen=True)
class ClaimView:
    """The page shows this of a claim."""

    anchor: str
    name: str
    verdict: str
    size: str
    statement: str
    source: str
    refutes: str
    digest: str
    href: str
    picture: Shown | None
    caption: str
    published: PageTable | None
    looks: PageTable
    notes: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def claim_view(record: ClaimRecord, folder: Path) -> ClaimView:
    """Show a claim."""
    exhibit = read_exhibit(record.path)
    anchor, there = anchor_of(record), sorted(path.name for path in record.path.glob("*.csv"))
    rows = [
        (name, look.verdict, look.figure, look.low, look.high, seeds(look), look.draws, look.expected)
        for name, look in looks(record)
    ]
    notes = [f"{name}: {look.note}." for name, look in looks(record) if look.note]
    notes += [f"{SPOKEN[name]}: {told}." for name in SPOKEN if (told := outlook(record, name))]
    return ClaimView(
        anchor=anchor,
        name=record.name,
        verdict=record.main.verdict,
        size=record.size,
        statement=record.statement,
        source=record.source,
        refutes=record.refutes,
        digest=record.digest,
        href=link(record.path, folder),
        picture=picture(record, folder),
        caption=exhibit.caption,
        published=published(exhibit, record),
        looks=format_html(tabulate(OF_A_LOOK, rows, NUMBERS), f"looks-{anchor}", f"Looks at {titled(record)}"),
        notes=tuple(notes),
        files=tuple((name, link(record.path / name, folder)) for name in [*there, VERDICT]),
    )


def picture(record: ClaimRecord, folder: Path) -> Shown | None:
    """Show the picture of a claim, if it is there and is one."""
    title = f"{titled(record)}: {record.main.verdict}"
    try:
        drawn = inline((record.path / PICTURE).read_text(encoding="utf-8"), anchor_of(record), title)
    except (Mistake, OSError, UnicodeDecodeError):
        return None
    return Shown(title, drawn, link(record.path / "main.csv", folder), "main.csv", record.command)


def published(exhibit: Exhibit, record: ClaimRecord) -> PageTable | None:
    """Show the table that belongs to the picture, if there is one."""
    if not exhibit.columns:
        return None
    numbers = {
        name
        for name, column in zip(exhibit.columns, zip(*exhibit.rows, strict=True), strict=False)
        if all(isinstance(cell, float | int | None) for cell in column)
    }
    table, caption = (
        tabulate(exhibit.columns, exhibit.rows, numbers),
        f"{titled(record)}, by the protocol of {record.source}",
    )
    return format_html(table, f"published-{anchor_of(record)}", caption)


def overview(records: Sequence[ClaimRecord]) -> PageTable:
    """Show all claims in one table."""
    caption = "Claims, with 95 % intervals over seeds; stands: by Holm's correction over all of them, at 5 %"
    links = [f"#{anchor_of(record)}" for record in records]
    return format_html(tabulate_claims(records).select(*ON_PAGE), "claims", caption, links)


def anchor_of(record: ClaimRecord) -> str:
    """Name a claim in links."""
    return f"claim-{slug(record.path.name)}"


def titled(record: ClaimRecord) -> str:
    """Name a claim so that no other on the page is called so: with its size, if that is not its own."""
    return record.name if record.size == "default" else f"{record.name}, {record.size}"


def looks(record: ClaimRecord) -> list[tuple[str, Judgement]]:
    """List the looks with their names in words."""
    return [(SPOKEN.get(name, name), look) for name, look in record.looks.items()]


def seeds(look: Judgement) -> str:
    """Spell seeds as a range where they are one.

    >>> from types import SimpleNamespace
    >>> seeds(SimpleNamespace(seeds=(0, 1, 2))), seeds(SimpleNamespace(seeds=(0, 7)))
    ('0 to 2', '0 and 7')
    """
    first, last = look.seeds[0], look.seeds[-1]
    if len(look.seeds) > 2 and look.seeds == tuple(range(first, last + 1)):
        return f"{first} to {last}"
    return listed(list(map(str, look.seeds)))
