"""Claims on the terminal: the list of them, the table of verdicts, and how well the rules judge."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ntkexp.records.claim import ClaimRecord, Judgement
from ntkexp.report.claims import outlook, summary
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.cli.claims import ClaimsRequest

HEADER = ("claim", "verdict", "figure", "95 % interval", "expected", "control", "second look", "CPU minutes")


def show(found: Sequence[ClaimRecord], asked: ClaimsRequest) -> None:
    """Show what was found."""
    from ntkexp.records.json_file import to_text

    if asked.as_json:
        sys.stdout.write(to_text([record.told for record in found]))
    elif not asked.quiet:
        sys.stdout.write(f"{table(found)}\n\n{notes(found)}{summary(found)}\n")


def table(found: Sequence[ClaimRecord]) -> str:
    """Lay out a line for each claim."""
    rows = [
        [
            *(record.name, record.main.verdict, short(record.main.figure), interval(record.main)),
            shortened(record.main.expected),
            *(record.looks[name].verdict for name in ("control", "second")),
            minutes(record),
        ]
        for record in found
    ]
    return aligned(HEADER, rows, [False, False, True, True, False, False, False, True])


def minutes(record: ClaimRecord) -> str:
    """Spell how long processors worked for a claim."""
    return "–" if math.isnan(record.cpu_minutes) else f"{record.cpu_minutes:.1f}"


def interval(judged: Judgement) -> str:
    """Spell an interval."""
    return f"{short(judged.low)} to {short(judged.high)}"


def shortened(expected: str) -> str:
    """Leave the parts but the first to the page.

    >>> shortened("slope −1 ± 0.1; slope −0.5 ± 0.1"), shortened("≤ 2 ± 0.1")
    ('slope −1 ± 0.1, and 1 more', '≤ 2 ± 0.1')
    """
    first, *others = expected.split("; ")
    return f"{first}, and {len(others)} more" if others else first


def line(record: ClaimRecord) -> str:
    """Say of one claim what came out."""
    main = record.main
    found = f"{main.verdict}, {short(main.figure)} ({interval(main)}), expected {shortened(main.expected)}"
    return f"{record.name}: {'; '.join(filter(None, [found, outlook(record)]))}"


def notes(found: Sequence[ClaimRecord]) -> str:
    """Say what stands in the way of a verdict, and what would probably decide, which no control need be."""
    lines = []
    for record in found:
        for name, judged in record.looks.items():
            where = record.name if name == "main" else f"{record.name}, {name}"
            said = "; ".join(filter(None, [judged.note, outlook(record, name) if name != "control" else ""]))
            lines += [f"{where}: {said}\n"] if said else []
    return "".join(lines) + ("\n" if lines else "")


def show_list(asked: ClaimsRequest) -> None:
    """Show every claim with its source."""
    from ntkexp.config.choices import Choices, read
    from ntkexp.config.folders import folders
    from ntkexp.records.json_file import to_text

    choices = Choices(folders(asked.config_dir))
    trees = {name: read(choices.file("claim", name)) for name in choices.options("claim")}
    told = [(name, str(tree.get("statement")), source(tree.get("source"))) for name, tree in trees.items()]
    if asked.as_json:
        keys = ("name", "statement", "source")
        sys.stdout.write(to_text([dict(zip(keys, row, strict=True)) for row in told]))
    else:
        sys.stdout.write("\n".join(f"{name}\n    {said}\n    {paper}" for name, said, paper in told) + "\n")


def source(given: object) -> str:
    """Spell where a claim was made."""
    return ", ".join(map(str, given.values())) if isinstance(given, dict) else str(given)


def show_trials(asked: ClaimsRequest) -> None:
    """Show how often each rule errs, and how often it decides, where the truth is known."""
    from ntkexp.claim.synthetic import RULES, try_rule
    from ntkexp.records.json_file import to_text

    tried = [try_rule(rule) for rule in RULES]
    if asked.as_json:
        sys.stdout.write(to_text([one.fields for one in tried]))
        return
    header = ("rule", "tables", "false verdicts", "support where true", "refute where false")
    rows = [[one.rule, str(one.tables), *map(percentage, (one.false, one.support, one.refute))] for one in tried]
    sys.stdout.write(f"{aligned(header, rows, [False, True, True, True, True])}\n")


def percentage(share: float) -> str:
    """Spell a rate.

    >>> percentage(0.034)
    '3.4 %'
    """
    return f"{100 * share:.1f} %"
