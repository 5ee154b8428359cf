"""Publish verdicts that can be opened by anyone, and check what was published.

`publish` writes what stands in the register and was judged at default size, and keeps what was published of other
claims, as long as it stands and is as it was published. `check` recomputes every published field: figures, intervals,
p, notes and verdicts from the tables; statement, source, seeds and what they draw from the claim's file; date and
version from the register; README.md from the verdicts. It compares all files with their digests, and requires all
claims of a register that were judged. The files are those of `ntkexp.claim.publication`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ntkexp.claim.claim import Claim
from ntkexp.claim.conduct import drawn_by
from ntkexp.claim.expectation import select_rows
from ntkexp.claim.judge import Finding, judge_table, weigh_control
from ntkexp.claim.look import Look
from ntkexp.claim.publication import (
    ALWAYS,
    PAGE,
    SUMS,
    TABLES,
    VERDICTS,
    files_of,
    parse_verdicts,
    read_digests,
    read_files,
    read_table,
    read_verdicts,
    refuse_active_picture,
    refuse_odd_table,
    refuse_other_files,
    write_digests,
)
from ntkexp.claim.read import claim_names, read_claim
from ntkexp.config.build import Builder
from ntkexp.config.compose import Composer
from ntkexp.mistake import Mistake, NoData, first_line
from ntkexp.records.atomic import finite_json, make_folder, read_bytes, to_text, write_atomically
from ntkexp.records.claim import PICTURE, ClaimRecord, Judgement, pair_verdict
from ntkexp.records.folder import package_version
from ntkexp.records.own_files import remove_files
from ntkexp.records.register import RegisterEntry, same_outcome
from ntkexp.report.claims import summarise_claims, tabulate_claims
from ntkexp.report.tables import escaped, format_csv, format_markdown
from ntkexp.text import counted, printable

ROUNDING = 1e-9
"""The share by which a figure may differ when its table is read again and averaged by another library."""

Entries = Mapping[str, Sequence[RegisterEntry]]


def publish(
    folder: Path,
    composer: Composer,
    records: Sequence[ClaimRecord],
    entries: Entries,
    trust: Sequence[str] = (),
) -> list[str]:
    """Write what was found of claims as they stand in the register, at their default size, beside what was published of
    others before; the names that are there now."""
    builder = composer.builder
    standing = {name: of_name[-1] for name, of_name in entries.items()}
    found = [
        record
        for record in records
        if record.size == "default"
        and record.name in standing
        and record.digest == standing[record.name].digest
    ]
    before = read_verdicts(folder) if (folder / VERDICTS).is_file() else []
    if not found and not before:
        raise Mistake(
            "no claim that stands in the register was judged at its default size; run `ntkexp claims` first"
        )
    rows: dict[str, dict[str, Any]] = {
        record.name: verdict_fields(record, standing[record.name]) for record in found
    }
    known = set(claim_names(builder.choices))

    # Of the other claims, what was published before and still stands, if nobody changed it since. The tables of a
    # claim that was changed go; a name that is none of the register's claims may be any path, and nothing is removed
    # by it.
    outdated = []
    for row in before:
        name = row["name"]
        if name in rows or name not in standing:
            continue
        if row["entry"] != standing[name].digest:
            outdated.append(name)
            continue
        if name in known:
            refuse_changed(folder, row, read_claim(name, builder), entries[name])
        rows[name] = row

    for record in found:
        write_tables(folder / record.name, record, read_claim(record.name, builder))
    for name in outdated:
        remove_tables(folder / name)
    for name, row in rows.items():  # what seeds draw, in the words of today
        for look, words in (
            draws_of(read_claim(name, builder), composer, trust).items() if name in known else ()
        ):
            row[look] = {**row[look], "draws": words}
    names = sorted(rows)
    write_atomically(folder / VERDICTS, to_text([rows[name] for name in names]))
    shown = [published_record(folder, rows[name]) for name in names]
    write_atomically(folder / PAGE, page(shown, len(standing)))
    write_digests(folder, [file for file in files_of(names) if (folder / file).is_file()])
    return names


def write_tables(folder: Path, record: ClaimRecord, claim: Claim) -> None:
    """Write the rows of a claim's tables that decide, and its picture."""
    if not (record.path / PICTURE).is_file():
        raise Mistake(f"{record.path} has no {PICTURE}; `ntkexp claims {record.name}` draws it")
    make_folder(folder)
    for name, look in claim.looks.items():
        table = read_table(record.path / f"{name}.csv")
        table = table.loc[
            deciding_rows(look, table), [column for column in table if column in columns_of(look)]
        ]
        write_atomically(folder / f"{name}.csv", format_csv(table))
    write_atomically(folder / PICTURE, read_bytes(record.path / PICTURE))


def remove_tables(folder: Path) -> None:
    """Remove the files that were published of a claim, and their folder if nothing else is in it."""
    remove_files(folder.parent, [f"{folder.name}/{file}" for file in (*TABLES, PICTURE)])


def deciding_rows(look: Look, table: pd.DataFrame) -> list[Any]:
    """Find the rows of a table that any rule of the look speaks of."""
    return sorted(
        {row for part in look.expectation for row in select_rows(table, part.where).index}
    )


def columns_of(look: Look) -> set[str]:
    """The columns by which the rules of a look choose, order and judge rows."""
    named = {
        name
        for part in look.expectation
        for name in (*part.where, *part.each, getattr(part, "along", ""))
    }
    return {*ALWAYS, *named}


def draws_of(claim: Claim, composer: Composer, trust: Sequence[str]) -> dict[str, str]:
    """Say what the seeds of each look draw; nothing of looks at data that are not there."""
    words: dict[str, str] = {}
    for name, look in claim.looks.items():
        same = next((other for other in words if draws_alike(claim.looks[other], look)), None)
        if same is not None:
            words[name] = words[same]
            continue
        with suppress(NoData):
            words[name] = drawn_by(look, composer, trust)
    return words


def draws_alike(look: Look, other: Look) -> bool:
    """Whether two looks have the same runs, trial and seeds."""
    return (look.runs, look.trial, look.seeds) == (other.runs, other.trial, other.seeds)


def published_record(folder: Path, row: Mapping[str, Any]) -> ClaimRecord:
    """A claim as it was published, whose runs may be gone."""
    return ClaimRecord(
        path=folder / row["name"],
        name=row["name"],
        digest=row["entry"],
        size="default",
        statement=row["statement"],
        source=row["source"],
        refutes="",  # which its file says
        command=row["command"],
        looks={name: Judgement.of_fields(row[name]) for name in ("main", "control", "second")},
    )


def verdict_fields(record: ClaimRecord, entry: RegisterEntry) -> dict[str, Any]:
    """Give what is published of a claim, with the look on record that found it."""
    fields: dict[str, Any] = {key: finite_json(value) for key, value in record.json_fields.items()}
    seen = look_on_record({look: fields[look] for look in record.looks}, entry)
    if seen is None:
        raise Mistake(
            f"{record.path}: no look on record in the register found this; run `ntkexp claims {record.name}`"
        )
    about = {key: fields[key] for key in ("name", "verdict", "figure", "interval", "p", "expected")}
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    about |= {
        "control": fields["control"],
        "second": fields["second"],
        "main": fields["main"],
        "entry": entry.digest,
    }
    about |= {
        "statement": record.statement,
        "source": record.source,
        "command": f"ntkexp claims {record.name}",
    }
    judged = {
        "date": seen.get("date"),
        "version": seen.get("version", package_version()),
        "commit": seen.get("commit"),
    }
    return about | judged | {"machine": machine}


def look_on_record(
    looks: Mapping[str, Any], entry: RegisterEntry, **judged: Any
) -> Mapping[str, Any] | None:
    """Find the last look at an entry, at default size, that found the same, and was then."""
    outcome = {
        name: {
            **{key: look[key] for key in ("verdict", "figure", "interval", "p")},
            "seeds": len(look["seeds"]),
        }
        for name, look in looks.items()
    }
    for seen in entry.looks[::-1]:
        at = all(seen[key] == value for key, value in judged.items())
        if seen["size"] == "default" and at and same_outcome(seen["looks"], outcome):
            return seen
    return None


def page(records: Sequence[ClaimRecord], registered: int) -> str:
    """Give the page: what was found, in a table that links to the tables."""
    columns = (
        "claim",
        "verdict",
        "stands",
        "figure",
        "95 % interval",
        "expected",
        "control",
        "second look",
        "digest",
    )
    table = format_markdown(tabulate_claims(records, registered).select(*columns))
    links = [
        f"- [{record.name}]({record.name}): {record.statement}{remarks_on(record)}"
        for record in records
    ]
    unjudged = registered - len(records)
    missing = (
        f" Not judged for this page: {counted(unjudged, 'claim')} of the register."
        if unjudged
        else ""
    )
    summary = summarise_claims(records, registered)
    return (
        "# Claims, as they were judged\n\n"
        f"{summary}{missing} Made by `ntkexp claims publish docs/claims` from the results of `ntkexp claims`, and "
        "judged again from the tables by `ntkexp claims check docs/claims`.\n\n"
        f"{table}\n\n" + "\n".join(links) + "\n"
    )


def remarks_on(record: ClaimRecord) -> str:
    """Say what seeds draw, and what else was noted of the claim's own look and of the second."""
    said = [f"Seeds: {record.main.draws}."] if record.main.draws else []
    notes = {"Its own look": record.main.note, "The second look": record.looks["second"].note}
    said += [f"{look}: {note}." for look, note in notes.items() if note]
    return "".join(f" {escaped(sentence)}" for sentence in said)


# --- Published verdicts are judged again, from their tables.


def check(
    folder: Path,
    composer: Composer,
    entries: Entries,
    trust: Sequence[str] = (),
    names: Sequence[str] = (),
    *,
    draws: bool = True,
) -> list[str]:
    """Judge published tables again; the names of the claims, or a refusal of the first thing that does not agree.

    The folder must hold all claims that were judged as they stand in the registers of those which it holds, or exactly
    `names`. Without `draws`, it is not asked what seeds draw, which composes every run.
    """
    digests, builder = read_digests(folder), composer.builder
    content = read_files(folder, [VERDICTS], digests)[VERDICTS]
    rows = parse_verdicts(content, folder)
    there = [row["name"] for row in rows]
    for row in rows:
        refuse_other_entry(folder, row, builder, entries)
    refuse_other_set(folder, there, required_claims(there, builder, entries, names))
    refuse_other_files(folder, files_of(there), digests)
    contents = read_files(folder, files_of(there), digests)
    for row in rows:
        claim = read_claim(row["name"], builder)
        refuse_changed(folder, row, claim, entries[claim.name], contents)
        words = draws_of(claim, composer, trust) if draws else {}
        if other := next((look for look in words if row[look]["draws"] != words[look]), None):
            raise Mistake(
                f"{place_of(folder, row)}: seeds of {other} draw otherwise than it says: {words[other]}"
            )
    shown = [published_record(folder, row) for row in rows]
    if contents[PAGE] != page(shown, len(entries)).encode():
        among = f"among {counted(len(entries), 'claim')} in the register"
        raise Mistake(
            f"{folder / PAGE} is not the page of these verdicts {among}; `ntkexp claims publish {folder}` writes it"
        )
    return there


def place_of(folder: Path, row: Mapping[str, Any]) -> str:
    return printable(f"{folder / VERDICTS}: {row['name']}")


def refuse_other_entry(
    folder: Path, row: Mapping[str, Any], builder: Builder, entries: Entries
) -> None:
    """Refuse a verdict of a claim that is not what stands in the register."""
    name = row["name"]
    where = place_of(folder, row)
    if name not in claim_names(builder.choices) or not entries.get(name):
        raise Mistake(f"{where} is not a claim of the register")
    claim, stands = read_claim(name, builder), entries[name][-1].digest
    if not row["entry"] == claim.digest == stands:
        judged = printable(row["entry"])
        raise Mistake(
            f"{where} was judged as {judged}, and stands as {stands} in the register; run it again"
        )


def required_claims(
    published: Sequence[str], builder: Builder, entries: Entries, names: Sequence[str]
) -> list[str]:
    """Name the claims that a publication must hold: of the same registers, those that were judged as they stand."""
    if names:
        return sorted({*names})
    folder_of = {
        name: builder.choices.file("claim", name).parent for name in claim_names(builder.choices)
    }
    registers = {folder_of[name] for name in published}
    judged = (
        name
        for name in entries
        if any(look["size"] == "default" for look in entries[name][-1].looks)
    )
    return sorted(name for name in judged if folder_of.get(name) in registers)


def refuse_other_set(folder: Path, published: Sequence[str], required: Sequence[str]) -> None:
    """Refuse a publication that leaves out claims, or has others, or stands in another order."""
    if not published:
        raise Mistake(
            f"{folder / VERDICTS} holds no verdict; `ntkexp claims publish {folder}` writes them"
        )
    missing = sorted({*required} - {*published})
    if missing:
        raise Mistake(
            f"{folder / VERDICTS} lacks {counted(len(missing), 'claim')} that must be there, such as {missing[0]}; "
            f"publish all that were judged, or name those that you mean: `ntkexp claims check {folder} {published[0]}`"
        )
    if other := sorted({*published} - {*required}):
        raise Mistake(
            f"{folder / VERDICTS} has a verdict of {other[0]}, which is none of {', '.join(required)}"
        )
    if [*published] != sorted(published):
        raise Mistake(
            f"{folder / VERDICTS} is not in the order of names; `ntkexp claims publish {folder}` writes it"
        )


def refuse_changed(
    folder: Path,
    row: Mapping[str, Any],
    claim: Claim,
    attempts: Sequence[RegisterEntry],
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Refuse a verdict that its tables, its claim or the register do not bear out.

    Without `contents`, its files are read, and compared with their digests if these were published.
    """
    where, files = place_of(folder, row), [f"{claim.name}/{file}" for file in (*TABLES, PICTURE)]
    if contents is None and (folder / SUMS).is_file():
        contents = read_files(folder, files, read_digests(folder))
    if contents is None:  # published before there were digests
        contents = {file: read_bytes(folder / file) for file in files}
    refuse_active_picture(contents[files[-1]], folder / files[-1])
    tables = {}
    for name, look in claim.looks.items():
        file = f"{claim.name}/{name}.csv"
        tables[name] = read_table(folder / file, contents[file])
        refuse_odd_table(tables[name], columns_of(look), folder / file)
    try:
        with np.errstate(all="ignore"):
            differs = next(differences(claim, tables, row), None)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise Mistake(f"{where} cannot be judged again: {printable(first_line(error))}") from error
    if differs:
        raise Mistake(f"{where}: {printable(differs)}")
    looks = {name: row[name] for name in claim.looks}
    if (
        look_on_record(
            looks, attempts[-1], **{key: row[key] for key in ("date", "version", "commit")}
        )
        is None
    ):
        raise Mistake(
            f"{where}: no look on record in the register found this, then and by that version"
        )


def differences(
    claim: Claim, tables: Mapping[str, pd.DataFrame], row: Mapping[str, Any]
) -> Iterator[str]:
    """Judge the tables of a claim, and say how a published verdict differs."""
    findings: dict[str, Finding] = {}
    looks: dict[str, Look] = {}
    for name, look in claim.looks.items():
        table = tables[name]
        seeds = sorted({*table["seed"].tolist()})
        if len(seeds) not in look.sizes or seeds != sorted(look.seeds[: len(seeds)]):
            yield f"{name}.csv has seeds that the claim did not plan"
        looks[name] = look.at(look.sizes.index(len(seeds)))
        if len(deciding_rows(look, table)) < len(table):
            yield f"{name}.csv has rows that decide nothing"
        findings[name] = judge_table(looks[name], table)
    findings = weigh_control(findings, claim.protocol)

    # The verdict of the pair first, then that of each look, then their figures and words
    verdict = pair_verdict(findings["main"].verdict, findings["second"].verdict)
    if row["verdict"] != verdict:
        yield f"verdict is {row['verdict']}, and the tables say {verdict}"
    for name, finding in findings.items():
        judged = look_fields(finding, looks[name])
        size = max(
            (abs(n) for n in (finding.figure, finding.low, finding.high) if math.isfinite(n)),
            default=0.0,
        )
        for key, value in judged.items():
            if not agree(row[name][key], value, size):
                yield f"{name} has the {key} {row[name][key]}, and its table says {finite_json(value)}"
    same = {key: row["main"][key] for key in ("figure", "interval", "p", "expected")}
    same |= {
        "statement": claim.statement,
        "source": claim.source.words,
        "command": f"ntkexp claims {claim.name}",
    }
    for key, value in same.items():
        if row[key] != value:
            yield f"{key} is {row[key]}, and should be {value}"


def look_fields(finding: Finding, look: Look) -> dict[str, Any]:
    """Give what is published of a look, as far as its table and its claim say it."""
    return {
        "verdict": finding.verdict,
        "figure": finding.figure,
        "interval": [finding.low, finding.high],
        "p": finding.p,
        "more_seeds": finding.more,
        "expected": look.words(finding.part),
        "seeds": list(look.seeds_now),
        "note": finding.note,
    }


def agree(published: Any, judged: Any, size: float = 0.0) -> bool:
    """Whether a published field is what was judged; JSON writes none where there is no number.

    Figures may differ by rounding: by a share of themselves, or of the largest of figure and ends, which is `size`.

    >>> agree(None, float("nan")), agree(1.0, 1.0 + 1e-12), agree(1.0, 1.1), agree(2e-15, 3e-15, 3e-15)
    (True, True, False, False)
    """
    if isinstance(judged, list):
        return len(published) == len(judged) and all(
            map(agree, published, judged, [size] * len(judged))
        )
    if not isinstance(judged, float):
        return bool(published == judged)
    if published is None:
        return not math.isfinite(judged)
    return math.isclose(published, judged, rel_tol=ROUNDING, abs_tol=ROUNDING * size)
