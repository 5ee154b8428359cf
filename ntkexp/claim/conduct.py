"""A claim is brought to its end: it is registered, its runs and trials are planned, carried out, measured, judged and
written down.

register.jsonl                   beside the claim's file: what was said and found, from the first version on
<name>-<digest>/claim.json       what was said beforehand
                <look>.csv       the table that was judged, every digit
                verdict.json     what was found (`ntkexp.records.claim`)
                picture.svg      beside picture.json, what is said of it (`ntkexp.records.claim`)
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
from ntkexp.claim.judge import judge_protocol
from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.look import Look, without_files
from ntkexp.claim.quantity import Measured
from ntkexp.claim.read import read_sizes
from ntkexp.claim.trial import AbstractTrial, SideBySide
from ntkexp.config.build import Builder, admit
from ntkexp.config.compose import Composer, compose
from ntkexp.data.base import AbstractSource, examples_stream
from ntkexp.engine.base import AbstractEngine, AbstractJob, Ended, Ending, Task, Tell, run_jobs
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import digest as file_digest
from ntkexp.experiment.identity import files_of
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import Json, read_sealed, sealed_text, to_text, write_atomically
from ntkexp.records.claim import (
    PICTURE,
    TIMINGS,
    WHOLE,
    ClaimRecord,
    Exhibit,
    Judgement,
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
from ntkexp.sweep.plan import Plan, RunStatus, record, runs_to_do, statuses
from ntkexp.sweep.plan import plan as sweep_plan

# --- The register of claims: what a claim says is entered before it is looked at.


def register_claim(name: str, builder: Builder, out: Path, reason: str = "") -> Register:
    """Enter what a claim says at all its sizes; one that was changed takes a reason.

    The register is given back, in which the entry stands.
    """
    sizes = read_sizes(name, builder)
    register = Register.beside(builder.choices.file("claim", name), out)
    digests = {size: claim.digest for size, claim in sizes.items()}
    register.enter(name, digests, sizes["default"].registered_fields, reason, circumstances())
    return register


def circumstances() -> dict[str, Json]:
    """The date, and the version and commit of this package, as lines of the register have them."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": package_version(),
        "commit": commit(),
    }


# --- A trial as a job for a worker: its rows go into a sealed file, and one that is there is not carried out again.
#
#     trials/<name>-<digest>-s<seed>.json      {"trial": …, "seed": …, "rows": [{…}, …], "seal": of all this}
#
# It computes with one thread on every engine, so that the bytes are the same everywhere.


@dataclass(frozen=True)
class TrialJob(AbstractJob):
    """One seed of a trial."""

    loads = ("torch._dynamo", "ntkexp.limit.fused.run")
    """What torch loads for its first optimizer, and numba: two seconds that each seed would take by itself."""

    fields: dict[str, Any]
    seed: int
    folder: str
    trust: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The trial with this seed has this name, which tells all that it reads."""
        files = self.digests
        kind = str(self.fields["_target_"]).rpartition(".")[2].lower()
        whole = {"trial": without_files(self.fields), "results_version": results_version}
        whole |= {"files": files} if files else {}
        digest = sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]
        return f"{kind}-{digest}-s{self.seed}"

    @property
    def digests(self) -> list[str]:
        """Those of the files that its words name, such as data.path=my.csv; there are none in most."""
        texts = [
            word
            for value in self.fields.values()
            if isinstance(value, list | tuple)
            for word in value
        ]
        words = [word for word in texts if isinstance(word, str) and "=" in word]
        paths = [word.partition("=")[2].partition(":")[0].strip("'\"") for word in words]
        if not any(path and Path(path).expanduser().exists() for path in paths):
            return []
        return [file_digest(file) for file in files_of(compose(words, None, self.trust))]

    @property
    def file(self) -> Path:
        return Path(self.folder) / "trials" / f"{self.name}.json"

    @property
    def timings(self) -> Path:
        return self.file.with_suffix(".timings.csv")

    @property
    def rows(self) -> list[dict[str, Any]] | None:
        """The rows, if they are there as they were written."""
        try:
            rows: list[dict[str, Any]] = read_sealed(self.file, self.name)["rows"]
        except Mistake:
            return None
        return rows

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        if self.rows is not None:
            return "found"
        import torch  # noqa: PLC0415  slow, and names of trials need none

        torch.set_num_threads(1)
        trial = Builder(admit(self.trust)).component(self.fields, (AbstractTrial,), "trial")
        assert isinstance(trial, AbstractTrial)
        clock = Clock()
        with clock.times("trial"):
            rows = [dict(row) for row in trial.rows(self.seed)]
        write_timings(self.timings, clock.parts)
        fields = {"trial": without_files(self.fields), "seed": self.seed, "rows": rows}
        write_atomically(self.file, sealed_text(fields, self.name))
        return "done"


# --- What there is to carry out for a claim: the runs and the trials of all its looks, each of them once.


@dataclass(frozen=True)
class PlannedLook:
    """The runs of a look by name, and its trials."""

    look: Look
    plans: Mapping[str, Plan]
    trials: tuple[TrialJob, ...]
    trust: tuple[str, ...] = ()

    @property
    def seconds(self) -> Seconds:
        runs = {
            plan.folder(run).path: None for plan in self.plans.values() for run in plan.distinct
        }
        return sum_timings(
            [*(path / "timings.csv" for path in runs), *(job.timings for job in self.trials)]
        )

    def shares_all(self, other: PlannedLook) -> bool:
        """Whether another look is at the same runs and trials."""
        mine, theirs = (
            [(name, id(plan)) for name, plan in look.plans.items()] for look in (self, other)
        )
        return mine == theirs and self.trials == other.trials


@dataclass(frozen=True)
class PlannedClaim:
    """A claim whose runs are all known to be valid."""

    claim: Claim
    out: Path
    looks: Mapping[str, PlannedLook]
    options: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> Plan:
        everything = Definition(self.claim.name, {}, (), (), (), (self.claim.name,), self.options)
        runs = (
            run for look in self.looks.values() for plan in look.plans.values() for run in plan.runs
        )
        return Plan(everything, self.out, tuple(runs))

    @property
    def trials(self) -> tuple[TrialJob, ...]:
        return tuple(
            {job.name: job for look in self.looks.values() for job in look.trials}.values()
        )

    @property
    def folder(self) -> Path:
        return self.out / self.claim.folder

    @property
    def seconds(self) -> dict[str, Seconds]:
        """Of all runs and trials, and of those of each look; a run of several looks counts for each."""
        runs = [self.whole.folder(run).path / "timings.csv" for run in self.whole.distinct]
        whole = sum_timings([*runs, *(job.timings for job in self.trials)])
        return {WHOLE: whole} | {name: look.seconds for name, look in self.looks.items()}


def sum_timings(files: Sequence[Path]) -> Seconds:
    return sum(map(total_seconds, files), start=Seconds(0.0, 0.0))


def plan_claim(
    claim: Claim,
    composer: Composer,
    out: Path,
    trust: Sequence[str] = (),
    options: Sequence[str] = (),
) -> PlannedClaim:
    """Compose all runs of a claim, and make a job of every seed of its trials."""
    plans: list[Plan] = []  # each once: most controls look at the runs of the claim itself
    looks = {}
    for name, look in claim.looks.items():
        of_look = {}
        for run, definition in look.runs_now.items():
            equal_plan = next((plan for plan in plans if plan.sweep == definition), None)
            if equal_plan is None:
                plans.append(equal_plan := sweep_plan(definition, composer, out))
            of_look[run] = equal_plan
        trial = None if look.trial is None else look.trial.fields()
        jobs = (
            ()
            if trial is None
            else tuple(TrialJob(trial, seed, str(out), tuple(trust)) for seed in look.seeds_now)
        )
        looks[name] = PlannedLook(look, of_look, jobs, tuple(trust))
    for look in claim.looks.values():
        if look.trial is None:
            look.quantity.refuse_early()
    return PlannedClaim(claim, out, looks, tuple(options))


# --- Bring the runs and trials of a claim to their end: what is finished stays, what was killed goes on.


@dataclass(frozen=True)
class Workshop:
    """Who carries claims out, who hears of it, and what is trusted."""

    engine: AbstractEngine
    progress: AbstractProgress
    trust: tuple[str, ...] = ()
    retry_failed: bool = False


def carry_out(planned: PlannedClaim, workshop: Workshop) -> Mapping[str, RunStatus]:
    """Carry out what is missing of a claim, and find where each of its runs stands then."""
    whole = planned.whole
    before = statuses(whole, whole.event_log.failures(), {})
    begun = runs_to_do(whole, before, retry_failed=workshop.retry_failed)
    ended: dict[str, Ended] = {}
    if begun:  # pictures of single runs are drawn when they are looked at
        conductor = Conductor(
            whole, workshop.engine, workshop.progress, workshop.trust, pictures=False
        )
        conductor.conduct(begun)
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
    """Carry a claim out and judge it as often as it planned, until its looks are decided; what is found each time."""
    claim = claim.with_looks({name: look.at(0) for name, look in claim.looks.items()})
    while True:
        planned = plan_claim(claim, composer, out, workshop.trust, options)
        record = conclude(planned, carry_out(planned, workshop), size)
        yield record
        then = claim.with_looks(
            {name: look.after(record.looks[name].verdict) for name, look in claim.looks.items()}
        )
        if then.looks == claim.looks:
            return
        claim = then


def carry_out_trials(planned: PlannedClaim, workshop: Workshop) -> None:
    left = [job for job in planned.trials if job.rows is None]
    home, logs = str(Path.cwd()), str(planned.out / "sweeps")
    if not left:
        return
    clock = RemainingTime({job.name: 1.0 for job in left}, workshop.engine.workers, believed=0.0)
    total = len(planned.trials)
    jobs = JobProgress(workshop.progress, clock, total, total - len(left))
    jobs.start(planned.claim.name)
    try:
        tasks = (Task(job.name, job, home, logs) for job in left)
        with closing(
            run_jobs(workshop.engine, tasks)
        ) as events:  # after a failure no other trial goes on
            for event in events:
                jobs.see(event)
                if isinstance(event, Ended) and event.how not in {"done", "found"}:
                    reason = event.reason or "no reason given"
                    raise Mistake(f"{planned.claim.name}: {event.name} {event.how}: {reason}")
    finally:
        workshop.progress.stop()


# --- Measure and judge a claim by what its runs and trials have left, and write everything down.


def conclude(planned: PlannedClaim, statuses: Mapping[str, RunStatus], size: str) -> ClaimRecord:
    """Measure all looks at a claim, judge them, and write down what was found."""
    # Looks at the same runs and trials, such as the claim's own and most controls, are measured once.
    measured = dict[str, Measured]()
    for name, planned_look in planned.looks.items():
        same = next(
            (other for other in measured if planned.looks[other].shares_all(planned_look)), None
        )
        measured[name] = measure(planned_look, statuses) if same is None else measured[same]

    # The looks are judged together, since a control that is supported withholds a verdict.
    claim, folder = planned.claim, planned.folder
    tables, findings = judge_protocol(claim.protocol, measured)
    written = ClaimRecord(
        path=folder,
        name=claim.name,
        digest=claim.digest,
        size=size,
        statement=claim.statement,
        source=claim.source.words,
        refutes=claim.refutes,
        command=command(
            "claims", [claim.name], [*[f"--{size}"] * (size != "default"), *planned.options]
        ),
        looks={
            name: Judgement(
                verdict=finding.verdict,
                figure=finding.figure,
                low=finding.low,
                high=finding.high,
                p=finding.p,
                more_seeds=finding.more,
                expected=claim.looks[name].words(finding.part),
                seeds=claim.looks[name].seeds_now,
                draws=measured[name].draws,
                note=finding.note,
            )
            for name, finding in findings.items()
        },
    )
    # The record comes last: a folder that has one is whole.
    write_atomically(folder / "claim.json", to_text(claim.fields))
    for name, table in tables.items():
        write_atomically(folder / f"{name}.csv", format_csv(table))
    draw(claim.picture, JudgedClaim(claim.looks, written, tables))
    write_timings(folder / TIMINGS, planned.seconds)
    write_claim(written)
    return written


def measure(planned: PlannedLook, statuses: Mapping[str, RunStatus]) -> Measured:
    """Put the runs and the trials of a look into one table."""
    loaded: dict[str, Run] = {}
    frames = []
    for name, plan in planned.plans.items():
        sweep = record(plan, statuses)
        runs = {run.folder: load_tables(run.folder) for run in sweep.runs if run.state == "done"}
        loaded |= {path.name: run for path, run in runs.items()}
        swept = tabulate(sweep, runs).assign(runs=name)
        frames.append(
            swept.loc[:, ~swept.columns.duplicated()]
        )  # an axis may be called like a number, such as loss
    # rows of all seeds in one frame: where no number of a seed is finite, its own columns would not be of numbers
    rows = list[dict[str, Any]]()
    for job in planned.trials:
        if not job.rows:
            raise Mistake(f"{job.file} holds no rows; the same command runs the trial again")
        rows += [{"runs": "trial", **row, "seed": job.seed} for row in job.rows]
    if rows:
        tried = pd.DataFrame(rows)
        frames.append(tried.assign(seed=tried.pop("seed")))  # behind all numbers
    table = pd.concat(frames, ignore_index=True)
    axes = tuple(dict.fromkeys(key for plan in planned.plans.values() for key in plan.sweep.axes))
    experiments = [run.experiment for plan in planned.plans.values() for run in plan.runs]
    return Measured(table, loaded, axes, drawn(experiments, planned.look.trial, planned.trust))


def drawn(
    experiments: Iterable[Experiment], trial: AbstractTrial | None, trust: Sequence[str] = ()
) -> str:
    """What a seed of a look draws, and from which examples, if they are the same for all seeds."""
    of_runs = [experiment.data for experiment in experiments]
    distinct: list[object] = []
    for source in (*of_runs, *([] if trial is None else sources_of(trial, trust))):
        distinct += [] if source in distinct else [source]
    drawing = [
        source for source in distinct if isinstance(source, AbstractSource) and source.seed is None
    ]
    fixed = [getattr(source, "seed", None) is not None for source in of_runs]
    words = drawn_words(fixed) if fixed else "each drawing data" if drawing else ""
    return words + pools(drawing)


def drawn_by(look: Look, composer: Composer, trust: Sequence[str] = ()) -> str:
    """The same of a look that is not planned, from the runs of one seed."""
    once = [replace(definition, seeds=look.seeds[:1]) for definition in look.runs.values()]
    runs = [run for definition in once for run in sweep_plan(definition, composer, Path()).runs]
    return drawn((run.experiment for run in runs), look.trial, trust)


def sources_of(trial: AbstractTrial, trust: Sequence[str] = ()) -> list[AbstractSource]:
    """The sources from which a trial draws data, as far as its fields tell."""
    if isinstance(trial, SideBySide):
        return [source for each in trial.trials for source in sources_of(each, trust)]
    words = getattr(trial, "base", None) or getattr(trial, "words", None)
    source = compose(words, None, trust).data if words else getattr(trial, "data", None)
    return [source] if isinstance(source, AbstractSource) else []


def pools(sources: Sequence[AbstractSource]) -> str:
    """Say from how many examples all seeds draw, where a source has the same for every seed: intervals over seeds then
    speak of these examples alone.

    >>> from ntkexp.data import Sphere, Wine
    >>> pools([Wine(train=40), Sphere()])
    ', from the same 178 examples'
    """
    sizes = []
    for source in sources:
        one, other = (source.examples(examples_stream(seed)).inputs for seed in (0, 1))
        if one.shape == other.shape and bool((one == other).all()):
            sizes.append(f"{len(one):,}")
    return f", from the same {' or '.join(dict.fromkeys(sizes))} examples" if sizes else ""


def draw(picture: AbstractPicture, judged: JudgedClaim) -> None:
    """Draw the claim. Write the picture, its caption and its table into the claim's folder."""
    from ntkexp.report.plots.rendering import svg  # noqa: PLC0415  slow, and judging needs none
    from ntkexp.report.plots.style import house_style  # noqa: PLC0415  the same

    folder = judged.record.path
    with house_style():
        write_atomically(folder / PICTURE, svg(picture.figure(judged)))
    table = picture.table(judged)
    columns = () if table is None else tuple(map(str, table))
    rows = () if table is None else tuple(map(tuple, table.astype(object).to_numpy().tolist()))
    write_exhibit(folder, Exhibit(picture.caption(judged), columns, rows))
