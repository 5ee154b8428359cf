"""`ntkexp claims`: test claims of papers by experiments, and show the verdicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import (
    OUTPUTS,
    ConfigDir,
    Engine,
    Quiet,
    RetryFailed,
    Trust,
    Workers,
    complete_claims,
    ensure_writable,
    interruptible,
    options,
    sigterm_as_interrupt,
    trusted,
    write_json,
)
from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.folder import command
from ntkexp.report.tables import Column, Table, format_text
from ntkexp.text import counted, rate, short

if TYPE_CHECKING:
    from ntkexp.claim.conduct import Workshop
    from ntkexp.claim.read import Size
    from ntkexp.config.build import Builder
    from ntkexp.config.choices import Choices
    from ntkexp.config.compose import Composer
    from ntkexp.records.claim import ClaimRecord
    from ntkexp.records.register import RegisterEntry


CLAIMS_FOLDER = "claims"


def claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list|judge|register|publish|check|NAME]...",
            help=(
                "Names of claims; all if none is given. list: show all claims; judge: show the "
                "error rates of the judging rules; register NAME: record the current version of "
                "a claim before it is run; publish FOLDER: write the tables and verdicts of "
                "judged claims; check FOLDER: judge published tables again, and compare all "
                "files with their digests."
            ),
            autocompletion=complete_claims,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Use small sizes and few seeds; more claims remain undecided.",
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="Use the larger sizes of claims that define them."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The folder of outputs; claims are stored in its folder claims/.",
        ),
    ] = OUTPUTS,
    workers: Workers = None,
    engine: Engine = "local",
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
    attempts: Annotated[
        bool,
        typer.Option(
            "--attempts",
            help="With list: show every registered version, with its test results.",
        ),
    ] = False,
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help=(
                "With register: why the claim was changed. With publish: why the published tables "
                "are judged again."
            ),
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as a JSON list.")
    ] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Test claims of papers by experiments.

    Each claim is then supported, refuted or undecided.
    """
    names = names or []
    trust = trust or []
    refuse_misplaced(names, attempts=attempts, reason=reason)
    claims_folder = out.expanduser().absolute() / CLAIMS_FOLDER
    if attempts:
        show_attempts(names[1:], config_dir, claims_folder, as_json=as_json)
        return
    if names == ["list"]:
        show_list(config_dir, as_json=as_json)
        return
    if names == ["judge"]:
        show_trials(as_json=as_json)
        return
    if names[:1] in (["publish"], ["check"], ["register"]):
        from ntkexp.config.compose import composer

        composed = composer(config_dir, trust)
        if names[0] == "register":
            register(names[1:], composed.builder, claims_folder, reason)
        else:
            publish_or_check(names, composed, trust, claims_folder, reason)
        return
    size = size_of(quick=quick, full=full)
    from ntkexp.engine.base import choose

    chosen = choose(engine, workers)
    chosen.limit_threads()  # must precede the import of torch
    from ntkexp.claim.conduct import Workshop
    from ntkexp.config.compose import composer
    from ntkexp.report.progress import progress_listener

    repeat = options(out, trust, config_dir)
    ensure_writable(out.expanduser())
    composed = composer(config_dir, trust)
    with (
        sigterm_as_interrupt(),
        interruptible(lambda: "; the same command continues from the last checkpoints"),
    ):
        workshop = Workshop(
            chosen, progress_listener(quiet), trusted(trust), retry_failed
        )
        outcomes = list(
            judged(names, size, composed, workshop, claims_folder, repeat, quiet=quiet)
        )
    records = [record for record in outcomes if record is not None]
    entered = registered(composed.builder.choices, claims_folder)
    print_records(records, entered, quiet=quiet, as_json=as_json)
    size_option = [] if size == "default" else [f"--{size}"]
    page = write_page(
        claims_folder, entered, command("claims", names, [*size_option, *repeat])
    )
    if not (quiet or as_json):
        sys.stdout.write(f"{page}\n")
    all_judged = len(records) == len(outcomes)
    raise typer.Exit(0 if all_judged else 1)


def refuse_misplaced(names: Sequence[str], *, attempts: bool, reason: str) -> None:
    """Raise if an option does not fit the first word."""
    if attempts and names[:1] != ["list"]:
        raise WrongArgument(
            "--attempts goes with list: `ntkexp claims list --attempts`", "attempts"
        )
    if reason and names[:1] not in (["register"], ["publish"]):
        raise WrongArgument(
            "--reason goes with register: `ntkexp claims register NAME --reason=TEXT`",
            "reason",
        )


def size_of(*, quick: bool, full: bool) -> Size:
    if quick and full:
        raise WrongArgument(
            "--quick and --full are two sizes; give one of them", "quick", "full"
        )
    if quick:
        return "quick"
    return "full" if full else "default"


def write_page(
    folder: Path, entries: Mapping[str, Sequence[RegisterEntry]], repeat: str
) -> Path:
    """Write a page about the claims in a folder whose current version was judged."""
    from ntkexp.report.page.build import write_claims

    current = current_records(folder, entries)
    return write_claims(current, folder.parent / "report", repeat, entries)


def judged(
    names: Sequence[str],
    size: Size,
    composer: Composer,
    workshop: Workshop,
    out: Path,
    repeat: Sequence[str],
    *,
    quiet: bool,
) -> Iterator[ClaimRecord | None]:
    """Run and judge claims. Yield the record of each claim,
    or None if it cannot be judged.

    All claims are read before the first one is run. Each claim is registered before it
    is run, and the register records the result. If a claim raises an error, print the
    error and continue. If there is only one claim, raise its error."""
    from ntkexp.claim.conduct import (
        circumstances,
        look_as_planned,
        plan_claim,
        register_claim,
    )
    from ntkexp.claim.read import claim_names, read_claim

    read = [
        read_claim(name, composer.builder, size)
        for name in names or claim_names(composer.builder.choices)
    ]
    for claim in read:
        try:
            # raise for an invalid claim before it is registered
            plan_claim(claim, composer, out, workshop.trust, repeat)
            register = register_claim(claim.name, composer.builder, out)
            for record in look_as_planned(claim, composer, out, workshop, size, repeat):
                register.record(record, circumstances())
        except Mistake as mistake:
            if len(read) == 1:
                raise
            sys.stderr.write(f"{claim.name}: {mistake}\n")
            yield None
            continue
        if not quiet and len(read) > 1:
            sys.stderr.write(f"{line(record)}\n")
        if size == "default":
            warn_of_second_choice(register.attempts(claim.name))
        yield record


def warn_of_second_choice(attempts: Sequence[RegisterEntry]) -> None:
    """Warn if the latest judgement measured an unchanged look again, with other
    numbers.

    The first verdict stands. Holm's correction counts both looks if they are main
    looks."""
    from ntkexp.records.register import describe_repetition, refuse_second_choice

    try:
        refuse_second_choice(attempts, attempts[-1].looks[-1])
        warning = describe_repetition(attempts)
    except Mistake as mistake:
        warning = str(mistake)
    if warning:
        sys.stderr.write(f"{warning}\n")


# --- The register: every version of every claim, with all its test results.


def register(names: Sequence[str], builder: Builder, out: Path, reason: str) -> None:
    from ntkexp.claim.conduct import register_claim

    if not names:
        raise Mistake(
            "register: name the claim, or several; `ntkexp claims list` shows them"
        )
    for name in names:
        log = register_claim(name, builder, out, reason)
        if (entry := log.latest_entry(name)) is not None:
            sys.stdout.write(
                f"{name} is registered as {entry.digest} since {entry.date[:10]}, in {log.path}\n"
            )


def publish_or_check(
    names: Sequence[str],
    composer: Composer,
    trust: list[str],
    out: Path,
    reason: str,
) -> None:
    """Publish the tables and verdicts in a folder,
    or check a publication by judging its tables again."""
    from ntkexp.claim.publish import check, publish

    if len(names) < 2 or (names[0] == "publish" and len(names) > 2):
        raise Mistake(
            f"{names[0]}: name the folder, such as `ntkexp claims {names[0]} docs/claims`"
        )
    folder = Path(names[1]).expanduser()
    choices = composer.builder.choices
    if names[0] == "publish":
        records = current_records(out, registered(choices, out))
        if reason:
            records += judged_again(folder, composer, out, records, reason)
        entries = registered(choices, out)
        claim_names = publish(folder, composer, records, entries, trust)
        publish_registers(choices, out, claim_names)
        sys.stdout.write(
            f"{folder}: {counted(len(claim_names), 'claim')} of {len(entries)} in the register\n"
        )
    else:
        entries = registered(choices, out)
        claim_names = check(folder, composer, entries, trust, names[2:])
        sys.stdout.write(
            f"{folder}: {counted(len(claim_names), 'claim')} judged again, with the same verdicts\n"
        )


def judged_again(
    folder: Path,
    composer: Composer,
    out: Path,
    records: Sequence[ClaimRecord],
    reason: str,
) -> list[ClaimRecord]:
    """Judge the published tables again, and write changed outcomes to the register.

    Skip claims with a current record in `out`."""
    from ntkexp.claim.conduct import circumstances
    from ntkexp.claim.publish import judge_again
    from ntkexp.records.register import Register

    choices = composer.builder.choices
    entries = registered(choices, out)
    current = {
        record.name
        for record in records
        if record.size == "default" and is_current(record, entries.get(record.name, []))
    }
    found = []
    for record, date in judge_again(folder, composer, entries):
        if record.name not in current:
            register = Register.of_claim_file(choices.file("claim", record.name), out)
            register.record(record, circumstances(), date, reason)
            found.append(record)
    return found


def publish_registers(choices: Choices, out: Path, names: Sequence[str]) -> None:
    """Copy the register lines of published claims from `out` to the folders of their
    claim files."""
    from ntkexp.records.register import REGISTER, Register

    names_by_folder: dict[Path, set[str]] = {}
    for name in names:
        names_by_folder.setdefault(choices.file("claim", name).parent, set()).add(name)
    for folder, own in names_by_folder.items():
        Register.read(out / REGISTER).publish(folder, own)


def registered(choices: Choices, out: Path) -> dict[str, list[RegisterEntry]]:
    """Return the registered versions of each claim by its name, the oldest first,
    together with their results."""
    from ntkexp.records.register import Register

    registers: dict[Path, list[RegisterEntry]] = {}
    entries = {}
    for name in choices.options("claim"):
        file = choices.file("claim", name)
        if file.parent not in registers:  # the user's claims are in a separate register
            registers[file.parent] = Register.of_claim_file(file, out).attempts()
        entries[name] = [
            attempt for attempt in registers[file.parent] if attempt.name == name
        ]
    return {name: attempts for name, attempts in entries.items() if attempts}


def current_records(
    folder: Path, entries: Mapping[str, Sequence[RegisterEntry]]
) -> list[ClaimRecord]:
    """Return the judged claims in a folder, each in its latest registered version."""
    from ntkexp.records.claim import claim_records

    return claim_records(
        folder, lambda record: is_current(record, entries.get(record.name, []))
    )


def is_current(record: ClaimRecord, attempts: Sequence[RegisterEntry]) -> bool:
    """Return True if the record belongs to the latest registered version of its claim,
    or if the claim is not registered."""
    return not attempts or record.digest in attempts[-1].sizes.values()


def show_attempts(
    names: Sequence[str], config_dir: Path | None, out: Path, *, as_json: bool
) -> None:
    """Print every registered version of the claims, with the results of its tests."""
    from ntkexp.config.choices import Choices, config_folders
    from ntkexp.report.claims import tabulate_attempts

    entered = registered(Choices(config_folders(config_dir)), out)
    for name in names:
        if name not in entered:
            raise Mistake(f"'{name}' is not registered{nearest(name, entered)}")
    attempts = [attempt for name in names or entered for attempt in entered[name]]
    if as_json:
        write_json([attempt.fields for attempt in attempts])
    else:
        sys.stdout.write(f"{format_text(tabulate_attempts(attempts))}\n")


# --- Output on the terminal: verdicts, the list of claims,
# and error rates of the judging rules.


def print_records(
    records: Sequence[ClaimRecord],
    entries: Mapping[str, Sequence[RegisterEntry]],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    from ntkexp.report.claims import claim_family, format_claims, summarise_claims

    family = claim_family(entries)
    if as_json:
        write_json([record.json_fields for record in records])
    elif not quiet:
        sys.stdout.write(f"{format_claims(records, family)}\n\n{notes(records)}")
        sys.stdout.write(f"{summarise_claims(records, family)}\n")


def line(record: ClaimRecord) -> str:
    """Return the verdict on a claim in one line."""
    from ntkexp.report.claims import interval, outlook, shortened

    main = record.main
    verdict = f"{record.verdict}, {short(main.figure)} ({interval(main)}), expected {shortened(main.expected)}"
    return f"{record.name}: {'; '.join(filter(None, [verdict, outlook(record)]))}"


def notes(records: Sequence[ClaimRecord]) -> str:
    """Return a line for each test that has a note or is undecided.

    The line contains the note, and the number of seeds
    that would probably decide the test."""
    from ntkexp.report.claims import outlook

    lines = []
    for record in records:
        for name, judged in record.looks.items():
            test = record.name if name == "main" else f"{record.name}, {name}"
            advice = "" if name == "control" else outlook(record, name)
            if note := "; ".join(filter(None, [judged.note, advice])):
                lines.append(f"{test}: {note}\n")
    return "".join([*lines, "\n"]) if lines else ""


def show_list(config_dir: Path | None, *, as_json: bool) -> None:
    """Print every claim with its statement and its source."""
    from ntkexp.config.choices import Choices, config_folders
    from ntkexp.config.plain_yaml import read_yaml

    choices = Choices(config_folders(config_dir))
    rows = []
    for name in choices.options("claim"):
        tree = read_yaml(choices.file("claim", name))
        source = tree.get("source")
        paper = (
            ", ".join(map(str, source.values()))
            if isinstance(source, dict)
            else str(source)
        )
        rows.append(
            {"name": name, "statement": str(tree.get("statement")), "source": paper}
        )
    if as_json:
        write_json(rows)
    else:
        sys.stdout.write(
            "".join(
                f"{row['name']}\n    {row['statement']}\n    {row['source']}\n"
                for row in rows
            )
        )


def show_trials(*, as_json: bool) -> None:
    """Print the error rates and power of each judging rule on simulated tables
    with known truth."""
    from ntkexp.claim.simulation import (
        DESIGNS,
        SIMULATED_RULES,
        try_design,
        try_judging,
    )

    error_rates = [*map(try_judging, SIMULATED_RULES), *map(try_design, DESIGNS)]
    if as_json:
        write_json([trial.fields for trial in error_rates])
        return
    rates = [
        Column(name, spell=rate)
        for name in ("false verdicts", "support where true", "refute where false")
    ]
    columns = (Column("rule", number=False), Column("tables"), *rates)
    sys.stdout.write(
        f"{format_text(Table(columns, tuple(map(astuple, error_rates))))}\n"
    )
