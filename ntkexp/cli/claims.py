"""`ntkexp claims`: claims of papers are run, measured, judged and shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.surroundings import interruptible, options, polite_kill, trusted
from ntkexp.cli.train import ensure_writable
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.records.claim import ClaimRecord, Judgement
from ntkexp.records.folder import command
from ntkexp.report.claims import outlook, summary
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.claim.read import Size
    from ntkexp.engine.base import AbstractEngine


# --- `ntkexp claims`: claims of papers are run, measured, judged and shown.


FOLDER = "claims"


@dataclass(frozen=True, kw_only=True)
class ClaimsRequest:
    """What the command line asks for, by the names of its options."""

    names: Sequence[str]
    quick: bool
    full: bool
    out: Path
    workers: int | None
    engine: str
    retry_failed: bool
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None

    @property
    def size(self) -> Size:
        """Claims are carried out at this size."""
        if self.quick and self.full:
            raise WrongArgument("quick and full are two sizes; give one of them", "quick", "full")
        return "quick" if self.quick else "full" if self.full else "default"

    @property
    def repeated(self) -> list[str]:
        """The options without which the same words ask for something else."""
        return options(self.out, self.trust, self.config_dir)


def claims(asked: ClaimsRequest) -> int:
    """Do what the first word says: show claims, try the judge, or judge claims; the exit status is given back."""

    others = {"list": show_list, "judge": show_trials}
    if len(asked.names) == 1 and asked.names[0] in others:
        others[asked.names[0]](asked)
        return 0
    return judge(asked)


def judge(asked: ClaimsRequest) -> int:
    """Carry claims out and show what is found; the status is 1 if one of several could not be judged."""
    from ntkexp.engine.base import choose

    size, engine = asked.size, choose(asked.engine, asked.workers)
    engine.limit_threads()  # before torch is imported, which composing does

    out = ensure_writable(asked.out.expanduser()).absolute() / FOLDER
    with polite_kill(), interruptible(lambda: "; the same command goes on from the last checkpoints"):
        outcomes = list(judged(asked, size, engine, out))
    found = [record for record in outcomes if record is not None]
    show(found, asked)
    page = write_page(out, command("claims", asked.names, [*[f"--{size}"] * (size != "default"), *asked.repeated]))
    if not (asked.quiet or asked.as_json):
        sys.stdout.write(f"{page}\n")
    return 0 if len(found) == len(outcomes) else 1


def write_page(claims: Path, repeat: str) -> Path:
    """Write the page of all claims that were judged here."""
    from ntkexp.records.claim import claim_records
    from ntkexp.report.page.build import write_claims

    return write_claims(claim_records(claims), claims.parent / "report", repeat)


def judged(asked: ClaimsRequest, size: Size, engine: AbstractEngine, out: Path) -> Iterator[ClaimRecord | None]:
    """Judge one claim after the other, all of them read before any is run; nothing of one that could not be judged."""
    from ntkexp.claim.conduct import Workshop, carry_out, conclude, plan_claim
    from ntkexp.claim.read import claim_names, read_claim
    from ntkexp.cli.progress import listener
    from ntkexp.config.compose import composer

    made, trust = composer(asked.config_dir, asked.trust), trusted(asked.trust)
    read = [read_claim(name, made.builder, size) for name in asked.names or claim_names(made.builder.choices)]
    workshop = Workshop(engine, listener(asked.quiet), trust, asked.retry_failed)
    for claim in read:
        try:
            planned = plan_claim(claim, made, out, trust, asked.repeated)
            record = conclude(planned, carry_out(planned, workshop), size)
        except Mistake as mistake:
            if len(read) == 1:
                raise
            sys.stderr.write(f"{claim.name}: {mistake}\n")  # the others are judged all the same
            yield None
            continue
        if not asked.quiet and len(read) > 1:
            sys.stderr.write(f"{line(record)}\n")
        yield record


# --- Claims on the terminal: the list of them, the table of verdicts, and how well the rules judge.


HEADER = ("claim", "verdict", "figure", "95 % interval", "expected", "control", "second look", "CPU minutes")


def show(found: Sequence[ClaimRecord], asked: ClaimsRequest) -> None:
    """Show what was found."""
    from ntkexp.records.atomic import to_text

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
    from ntkexp.config.choices import Choices, folders, read
    from ntkexp.records.atomic import to_text

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
    from ntkexp.records.atomic import to_text

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
