"""The page of published claims, README.md: a summary, a table of all verdicts, and a
section for each claim."""

from __future__ import annotations

from collections.abc import Sequence

from ntkexp.claim.look import CONTROL, MAIN, SECOND
from ntkexp.records.claim import PICTURE, ClaimRecord, Judgement
from ntkexp.report.claims import (
    ClaimFamily,
    interval,
    standing_verdicts,
    summarise_claims,
    verdict_words,
)
from ntkexp.report.tables import escaped
from ntkexp.text import counted, short

HOW_TO_READ = """\
Each claim has a section below. The figure is the number that the first expectation
compares, with its 95 % interval over seeds. This interval holds for the named pool of
examples. An interval over seeds and examples also accounts for the choice of the
measured examples, but not for the choice of training examples. The second look repeats
the experiment with other examples or another network. The control is an experiment in
which the effect should be absent, so it should not be supported. In most pictures, blue
is the main look, orange is the second look, and the expected values are shaded.

`ntkexp claims publish docs/claims` wrote this page from the results of `ntkexp claims`,
and `ntkexp claims check docs/claims` judges the tables again."""


LOOKS = {MAIN: "Main look", CONTROL: "Control", SECOND: "Second look"}


def page(records: Sequence[ClaimRecord], family: ClaimFamily) -> str:
    """Return the text of README.md."""
    summary = summarise_claims(records, family)
    if unjudged := family.registered - len(records):
        summary += (
            f" Not judged for this page: {counted(unjudged, 'claim')} of the register."
        )
    standing = standing_verdicts(records, family)
    words = [
        verdict_words(record, stands)
        for record, stands in zip(records, standing, strict=True)
    ]
    sections = map(section, records, words)
    paragraphs = [
        "# Claims, as they were judged",
        summary,
        HOW_TO_READ,
        table(records, words),
        *sections,
    ]
    return "\n\n".join(paragraphs) + "\n"


def table(records: Sequence[ClaimRecord], words: Sequence[str]) -> str:
    """Return the table of verdicts, with a link from each claim to its section."""
    lines = [
        "| claim | verdict | figure | 95 % interval |",
        "| --- | --- | ---: | ---: |",
    ]
    for record, verdict in zip(records, words, strict=True):
        link = f"[{escaped(record.name)}](#{record.name})"
        main = record.main
        lines.append(
            f"| {link} | {verdict} | {short(main.figure)} | {interval(main)} |"
        )
    return "\n".join(lines)


def section(record: ClaimRecord, verdict: str) -> str:
    """Return the section of a claim."""
    facts = [f"- Verdict: **{verdict}**"]
    for look, judged in record.looks.items():
        facts.append(f"- {LOOKS[look]}: {judged.verdict}, {figure_words(judged)}")
    expected = [f"  - `{rule}`" for rule in record.main.expected.split("; ")]
    tables = [f"[{look}]({record.name}/{look}.csv)" for look in record.looks]
    return "\n\n".join(
        [
            f"## {escaped(record.name)}",
            f"{escaped(record.statement)} ({escaped(record.source)})",
            "\n".join([*facts, *remarks_on(record), "- Expected:", *expected]),
            f"`{record.command}` repeats the trials. Tables: {', '.join(tables)}.",
            f"![{escaped(record.name)}]({record.name}/{PICTURE})",
        ]
    )


def figure_words(judged: Judgement) -> str:
    """Return the figure of a look with its interval."""
    return f"{short(judged.figure)} ({interval(judged)})"


def remarks_on(record: ClaimRecord) -> list[str]:
    """Describe the draws of the seeds, and quote the notes of the main and the second
    look."""
    remarks = {
        "Seeds": record.main.draws,
        "Note on the main look": record.main.note,
        "Note on the second look": record.looks[SECOND].note,
    }
    return [f"- {name}: {escaped(text)}" for name, text in remarks.items() if text]
