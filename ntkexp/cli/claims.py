"""`ntkexp claims`: claims of papers are run, measured, judged and shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.interrupt import interruptible, polite_kill
from ntkexp.cli.repeat import options, trusted
from ntkexp.cli.train import ensure_writable
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.records.command import command

if TYPE_CHECKING:
    from ntkexp.claim.read import Size
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.records.claim import ClaimRecord

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
    from ntkexp.cli.claims_shown import show_list, show_trials

    others = {"list": show_list, "judge": show_trials}
    if len(asked.names) == 1 and asked.names[0] in others:
        others[asked.names[0]](asked)
        return 0
    return judge(asked)


def judge(asked: ClaimsRequest) -> int:
    """Carry claims out and show what is found; the status is 1 if one of several could not be judged."""
    from ntkexp.engine.choose import choose

    size, engine = asked.size, choose(asked.engine, asked.workers)
    engine.limit_threads()  # before torch is imported, which composing does
    from ntkexp.cli.claims_shown import show

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
    from ntkexp.claim.carry_out import Workshop, carry_out
    from ntkexp.claim.judge import judge_claim
    from ntkexp.claim.planned import plan_claim
    from ntkexp.claim.read import claim_names, read_claim
    from ntkexp.cli.claims_shown import line
    from ntkexp.cli.sweep_progress import listener
    from ntkexp.config.compose import composer

    made, trust = composer(asked.config_dir, asked.trust), trusted(asked.trust)
    read = [read_claim(name, made.builder, size) for name in asked.names or claim_names(made.builder.choices)]
    workshop = Workshop(engine, listener(asked.quiet), trust, asked.retry_failed)
    for claim in read:
        try:
            planned = plan_claim(claim, made, out, trust, asked.repeated)
            record = judge_claim(planned, carry_out(planned, workshop), size)
        except Mistake as mistake:
            if len(read) == 1:
                raise
            sys.stderr.write(f"{claim.name}: {mistake}\n")  # the others are judged all the same
            yield None
            continue
        if not asked.quiet and len(read) > 1:
            sys.stderr.write(f"{line(record)}\n")
        yield record
