"""Verdicts that can be opened, by anyone: the tables that were judged, and what was found of them.

docs/claims/README.md               a line for each claim
            verdicts.json           [{"name": …, "verdict": …, "figure": …, "interval": [LOW, HIGH], "control": {…},
                                      "second": {…}, "entry": DIGEST, …}, …]
            <name>/<look>.csv       the judged table of a look: rows and columns that decide, every digit
            <name>/picture.svg      its picture

`publish` writes what stands in the register and was judged at default size, and keeps what was published of other
claims, as long as it stands; `check` judges the tables again.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from ntkexp.claim.claim import CONTROL, MAIN, SECOND, Claim, Look
from ntkexp.claim.conduct import drawn_by
from ntkexp.claim.expectation import select_rows
from ntkexp.claim.judge import Finding, judge_table, weigh_control
from ntkexp.claim.read import claim_names, read_claim
from ntkexp.config.build import Builder
from ntkexp.config.compose import Composer
from ntkexp.mistake import Mistake, NoData
from ntkexp.records.atomic import make_folder, read_bytes, to_text, write_atomically
from ntkexp.records.claim import PICTURE, ClaimRecord, Judgement, pair_verdict
from ntkexp.records.folder import package_version
from ntkexp.records.own_files import remove_files
from ntkexp.records.register import RegisterEntry
from ntkexp.report.claims import summarise_claims, tabulate_claims
from ntkexp.report.tables import escaped, format_csv, format_markdown
from ntkexp.text import counted

VERDICTS, PAGE = "verdicts.json", "README.md"
ALWAYS = ("runs", "seed", "value", "bound")
"""Columns that a rule may read unnamed."""
ROUNDING = 1e-9
"""The share by which a figure may differ when its table is read again and averaged by another library."""


def publish(
    folder: Path,
    composer: Composer,
    records: Sequence[ClaimRecord],
    entries: Mapping[str, Sequence[RegisterEntry]],
    trust: Sequence[str] = (),
) -> list[str]:
    """Write what was found of claims as they stand in the register, at their default size, beside what was published of
    others before; the names that are there now."""
    builder = composer.builder
    standing = {name: of_name[-1] for name, of_name in entries.items()}
    found = [
        record
        for record in records
        if record.size == "default" and record.name in standing and record.digest == standing[record.name].digest
    ]
    if not found:
        raise Mistake("no claim that stands in the register was judged at its default size; run `ntkexp claims` first")
    for record in found:
        claim = read_claim(record.name, builder)
        make_folder(folder / record.name)
        for name, look in claim.looks.items():
            table = read_table(record.path / f"{name}.csv")
            decide = sorted({row for part in look.expectation for row in select_rows(table, part.where).index})
            table = table.loc[decide, [column for column in table if column in {*ALWAYS, *columns_of(look)}]]
            write_atomically(folder / record.name / f"{name}.csv", format_csv(table))
        if (record.path / PICTURE).is_file():
            shutil.copyfile(record.path / PICTURE, folder / record.name / PICTURE)
    rows: dict[str, dict[str, Any]] = {record.name: verdict_fields(record, standing[record.name]) for record in found}

    # Of the other claims, what was published before and still stands. The tables of a claim that was changed go; a
    # name that is none of the register's claims may be any path, and nothing is removed by it.
    for row in published_rows(folder) if (folder / VERDICTS).is_file() else ():
        name = row["name"]
        if name in rows or name not in standing:
            continue
        if row["entry"] == standing[name].digest:
            rows[name] = row
        else:
            tables = [f"{name}/{look}.csv" for look in (MAIN, CONTROL, SECOND)]
            remove_files(folder, [*tables, f"{name}/{PICTURE}"])
    known = set(claim_names(builder.choices))
    for name, row in rows.items():  # what seeds draw, in the words of today
        if name not in known:
            continue
        look = read_claim(name, builder).looks["main"]
        with suppress(NoData):  # what was said when it was judged stays
            row["main"] = {**row["main"], "draws": drawn_by(look, composer, trust)}
    write_atomically(folder / VERDICTS, to_text([rows[name] for name in sorted(rows)]))
    shown = [published_record(folder, rows[name]) for name in sorted(rows)]
    write_atomically(folder / PAGE, page(shown, len(standing)))
    return sorted(rows)


def published_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the verdicts that were published."""
    try:
        rows: list[dict[str, Any]] = json.loads(read_bytes(folder / VERDICTS))
    except ValueError as error:
        raise Mistake(f"{folder / VERDICTS} is not JSON; `ntkexp claims publish {folder}` writes it") from error
    return rows


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


def read_table(file: Path) -> pd.DataFrame:
    """Read a judged table; only an empty cell is not a number, and not a word such as `none`."""
    try:
        return pd.read_csv(file, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise Mistake(f"{file} cannot be read as a table ({error})") from error


def columns_of(look: Look) -> set[str]:
    """The columns by which the rules of a look choose and order rows."""
    return {name for part in look.expectation for name in (*part.where, *part.each, getattr(part, "along", ""))}


def verdict_fields(record: ClaimRecord, entry: RegisterEntry) -> dict[str, Any]:
    fields = record.json_fields
    seen: Mapping[str, Any] = next((look for look in entry.looks[::-1] if look["size"] == record.size), {})
    about = {key: fields[key] for key in ("name", "verdict", "figure", "interval", "p", "expected")}
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    about |= {"control": fields["control"], "second": fields["second"], "main": fields["main"], "entry": entry.digest}
    about |= {"statement": record.statement, "source": record.source, "command": f"ntkexp claims {record.name}"}
    judged = {"date": seen.get("date"), "version": seen.get("version", package_version()), "commit": seen.get("commit")}
    return about | judged | {"machine": machine}


def page(records: Sequence[ClaimRecord], registered: int) -> str:
    """Give the page: what was found, in a table that links to the tables."""
    columns = ("claim", "verdict", "stands", "figure", "95 % interval", "expected", "control", "second look", "digest")
    table = format_markdown(tabulate_claims(records, registered).select(*columns))
    links = [f"- [{record.name}]({record.name}): {record.statement}{remarks_on(record)}" for record in records]
    unjudged = registered - len(records)
    missing = f" Not judged for this page: {counted(unjudged, 'claim')} of the register." if unjudged else ""
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


def check(folder: Path, builder: Builder, entries: Mapping[str, Sequence[RegisterEntry]]) -> list[str]:
    """Judge published tables again; the names of the claims, or a refusal of the first that does not agree."""
    rows = published_rows(folder)
    for row in rows:
        name = row["name"]
        where = f"{folder / VERDICTS}: {name}"
        if name not in claim_names(builder.choices) or not entries.get(name):
            raise Mistake(f"{where} is not a claim of the register")
        claim, stands = read_claim(name, builder), entries[name][-1].digest
        if not row["entry"] == claim.digest == stands:
            raise Mistake(f"{where} was judged as {row['entry']}, and stands as {stands} in the register; run it again")
        if differs := next(differences(claim, folder / name, row), None):
            raise Mistake(f"{where}: {differs}")
    return [row["name"] for row in rows]


def differences(claim: Claim, folder: Path, row: Mapping[str, Any]) -> Iterator[str]:
    """Judge the tables of a claim, and say how a published verdict differs."""
    findings: dict[str, Finding] = {}
    for name, look in claim.looks.items():
        table = read_table(folder / f"{name}.csv")
        seeds = sorted({*table["seed"].tolist()})
        if len(seeds) not in look.sizes or seeds != sorted(look.seeds[: len(seeds)]):
            yield f"{name}.csv has seeds that the claim did not plan"
        findings[name] = judge_table(look.at(look.sizes.index(len(seeds))), table)
    findings = weigh_control(findings, claim.protocol)
    verdict = pair_verdict(findings["main"].verdict, findings["second"].verdict)
    if row["verdict"] != verdict:
        yield f"verdict is {row['verdict']}, and the tables say {verdict}"
    for name, finding in findings.items():
        said, found = row[name], (finding.figure, finding.low, finding.high)
        if said["verdict"] != finding.verdict:
            yield f"{name} is {said['verdict']}, and its table says {finding.verdict}"
        for published, judged in zip((said["figure"], *said["interval"]), found, strict=True):
            if not agree(published, judged):
                yield f"{name} has the figure {published}, and its table says {judged}"


def agree(published: float | None, judged: float) -> bool:
    """Whether a number in JSON is one that was judged; JSON writes none where there is no number.

    >>> agree(None, float("nan")), agree(1.0, 1.0 + 1e-12), agree(1.0, 1.1)
    (True, True, False)
    """
    if published is None:
        return not math.isfinite(judged)
    return math.isclose(published, judged, rel_tol=ROUNDING, abs_tol=1e-15)
