"""Test a claim from start to end: register it, plan and run its trainings, measure,
judge, and write the result.

A look is one statistical test. A claim has up to three: the main look, the control and
the second look.

register.jsonl                   statements and outcomes of all versions that are not published yet
<name>-<digest>/claim.json       the fields that the digest covers
                <look>.csv       the judged table, in full precision
                verdict.json     the verdict (`ntkexp.records.claim`)
                picture.svg      the picture, with its caption and table in picture.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from ntkexp.claim.claim import Claim
from ntkexp.claim.judge import Finding, judge_protocol
from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.look import Look, without_files
from ntkexp.claim.quantity import Measured
from ntkexp.claim.read import read_sizes
from ntkexp.claim.trial import AbstractTrial, SideBySide
from ntkexp.config.build import Builder, admit
from ntkexp.config.compose import Composer, compose
from ntkexp.data.base import AbstractSource, examples_stream
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Ended,
    Ending,
    ReportEvent,
    Task,
    run_jobs,
)
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import digest as file_digest, files_of
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import (
    Json,
    read_sealed,
    sealed_text,
    to_text,
    write_atomically,
)
from ntkexp.records.claim import (
    FIXED_POOL,
    PICTURE,
    TIMINGS,
    VERDICT,
    WHOLE,
    ClaimRecord,
    Exhibit,
    Judgement,
    read_claim_record,
    write_claim,
    write_exhibit,
)
from ntkexp.records.folder import command, package_version, results_version
from ntkexp.records.register import Register
from ntkexp.records.results import Seconds, total_seconds, write_timings
from ntkexp.report.analysis.tables import drawn_words, tabulate
from ntkexp.report.run import Run, load_tables
from ntkexp.report.tables import format_csv
from ntkexp.run.environment import Clock, commit
from ntkexp.sweep.definition import Definition
from ntkexp.sweep.jobs import Conductor, JobProgress, RemainingTime
from ntkexp.sweep.plan import (
    Plan,
    RunStatus,
    plan as sweep_plan,
    record,
    runs_to_do,
    statuses,
)

# --- The register of claims.


def register_claim(
    name: str, builder: Builder, out: Path, reason: str = ""
) -> Register:
    """Enter a claim at all its sizes into the register, and return the register. If the
    claim has changed since its last entry, `reason` must be given."""
    sizes = read_sizes(name, builder)
    register = Register.of_claim_file(builder.choices.file("claim", name), out)
    digests = {size: claim.digest for size, claim in sizes.items()}
    register.enter(
        name, digests, sizes["default"].registered_fields, reason, circumstances()
    )
    return register


def circumstances() -> dict[str, Json]:
    """Return the current date, package version and commit,
    for an entry of the register."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": package_version(),
        "commit": commit(),
    }


# --- Jobs of workers. A job measures one seed of a trial, and writes the rows to a file
# with a checksum. If the checksum is right, the job is not run again.
#
#     trials/<name>-<digest>-s<seed>.json      {"trial": …, "seed": …, "rows": [{…}, …], "seal": …}
#
# A trial uses one thread on every engine, so that its results are identical
# to the last bit.


@dataclass(frozen=True)
class TrialJob(AbstractJob):
    """A job that measures one seed of a trial."""

    loads = ("torch._dynamo", "ntkexp.limit.fused.run")
    """Modules that workers import in advance: numba, and modules that the first torch
    optimizer needs. Otherwise every job would import them, which takes 2 s per seed."""

    fields: dict[str, Any]
    seed: int
    folder: str
    trust: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The class, a digest of all inputs of the trial, and the seed."""
        kind = str(self.fields["_target_"]).rpartition(".")[2].lower()
        content = {
            "trial": without_files(self.fields),
            "results_version": results_version,
        }
        if digests := self.digests:
            content["files"] = digests
        digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        return f"{kind}-{digest}-s{self.seed}"

    @property
    def digests(self) -> list[str]:
        """The digests of the data files that the trial's settings name, such as
        data.path=my.csv."""
        settings = []
        for value in self.fields.values():
            if isinstance(value, list | tuple):
                settings += [
                    word for word in value if isinstance(word, str) and "=" in word
                ]
        paths = [path_in(setting) for setting in settings]
        if not any(path and Path(path).expanduser().exists() for path in paths):
            return []
        return [
            file_digest(file) for file in files_of(compose(settings, None, self.trust))
        ]

    @property
    def file(self) -> Path:
        return Path(self.folder) / "trials" / f"{self.name}.json"

    @property
    def timings(self) -> Path:
        return self.file.with_suffix(".timings.csv")

    @property
    def rows(self) -> list[dict[str, Any]] | None:
        """The stored rows of the trial, or None if their file is missing or damaged."""
        try:
            rows: list[dict[str, Any]] = read_sealed(self.file, self.name)["rows"]
        except Mistake:
            return None
        return rows

    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        if self.rows is not None:
            return "found"
        import torch  # noqa: PLC0415  slow to import

        torch.set_num_threads(1)
        trial = Builder(admit(self.trust)).component(
            self.fields, (AbstractTrial,), "trial"
        )
        assert isinstance(trial, AbstractTrial)
        clock = Clock()
        with clock.times("trial"):
            rows = [dict(row) for row in trial.rows(self.seed)]
        write_timings(self.timings, clock.parts)
        fields = {"trial": without_files(self.fields), "seed": self.seed, "rows": rows}
        write_atomically(self.file, sealed_text(fields, self.name))
        return "done"


def path_in(setting: str) -> str:
    """Return the value of a setting without quotes and without a name after a colon.

    >>> path_in("data.path='my.csv:label'")
    'my.csv'
    """
    value = setting.partition("=")[2]
    return value.partition(":")[0].strip("'\"")


# --- Plan the runs and trials of all statistical tests (looks) of a claim. Runs that
# several looks share are planned once.


@dataclass(frozen=True)
class PlannedLook:
    """A statistical test (look) with its planned sweeps, by name,
    and the jobs of its trial."""

    look: Look
    plans: Mapping[str, Plan]
    trials: tuple[TrialJob, ...]
    trust: tuple[str, ...] = ()

    @property
    def seconds(self) -> Seconds:
        return seconds_of(self.plans.values(), self.trials)


@dataclass(frozen=True)
class PlannedClaim:
    """A claim whose runs and trials have been composed and checked."""

    claim: Claim
    out: Path
    looks: Mapping[str, PlannedLook]
    options: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> Plan:
        """The runs of all statistical tests (looks), merged into one sweep."""
        name = self.claim.name
        plans = [plan for look in self.looks.values() for plan in look.plans.values()]
        runs = tuple(run for plan in plans for run in plan.runs)
        definition = Definition(name, {}, (), (), (), (name,), self.options)
        return Plan(definition, self.out, runs)

    @property
    def trials(self) -> tuple[TrialJob, ...]:
        by_name = {job.name: job for look in self.looks.values() for job in look.trials}
        return tuple(by_name.values())

    @property
    def folder(self) -> Path:
        return self.out / self.claim.folder

    @property
    def seconds(self) -> dict[str, Seconds]:
        """The seconds of the claim and of each statistical test (look). If several
        looks share a run, it counts for each look."""
        total = seconds_of([self.whole], self.trials)
        return {WHOLE: total} | {
            name: look.seconds for name, look in self.looks.items()
        }


def seconds_of(plans: Iterable[Plan], trials: Iterable[TrialJob]) -> Seconds:
    """Return the time of all runs and trials. A run of several plans counts once."""
    folders = [plan.folder(run).path for plan in plans for run in plan.distinct]
    files = [folder / "timings.csv" for folder in dict.fromkeys(folders)]
    files += [job.timings for job in trials]
    return sum(map(total_seconds, files), start=Seconds(0.0, 0.0))


def plan_claim(
    claim: Claim,
    composer: Composer,
    out: Path,
    trust: Sequence[str] = (),
    options: Sequence[str] = (),
) -> PlannedClaim:
    """Compose all runs of a claim, and create a job for every seed of its trials.

    Raise if a run is invalid, or if the runs lack the numbers
    that a look (statistical test) measures."""
    looks = {}
    for name, look in claim.looks.items():
        plans = {
            run: sweep_plan(definition, composer, out)
            for run, definition in look.runs_now.items()
        }
        jobs: tuple[TrialJob, ...] = ()
        if look.trial is not None:
            fields = look.trial.fields()
            jobs = tuple(
                TrialJob(fields, seed, str(out), tuple(trust))
                for seed in look.seeds_now
            )
        looks[name] = PlannedLook(look, plans, jobs, tuple(trust))
    for look in claim.looks.values():
        if look.trial is None:
            look.quantity.refuse_early()
    return PlannedClaim(claim, out, looks, tuple(options))


# --- Run the missing runs and trials. Finished ones are kept,
# and interrupted ones are continued.


@dataclass(frozen=True)
class Workshop:
    """The means to run claims: an engine that executes runs, a progress display, and
    the names of trusted packages."""

    engine: AbstractEngine
    progress: AbstractProgress
    trust: tuple[str, ...] = ()
    retry_failed: bool = False


def carry_out(planned: PlannedClaim, workshop: Workshop) -> Mapping[str, RunStatus]:
    """Run the missing runs and trials of a claim. Return the status of each run."""
    whole = planned.whole
    before = statuses(whole, whole.event_log.failures(), {})
    missing = runs_to_do(whole, before, retry_failed=workshop.retry_failed)
    ended: dict[str, Ended] = {}
    if missing:
        # do not draw the pictures of single runs; they are drawn on demand
        conductor = Conductor(
            whole, workshop.engine, workshop.progress, workshop.trust, pictures=False
        )
        conductor.conduct(missing)
        ended = conductor.ended
    carry_out_trials(planned, workshop)
    return statuses(whole, whole.event_log.failures(), ended)


def look_as_planned(
    claim: Claim,
    composer: Composer,
    out: Path,
    workshop: Workshop,
    size: str,
    options: Sequence[str] = (),
) -> Iterator[ClaimRecord]:
    """Run and judge a claim stage by stage, with more seeds at each stage, until all of
    its statistical tests (looks) are decided. Yield the record of each stage."""
    claim = claim.with_looks({name: look.at(0) for name, look in claim.looks.items()})
    while True:
        planned = plan_claim(claim, composer, out, workshop.trust, options)
        record = conclude(planned, carry_out(planned, workshop), size)
        yield record
        following = claim.with_looks(
            {
                name: look.after(record.looks[name].verdict)
                for name, look in claim.looks.items()
            }
        )
        if following.looks == claim.looks:
            return
        claim = following


def carry_out_trials(planned: PlannedClaim, workshop: Workshop) -> None:
    """Run the missing trials. At the first failure,
    raise and start no further trial."""
    name = planned.claim.name
    missing = [job for job in planned.trials if job.rows is None]
    if not missing:
        return
    seconds = {job.name: 1.0 for job in missing}
    clock = RemainingTime(seconds, workshop.engine.workers, prior_seconds=0.0)
    total = len(planned.trials)
    jobs = JobProgress(workshop.progress, clock, total, total - len(missing))
    jobs.start(name)
    logs = str(planned.out / "sweeps")
    try:
        tasks = (Task(job.name, job, logs) for job in missing)
        with closing(run_jobs(workshop.engine, tasks)) as events:
            for event in events:
                jobs.update(event)
                if isinstance(event, Ended) and event.how not in {"done", "found"}:
                    reason = event.reason or "no reason given"
                    raise Mistake(f"{name}: {event.name} {event.how}: {reason}")
    finally:
        workshop.progress.stop()


# --- Measure and judge a claim, and write the result.


def conclude(
    planned: PlannedClaim, statuses: Mapping[str, RunStatus], size: str
) -> ClaimRecord:
    """Measure and judge all statistical tests (looks) of a claim,
    and write the result."""
    claim = planned.claim
    measured = {name: measure(look, statuses) for name, look in planned.looks.items()}
    tables, findings = judge_protocol(claim.protocol, measured)
    judgements = {
        name: judgement(claim.looks[name], finding, measured[name].draws)
        for name, finding in findings.items()
    }
    size_option = [] if size == "default" else [f"--{size}"]
    claim_record = ClaimRecord(
        path=planned.folder,
        name=claim.name,
        digest=claim.digest,
        size=size,
        statement=claim.statement,
        source=claim.source.words,
        refutes=claim.refutes,
        command=command("claims", [claim.name], [*size_option, *planned.options]),
        looks=judgements,
        identity=claim.identity,
    )
    write_result(planned, claim_record, tables)
    return claim_record


def write_result(
    planned: PlannedClaim, record: ClaimRecord, tables: Mapping[str, pd.DataFrame]
) -> None:
    """Write the files of a claim's folder. Write the record last, so that every folder
    with a record is complete.

    If another stage was judged before, remove its record first. A kill would leave it
    beside the tables of this stage."""
    claim = planned.claim
    folder = planned.folder
    if differs(record):
        (folder / VERDICT).unlink(missing_ok=True)
    write_atomically(folder / "claim.json", to_text(claim.fields))
    for name, table in tables.items():
        write_atomically(folder / f"{name}.csv", format_csv(table))
    draw(claim.picture, JudgedClaim(claim.looks, record, tables))
    write_timings(folder / TIMINGS, planned.seconds)
    write_claim(record)


def differs(record: ClaimRecord) -> bool:
    """Return True unless the folder of a claim contains this record."""
    try:
        return read_claim_record(record.path).fields != record.fields
    except Mistake:
        return True


def judgement(look: Look, finding: Finding, draws: str) -> Judgement:
    return Judgement(
        verdict=finding.verdict,
        figure=finding.figure,
        low=finding.low,
        high=finding.high,
        p=finding.p,
        more_seeds=finding.more,
        expected=look.words(finding.part),
        seeds=look.seeds_now,
        draws=draws,
        note=finding.note,
    )


def measure(planned: PlannedLook, statuses: Mapping[str, RunStatus]) -> Measured:
    """Collect the results of all runs and trials
    for one statistical test (look) in a table."""
    runs_by_folder: dict[str, Run] = {}
    frames = []
    for name, plan in planned.plans.items():
        sweep = record(plan, statuses)
        runs = {
            run.folder: load_tables(run.folder)
            for run in sweep.runs
            if run.state == "done"
        }
        runs_by_folder |= {path.name: run for path, run in runs.items()}
        frame = tabulate(sweep, runs).assign(runs=name)
        # An axis may have the name of a measured number, such as loss. Then keep the
        # axis.
        frames.append(frame.loc[:, ~frame.columns.duplicated()])

    # Build one frame from the rows of all seeds. In a frame of one seed, a column
    # without any finite number would not be numeric.
    rows = list[dict[str, Any]]()
    for job in planned.trials:
        if not job.rows:
            raise Mistake(
                f"{job.file} holds no rows; the same command runs the trial again"
            )
        rows += [{"runs": "trial", **row, "seed": job.seed} for row in job.rows]
    if rows:
        trials = pd.DataFrame(rows)
        # make the seed the last column
        frames.append(trials.assign(seed=trials.pop("seed")))
    plans = planned.plans.values()
    axes = tuple(dict.fromkeys(key for plan in plans for key in plan.sweep.axes))
    experiments = [run.experiment for plan in plans for run in plan.runs]
    draws = drawn(experiments, planned.look.trial, planned.trust)
    return Measured(pd.concat(frames, ignore_index=True), runs_by_folder, axes, draws)


# --- Describe the random draws of a seed.


def drawn(
    experiments: Iterable[Experiment],
    trial: AbstractTrial | None,
    trust: Sequence[str] = (),
) -> str:
    """Describe what a seed draws at random, such as data or weights. Also describe the
    pool of examples if it is the same for all seeds (see `pools`)."""
    run_sources = [experiment.data for experiment in experiments]
    trial_sources = [] if trial is None else sources_of(trial, trust)
    distinct: list[AbstractSource] = []
    for source in (*run_sources, *trial_sources):
        if source not in distinct:
            distinct.append(source)
    drawing = [source for source in distinct if source.seed is None]
    words = "each drawing data" if drawing else ""
    if trial is not None and not trial_sources:
        words = trial.draws
    if run_sources:
        words = drawn_words(source.seed is not None for source in run_sources)
    return words + pools(drawing)


def drawn_by(look: Look, composer: Composer, trust: Sequence[str] = ()) -> str:
    """Describe what a seed of a look (statistical test) draws at random, from the
    composed runs of one seed."""
    experiments = []
    for definition in look.runs.values():
        one_seed = replace(definition, seeds=look.seeds[:1])
        experiments += [
            run.experiment for run in sweep_plan(one_seed, composer, Path()).runs
        ]
    return drawn(experiments, look.trial, trust)


def sources_of(trial: AbstractTrial, trust: Sequence[str] = ()) -> list[AbstractSource]:
    """Return the data sources in the fields of a trial."""
    if isinstance(trial, SideBySide):
        return [source for part in trial.trials for source in sources_of(part, trust)]
    settings = getattr(trial, "base", None) or getattr(trial, "words", None)
    source = getattr(trial, "data", None)
    if settings:
        source = compose(settings, None, trust).data
    return [source] if isinstance(source, AbstractSource) else []


def pools(sources: Sequence[AbstractSource]) -> str:
    """Describe the fixed pools of examples: those of the sources that draw from the
    same examples for every seed. Return "" without such a source.

    An interval over seeds does not generalise beyond a fixed pool.

    >>> from ntkexp.data import Sphere, Wine
    >>> pools([Wine(train=40), Sphere()])
    ', for these 178 examples of wine'
    """
    sizes = []
    for source in sources:
        first, second = (
            source.examples(examples_stream(seed)).inputs for seed in (0, 1)
        )
        if first.shape == second.shape and bool((first == second).all()):
            sizes.append(f"{len(first):,} examples of {source.option}")
    if not sizes:
        return ""
    return f"{FIXED_POOL}{' or '.join(dict.fromkeys(sizes))}"


def drawing_of(picture: AbstractPicture, judged: JudgedClaim) -> str:
    """Draw the picture of a claim as SVG."""
    from ntkexp.report.plots.rendering import svg  # noqa: PLC0415  slow to import
    from ntkexp.report.plots.style import house_style  # noqa: PLC0415  slow to import

    with house_style():
        return svg(picture.figure(judged))


def draw(picture: AbstractPicture, judged: JudgedClaim) -> None:
    """Write the picture of a claim, its caption
    and its table into the claim's folder."""
    folder = judged.record.path
    write_atomically(folder / PICTURE, drawing_of(picture, judged))
    exhibit = Exhibit(picture.caption(judged))
    table = picture.table(judged)
    if table is not None:
        rows = tuple(map(tuple, table.astype(object).to_numpy().tolist()))
        exhibit = replace(exhibit, columns=tuple(map(str, table)), rows=rows)
    write_exhibit(folder, exhibit)
