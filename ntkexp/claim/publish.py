"""Publish verdicts, and check a publication.

`publish` writes the verdict on a claim if it was judged at default size, and if its
digest is the latest in the register. For a claim that was not judged now, `publish`
keeps the published verdict if its digest is still the latest. It then draws the picture
again from the published tables.

`check` recomputes every published field:

figures, intervals, p, notes, verdicts     from the tables
statement, source, seeds and their draws   from the files of the claims
date and version                           from the register
README.md                                  from the verdicts

It compares all files with their digests. It also requires that every judged claim of a
register is published.

`ntkexp.claim.publication` reads and writes the files.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ntkexp.claim.claim import Claim
from ntkexp.claim.conduct import drawing_of, drawn_by, judgement
from ntkexp.claim.expectation import EXAMPLE, select_rows
from ntkexp.claim.judge import Finding, judge_table, weigh
from ntkexp.claim.judged import JudgedClaim
from ntkexp.claim.look import Look
from ntkexp.claim.publication import (
    ALWAYS,
    PAGE,
    SUMS,
    TABLES,
    VERDICTS_FILE,
    files_of,
    files_of_claim,
    looks_of,
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
from ntkexp.claim.verdicts_page import page
from ntkexp.config.build import Builder
from ntkexp.config.compose import Composer
from ntkexp.mistake import Mistake, NoData, first_line
from ntkexp.records.atomic import (
    finite_json,
    make_folder,
    read_bytes,
    to_text,
    write_atomically,
)
from ntkexp.records.claim import PICTURE, ClaimRecord, Judgement, pair_verdict
from ntkexp.records.folder import package_version
from ntkexp.records.own_files import remove_files
from ntkexp.records.register import (
    RegisterEntry,
    fields_of_look,
    merged_fields,
    outcomes_of,
    refuse_second_choice,
    same_outcome,
)
from ntkexp.report.claims import ClaimFamily, claim_family
from ntkexp.report.tables import format_csv
from ntkexp.text import counted, printable

ROUNDING = 1e-9
"""The relative tolerance when numbers are recomputed from a stored table."""

Entries = Mapping[str, Sequence[RegisterEntry]]


# --- Publish.


def publish(
    folder: Path,
    composer: Composer,
    records: Sequence[ClaimRecord],
    entries: Entries,
    trust: Sequence[str] = (),
) -> list[str]:
    """Write the verdicts on claims into the published folder,
    and return the names of all published claims.

    `records` are the judged claims, and `entries` are all entries of the register.
    Raise if there is nothing to publish, or if a published verdict contradicts its
    tables."""
    builder = composer.builder
    latest = {name: attempts[-1].digest for name, attempts in entries.items()}
    defaults = [record for record in records if record.size == "default"]
    judged = [each for each in defaults if each.digest == latest.get(each.name)]
    published = read_verdicts(folder) if (folder / VERDICTS_FILE).is_file() else []
    if not judged and not published:
        raise Mistake(
            "no claim that stands in the register was judged at its default size; "
            "run `ntkexp claims` first"
        )
    rows: dict[str, dict[str, Any]] = {
        record.name: verdict_fields(record, entries[record.name]) for record in judged
    }

    # Of the claims that were not judged now, keep those whose digest is the latest.
    # verdicts.json may have been edited, so use only names of the register as paths.
    others = {row["name"]: row for row in published if row["name"] in latest}
    others = {name: row for name, row in others.items() if name not in rows}
    kept = {name: row for name, row in others.items() if row["entry"] == latest[name]}
    rows |= kept

    # the published claims that still have a file
    known = set(claim_names(builder.choices))
    claims = {name: read_claim(name, builder) for name in rows if name in known}

    # Draw the pictures of kept claims again. Replace the tables of judged claims, and
    # remove those of outdated claims.
    for name, row in kept.items():
        if name in claims:
            refuse_changed(folder, row, claims[name], entries[name])
            redraw(folder, row, claims[name])
    for record in judged:
        claim = read_claim(record.name, builder)
        replace_tables(folder / record.name, record, claim)
    for name in others:
        if name not in kept:
            remove_tables(folder / name)
    for name, claim in claims.items():
        describe_draws(rows[name], draws_of(claim, composer, trust))
    write_page(folder, rows, claim_family(entries))
    return sorted(rows)


def describe_draws(row: dict[str, Any], draws: Mapping[str, str]) -> None:
    """Add to each look of a published claim what its seeds draw at random."""
    for look, words in draws.items():
        row[look] = {**row[look], "draws": words}


def write_page(
    folder: Path, rows: Mapping[str, dict[str, Any]], family: ClaimFamily
) -> None:
    """Write verdicts.json, README.md and SHA256SUMS."""
    names = sorted(rows)
    write_atomically(folder / VERDICTS_FILE, to_text([rows[name] for name in names]))
    shown = [published_record(folder, rows[name]) for name in names]
    write_atomically(folder / PAGE, page(shown, family))
    files = files_of([rows[name] for name in names])
    write_digests(folder, [file for file in files if (folder / file).is_file()])


def judge_again(
    folder: Path, composer: Composer, entries: Entries
) -> list[tuple[ClaimRecord, str]]:
    """Judge the published tables again, with the current code and the current claims.

    Return each new record with the date of the published verdict. If the specification
    of a look has changed since, the claim has to be run again. Omit such claims.
    """
    if not (folder / VERDICTS_FILE).is_file():
        return []
    known = claim_names(composer.builder.choices)
    records = []
    for row in read_verdicts(folder):
        name = row["name"]
        if name not in known or name not in entries:
            continue
        claim = read_claim(name, composer.builder)
        if not looks_unchanged(claim, row, entries[name]):
            continue
        tables = published_tables(folder, claim)
        looks = stages_of(claim, tables)
        judgements = {
            look: judgement(looks[look], finding, row[look]["draws"])
            for look, finding in judge_tables(looks, tables, claim).items()
        }
        record = replace(
            published_record(folder, row),
            digest=claim.digest,
            statement=claim.statement,
            source=claim.source.words,
            refutes=claim.refutes,
            looks=judgements,
            identity=claim.identity,
        )
        records.append((record, row["date"]))
    return records


def looks_unchanged(
    claim: Claim, row: Mapping[str, Any], attempts: Sequence[RegisterEntry]
) -> bool:
    """Return True if the present claim is registered, and if none of its looks has
    changed since its published verdict."""
    versions = merged_fields(attempts)
    published = [
        fields
        for fields, attempt in zip(versions, attempts, strict=True)
        if attempt.digest == row["entry"]
    ]
    if not published or attempts[-1].digest != claim.digest:
        return False
    return all(
        row[look] is not None
        and fields_of_look(versions[-1], look) == fields_of_look(published[-1], look)
        for look in claim.looks
    )


def published_tables(
    folder: Path, claim: Claim, contents: Mapping[str, bytes] | None = None
) -> dict[str, pd.DataFrame]:
    """Read the published tables of a claim. Raise if the digest of a file does not
    match, or if a table or the picture has invalid content.

    Without `contents`, read the files, and compare their digests if SHA256SUMS exists.
    """
    files = files_of_claim(claim.name, claim.looks)
    if contents is None and (folder / SUMS).is_file():
        contents = read_files(folder, files, read_digests(folder))
    if contents is None:  # without SHA256SUMS, as in old publications
        contents = {file: read_bytes(folder / file) for file in files}
    refuse_active_picture(contents[files[-1]], folder / files[-1])
    tables = {}
    for name, look in claim.looks.items():
        file = f"{claim.name}/{name}.csv"
        tables[name] = read_table(folder / file, contents[file])
        refuse_odd_table(tables[name], columns_of(look), folder / file)
    return tables


def stages_of(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> dict[str, Look]:
    """Return each look at the stage whose seeds are in its table. Raise if the look
    plans no stage with these seeds."""
    stages = {}
    for name, look in claim.looks.items():
        seeds = sorted({*tables[name]["seed"].tolist()})
        if len(seeds) not in look.sizes or seeds != sorted(look.seeds[: len(seeds)]):
            raise Mistake(f"{name}.csv has seeds that the claim did not plan")
        stages[name] = look.at(look.sizes.index(len(seeds)))
    return stages


def judge_tables(
    looks: Mapping[str, Look], tables: Mapping[str, pd.DataFrame], claim: Claim
) -> dict[str, Finding]:
    findings = {name: judge_table(look, tables[name]) for name, look in looks.items()}
    return weigh(findings, claim.protocol)


def replace_tables(folder: Path, record: ClaimRecord, claim: Claim) -> None:
    """Write the claim's picture, and the rows and columns of its tables that rules
    read. Remove earlier tables of other looks."""
    if not (record.path / PICTURE).is_file():
        raise Mistake(
            f"{record.path} has no {PICTURE}; `ntkexp claims {record.name}` draws it"
        )
    remove_tables(folder, keep=[*record.looks])
    make_folder(folder)
    for name, look in claim.looks.items():
        table = read_table(record.path / f"{name}.csv")
        columns = [column for column in table if column in columns_of(look)]
        deciding = table.loc[deciding_rows(look, table), columns]
        if "reason" in deciding and deciding["reason"].isna().all():
            deciding = deciding.drop(columns="reason")
        write_atomically(folder / f"{name}.csv", format_csv(deciding))
    write_atomically(folder / PICTURE, read_bytes(record.path / PICTURE))


def redraw(folder: Path, row: Mapping[str, Any], claim: Claim) -> None:
    """Draw the picture of a published claim again in the present style.

    Keep a picture that shows more than the published tables hold.
    """
    if not claim.picture.has_judged_rows_only or set(looks_of(row)) != set(claim.looks):
        return
    tables = published_tables(folder, claim)
    judged = JudgedClaim(claim.looks, published_record(folder, row), tables)
    write_atomically(folder / claim.name / PICTURE, drawing_of(claim.picture, judged))


def remove_tables(folder: Path, keep: Sequence[str] = ()) -> None:
    """Remove the published files of a claim, and their folder if it is then empty.

    `keep` names the looks whose tables stay. The picture is removed only if `keep` is
    empty.
    """
    files = [file for file in TABLES if file.removesuffix(".csv") not in keep]
    if not keep:
        files.append(PICTURE)
    remove_files(folder.parent, [f"{folder.name}/{file}" for file in files])


def deciding_rows(look: Look, table: pd.DataFrame) -> list[Any]:
    """Return the index of the rows that at least one rule of the look selects."""
    index = {
        row for rule in look.expectation for row in select_rows(table, rule.where).index
    }
    return sorted(index)


def columns_of(look: Look) -> set[str]:
    """Return the columns of the table that the rules
    of a look (statistical test) use."""
    columns = {*ALWAYS}
    if any(getattr(rule, "censored", None) for rule in look.expectation):
        columns.add("censored")
    if any(getattr(rule, "over_examples", False) for rule in look.expectation):
        columns.add(EXAMPLE)
    for rule in look.expectation:
        columns |= {*rule.where, *rule.each, getattr(rule, "along", "")}
    return columns


def draws_of(claim: Claim, composer: Composer, trust: Sequence[str]) -> dict[str, str]:
    """Describe, for each look (statistical test), what a seed draws at random. Omit
    looks whose data are missing."""
    words: dict[str, str] = {}
    for name, look in claim.looks.items():
        with suppress(NoData):
            words[name] = drawn_by(look, composer, trust)
    return words


def published_record(folder: Path, row: Mapping[str, Any]) -> ClaimRecord:
    """Return a published verdict as a claim's record.
    The claim's runs need not exist any more."""
    return ClaimRecord(
        path=folder / row["name"],
        name=row["name"],
        digest=row["entry"],
        size="default",
        statement=row["statement"],
        source=row["source"],
        refutes="",  # only the claim's own file has it
        command=row["command"],
        looks={name: Judgement.of_fields(row[name]) for name in looks_of(row)},
        identity=row.get("identity", False),
    )


def verdict_fields(
    record: ClaimRecord, attempts: Sequence[RegisterEntry]
) -> dict[str, Any]:
    """Return the published fields of a claim, with date,
    version and commit from the register.

    Raise if the register contains no outcome equal to the outcome of this record. Raise
    also if a main look with the same specification came to another verdict before."""
    entry = attempts[-1]
    fields: dict[str, Any] = {
        key: finite_json(value) for key, value in record.json_fields.items()
    }
    recorded = look_on_record(record.looks_fields, entry)
    if recorded is None:
        raise Mistake(
            f"{record.path}: the register contains no look with this outcome; run "
            f"`ntkexp claims {record.name}`"
        )
    refuse_second_choice(attempts, recorded)
    own_fields = ("name", "verdict", "figure", "interval", "p", "expected")
    return {
        **{key: fields[key] for key in own_fields},
        "identity": record.identity,
        "control": fields.get("control"),
        "second": fields["second"],
        "main": fields["main"],
        "entry": entry.digest,
        "statement": record.statement,
        "source": record.source,
        "command": f"ntkexp claims {record.name}",
        "date": recorded.get("date"),
        "version": recorded.get("version", package_version()),
        "commit": recorded.get("commit"),
        "machine": (
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        ),
    }


def look_on_record(
    looks: Mapping[str, Any], entry: RegisterEntry, **circumstances: Any
) -> Mapping[str, Any] | None:
    """Return the last outcome in a register entry that equals the outcome of `looks`.

    Only outcomes at default size count. `circumstances` are fields, such as the date,
    that must be equal as well. Return None if there is no such outcome."""
    outcome = outcomes_of(looks)
    recorded: Mapping[str, Any]
    for recorded in reversed(entry.looks):
        is_same = all(recorded[key] == value for key, value in circumstances.items())
        is_default = recorded["size"] == "default"
        if is_default and is_same and same_outcome(recorded["looks"], outcome):
            return recorded
    return None


# --- Check a publication.


def check(
    folder: Path,
    composer: Composer,
    entries: Entries,
    trust: Sequence[str] = (),
    names: Sequence[str] = (),
    *,
    draws: bool = True,
) -> list[str]:
    """Judge published tables again, and return the names of the claims.

    Raise at the first disagreement. The folder must hold exactly the claims `names`, or
    the claims that `required_claims` returns if there are no `names`. The check of the
    described random draws composes every run. With `draws=False`, skip it."""
    builder = composer.builder
    digests = read_digests(folder)
    rows = parse_verdicts(
        read_files(folder, [VERDICTS_FILE], digests)[VERDICTS_FILE], folder
    )
    published = [row["name"] for row in rows]
    for row in rows:
        refuse_other_entry(folder, row, builder, entries)
    refuse_other_set(
        folder, published, required_claims(published, builder, entries, names)
    )
    refuse_other_files(folder, files_of(rows), digests)
    contents = read_files(folder, files_of(rows), digests)
    for row in rows:
        claim = read_claim(row["name"], builder)
        refuse_changed(folder, row, claim, entries[claim.name], contents)
        if draws:
            refuse_other_draws(folder, row, draws_of(claim, composer, trust))
    shown = [published_record(folder, row) for row in rows]
    if contents[PAGE] != page(shown, claim_family(entries)).encode():
        raise Mistake(
            f"{folder / PAGE} is not the page of these verdicts among "
            f"{counted(len(entries), 'claim')} in the register; "
            f"`ntkexp claims publish {folder}` writes it"
        )
    return published


def place_of(folder: Path, row: Mapping[str, Any]) -> str:
    return printable(f"{folder / VERDICTS_FILE}: {row['name']}")


def refuse_other_entry(
    folder: Path, row: Mapping[str, Any], builder: Builder, entries: Entries
) -> None:
    """Raise if a verdict's claim is not in the register,
    or has changed since the verdict."""
    name = row["name"]
    where = place_of(folder, row)
    if name not in claim_names(builder.choices) or not entries.get(name):
        raise Mistake(f"{where} is not a claim of the register")
    standing = entries[name][-1].digest
    if not row["entry"] == read_claim(name, builder).digest == standing:
        judged = printable(row["entry"])
        raise Mistake(
            f"{where} was judged as {judged}, and stands as {standing} in the register; "
            "run it again"
        )


def required_claims(
    published: Sequence[str], builder: Builder, entries: Entries, names: Sequence[str]
) -> list[str]:
    """Return the claims that a publication must hold.

    If `names` is not empty, return it. Otherwise return all claims whose latest version
    was judged at default size, and that share a register with a claim in
    `published`."""
    if names:
        return sorted({*names})
    folder_of = {
        name: builder.choices.file("claim", name).parent
        for name in claim_names(builder.choices)
    }
    registers = {folder_of[name] for name in published}
    judged = [
        name
        for name in entries
        if any(look["size"] == "default" for look in entries[name][-1].looks)
    ]
    return sorted(name for name in judged if folder_of.get(name) in registers)


def refuse_other_set(
    folder: Path, published: Sequence[str], required: Sequence[str]
) -> None:
    """Raise if a publication lacks required claims, holds other claims,
    or is not sorted."""
    if not published:
        raise Mistake(
            f"{folder / VERDICTS_FILE} holds no verdict; `ntkexp claims publish {folder}` writes them"
        )
    if missing := sorted({*required} - {*published}):
        raise Mistake(
            f"{folder / VERDICTS_FILE} lacks {counted(len(missing), 'claim')} that must be there, "
            f"such as {missing[0]}; publish all that were judged, or name those that you mean: "
            f"`ntkexp claims check {folder} {published[0]}`"
        )
    if other := sorted({*published} - {*required}):
        raise Mistake(
            f"{folder / VERDICTS_FILE} has a verdict of {other[0]}, "
            f"which is none of {', '.join(required)}"
        )
    if [*published] != sorted(published):
        raise Mistake(
            f"{folder / VERDICTS_FILE} is not in the order of names; "
            f"`ntkexp claims publish {folder}` writes it"
        )


def refuse_other_draws(
    folder: Path, row: Mapping[str, Any], draws: Mapping[str, str]
) -> None:
    for look, words in draws.items():
        if row[look]["draws"] != words:
            raise Mistake(
                f"{place_of(folder, row)}: the description of the seeds of {look} is wrong; the right one is: {words}"
            )


def refuse_changed(
    folder: Path,
    row: Mapping[str, Any],
    claim: Claim,
    attempts: Sequence[RegisterEntry],
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Raise if the tables, the claim or the register contradict a verdict.

    Without `contents`, read the files of the claim,
    and compare their digests if SHA256SUMS exists."""
    where = place_of(folder, row)
    if [*claim.looks] != looks_of(row):
        raise Mistake(
            f"{where} has the looks {', '.join(looks_of(row))}, other than its claim"
        )
    tables = published_tables(folder, claim, contents)
    try:
        with np.errstate(all="ignore"):
            difference = next(differences(claim, tables, row), None)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise Mistake(
            f"{where} cannot be judged again: {printable(first_line(error))}"
        ) from error
    if difference:
        raise Mistake(f"{where}: {printable(difference)}")
    looks = {name: row[name] for name in claim.looks}
    circumstances = {key: row[key] for key in ("date", "version", "commit")}
    recorded = look_on_record(looks, attempts[-1], **circumstances)
    if recorded is not None:
        refuse_second_choice(attempts, recorded)
    else:
        raise Mistake(
            f"{where}: the register contains no look with this verdict, date and version"
        )


def differences(
    claim: Claim, tables: Mapping[str, pd.DataFrame], row: Mapping[str, Any]
) -> Iterator[str]:
    """Judge the tables of a claim again, and yield each difference
    from the published verdict."""
    try:
        looks = stages_of(claim, tables)
    except Mistake as mistake:
        yield str(mistake)
        return
    for name, look in looks.items():
        if len(deciding_rows(look, tables[name])) < len(tables[name]):
            yield f"{name}.csv has rows that decide nothing"

    findings = judge_tables(looks, tables, claim)
    verdict = pair_verdict(findings["main"].verdict, findings["second"].verdict)
    if row["verdict"] != verdict:
        yield f"verdict is {row['verdict']}, and the tables say {verdict}"
    for name, finding in findings.items():
        yield from differences_of_look(name, looks[name], finding, row[name])

    # the fields that repeat values of the main look and of the claim
    repeated = {
        key: row["main"][key] for key in ("figure", "interval", "p", "expected")
    }
    repeated["statement"] = claim.statement
    repeated["source"] = claim.source.words
    repeated["command"] = f"ntkexp claims {claim.name}"
    repeated["identity"] = claim.identity
    for key, value in repeated.items():
        if row.get(key) != value:
            yield f"{key} is {row[key]}, and should be {value}"


def differences_of_look(
    name: str, look: Look, finding: Finding, published: Mapping[str, Any]
) -> Iterator[str]:
    numbers = (finding.figure, finding.low, finding.high)
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    size = max(finite, default=0.0)
    for key, value in judgement(look, finding, draws="").fields.items():
        if key != "draws" and not agree(published[key], value, size):
            yield (
                f"{name} has the {key} {published[key]}, and its table says {finite_json(value)}"
            )


def agree(published: Any, judged: Any, size: float = 0.0) -> bool:
    """Return whether a published field agrees with the recomputed one.

    Numbers may differ by `ROUNDING`, relative to themselves or to `size`. `size` is the
    largest absolute value of the figure and of the ends of its interval. None agrees
    with NaN and ±∞, which JSON lacks.

    >>> agree(None, float("nan")), agree(1.0, 1.0 + 1e-12), agree(1.0, 1.1)
    (True, True, False)
    >>> agree(2e-15, 3e-15, 3e-15)
    False
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
