"""Judge a claim by what its runs have left: measured, looked at three times, written down.

<name>-<digest>/claim.json       what was said beforehand
                <look>.csv       the table that was judged, every digit
                verdict.json     what was found (`ntkexp.records.claim`)
                picture.svg      beside picture.json, what is said of it (`ntkexp.records.exhibit`)
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ntkexp.claim.claim import CONTROL, MAIN, Look
from ntkexp.claim.finding import Finding, together
from ntkexp.claim.judged_claim import JudgedClaim
from ntkexp.claim.measured import Measured
from ntkexp.claim.planned import PlannedClaim, PlannedLook
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.claim import PICTURE, TIMINGS, ClaimRecord, Judgement, write_claim
from ntkexp.records.command import command
from ntkexp.records.exhibit import Exhibit, write_exhibit
from ntkexp.records.json_file import to_text
from ntkexp.records.timings import write_timings
from ntkexp.report.analysis.tables import draws, tabulate
from ntkexp.report.run import Run, load_tables
from ntkexp.report.table import as_csv
from ntkexp.sweep.status import RunStatus, record


def judge_claim(planned: PlannedClaim, statuses: Mapping[str, RunStatus], size: str) -> ClaimRecord:
    """Judge all looks at a claim, and write everything down."""
    claim, tables = planned.claim, dict[str, pd.DataFrame]()
    judged, before = dict[str, Judgement](), list[tuple[PlannedLook, Measured]]()
    for name, planned_look in planned.looks.items():
        same = next((found for look, found in before if look.shares_all(planned_look)), None)
        measured = same or measure(planned_look, statuses)
        before.append((planned_look, measured))
        tables[name], found = judge_look(planned_look.look, measured)
        judged[name] = judgement(planned_look.look, found, measured)
    options = [f"--{size}"] * (size != "default")
    written = ClaimRecord(
        path=planned.folder,
        name=claim.name,
        digest=claim.digest,
        size=size,
        statement=claim.statement,
        source=claim.source.words,
        refutes=claim.refutes,
        command=command("claims", [claim.name], [*options, *planned.options]),
        looks={name: unless_vacuous(name, one, judged[CONTROL]) for name, one in judged.items()},
    )
    write_atomically(planned.folder / "claim.json", to_text(claim.fields))
    for name, table in tables.items():
        write_atomically(planned.folder / f"{name}.csv", as_csv(table))
    show(JudgedClaim(claim, written, tables))
    write_timings(planned.folder / TIMINGS, planned.parts_took)
    write_claim(written)
    return written


def show(judged: JudgedClaim) -> None:
    """Draw the claim, and write down what is said of the picture."""
    from ntkexp.report.plots.run_plots import svg  # noqa: PLC0415  slow, and judging needs none
    from ntkexp.report.plots.style import house_style  # noqa: PLC0415  the same

    picture, folder = judged.claim.picture, judged.record.path
    with house_style():
        write_atomically(folder / PICTURE, svg(picture.figure(judged)))
    table = picture.table(judged)
    columns = () if table is None else tuple(map(str, table))
    rows = () if table is None else tuple(map(tuple, table.astype(object).to_numpy().tolist()))
    write_exhibit(folder, Exhibit(picture.caption(judged), columns, rows))


def judge_look(look: Look, measured: Measured) -> tuple[pd.DataFrame, Finding]:
    """Judge one look; of what failed, the first reason is said."""
    table = look.quantity.of(measured)
    found = together([part.judge(table) for part in look.expectation])
    states = measured.table["state"] if "state" in measured.table else pd.Series("done", measured.table.index)
    failed = measured.table[states.fillna("done") != "done"]  # rows of a trial have no state
    if len(failed):
        reason = next(filter(None, map(str, failed["reason"])), "they are not finished")
        found = found.doubted(f"{len(failed)} of {len(measured.table)} runs have no result: {reason}")
    return table, found


def judgement(look: Look, found: Finding, measured: Measured) -> Judgement:
    """Write down what was found."""
    return Judgement(
        verdict=found.verdict,
        figure=found.figure,
        low=found.low,
        high=found.high,
        p=found.p,
        more_seeds=found.more,
        expected=look.words(found.part),
        seeds=look.seeds,
        draws=measured.draws,
        note=found.note,
    )


def unless_vacuous(name: str, judged: Judgement, control: Judgement) -> Judgement:
    """Conclude nothing from figures that would support the control as well."""
    if name != MAIN or control.verdict != "supported":
        return judged
    return judged.doubted("the control comes out supported too, so this look decides nothing")


def measure(planned: PlannedLook, statuses: Mapping[str, RunStatus]) -> Measured:
    """Put the runs and the trials of a look into one table."""
    known: dict[str, Run] = {}
    frames = []
    for name, plan in planned.plans.items():
        sweep = record(plan, statuses)
        runs = {place.folder: load_tables(place.folder) for place in sweep.runs if place.state == "done"}
        known |= {path.name: run for path, run in runs.items()}
        found = tabulate(sweep, runs).assign(runs=name)
        frames.append(found.loc[:, ~found.columns.duplicated()])  # an axis may be called like a number, such as loss
    for job in planned.trials:
        rows = job.rows
        if not rows:
            raise Mistake(f"{job.file} holds no rows; the same command carries the trial out again")
        frames.append(pd.DataFrame([{"runs": "trial", **row} for row in rows]).assign(seed=job.seed))
    table = pd.concat(frames, ignore_index=True)
    axes = tuple(dict.fromkeys(key for plan in planned.plans.values() for key in plan.sweep.axes))
    return Measured(table, known, axes, draws(known.values()) if known else "")
