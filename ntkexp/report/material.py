"""The content of a report on several runs and sweeps:
two sentences and short tables."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.folder import is_run_folder
from ntkexp.records.sweep import Sweep, SweepRun, read_sweep
from ntkexp.report.analysis.laws import limit
from ntkexp.report.analysis.quantities import describe
from ntkexp.report.analysis.tables import Analysis, analyse
from ntkexp.report.run import Run, load_runs, unreadable
from ntkexp.report.sentence import (
    COMPARED,
    SPOKEN,
    Likeness,
    clause,
    ladder_sentence,
    standing,
)
from ntkexp.text import MISSING, counted, listed, percent, printable, short

SHOWN_MEASURES = ("kernel_change", "weights_moved", "loss")
LAW_COLUMNS = ("exponent", "low", "high", "theory", "verdict", "more_seeds", "curved")


def sweep_extent(sweep: Sweep) -> str:
    """Describe the axes of a sweep with their values or ranges,
    and the number of seeds.

    >>> from pathlib import Path
    >>> axes = {"model.width": (128, 32, 64)}
    >>> sweep_extent(Sweep(path=Path(), name="width", command="", axes=axes, seeds=(), base=(), fits=(), runs=()))
    'model.width 3 values from 32 to 128'
    """
    parts = []
    for key, values in sweep.axes.items():
        numbers = [
            value
            for value in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        if len(numbers) < max(3, len(values)):
            parts.append(f"{key} {', '.join(map(str, values))}")
        else:
            parts.append(
                f"{key} {len(values)} values from {min(numbers)} to {max(numbers)}"
            )
    seeds = len({run.seed for run in sweep.runs})
    if seeds > 1:
        parts.append(f"{seeds} seeds")
    done = sum(run.state == "done" for run in sweep.runs)
    if done < len(sweep.runs):
        parts.append(f"{done} of {len(sweep.runs)} runs done")
    return "; ".join(parts)


def tabulate_fits(analysis: Analysis) -> pd.DataFrame:
    """Return a row for each fitted law of a sweep.
    Quantities are named in words and by key."""
    theory = []
    for expected in (law.fit.expected for law in analysis.laws):
        text = (
            None
            if expected is None
            else f"{limit(expected)} ± {short(expected.margin)}"
        )
        theory.append(text)
    fits = analysis.fits.assign(theory=pd.Series(theory, dtype=object))
    words = []
    for name in map(str, fits["quantity"]):
        try:
            words.append(f"{describe(name)} [{name}]")
        except ValueError:  # a quantity that another version of ntkexp defined
            words.append(name)
    numbers = ("axis", "from", "to", "points", "seeds", "left_out")
    columns = ("quantity", *analysis.sweep.axes, *LAW_COLUMNS, *numbers)
    return fits[[column for column in columns if column in fits]].assign(quantity=words)


def tabulate_points(analysis: Analysis) -> pd.DataFrame:
    """Return the main means, intervals and numbers of runs of a sweep. There is a row
    for each combination of swept values that has runs.

    The CSV file of the sweep has all means.
    """
    table = analysis.points
    quantities = analysis.quantities
    has_queries = any(name.endswith(".query") for name in quantities)
    split = "query" if has_queries else "test"
    errors = [name for name in quantities if name.endswith(f".{split}")]
    shown = [
        *errors,
        *(name for name in quantities if name in SHOWN_MEASURES and name not in errors),
    ]
    points = table[list(analysis.sweep.axes)].copy()
    # count the runs of each quantity, because a run may lack some quantities
    counts = table[[f"{name}.count" for name in shown]].to_numpy(dtype=int).tolist()
    ranges = [(min(row, default=0), max(row, default=0)) for row in counts]
    points["runs"] = [
        str(low) if low == high else f"{low} to {high}" for low, high in ranges
    ]
    for name in shown:
        points[name] = table[f"{name}.mean"]
        if table[f"{name}.low"].notna().any():
            ends = table[[f"{name}.low", f"{name}.high"]].to_numpy(dtype=float).tolist()
            points[f"95 % of {name}"] = [format_ends(low, high) for low, high in ends]
    has_runs = [high > 0 for _, high in ranges]
    return points[has_runs]


def format_ends(low: float, high: float) -> str:
    """Format an interval, or a dash if `low` is NaN.

    >>> format_ends(0.25, 0.5), format_ends(math.nan, math.nan)
    ('0.25 to 0.5', '–')
    """
    if math.isnan(low):
        return MISSING
    return f"{short(low)} to {short(high)}"


# --- Read the runs and sweeps of a report.


class NothingLeft(Mistake):
    """The error if no run of a report can be read."""


@dataclass(frozen=True)
class Material:
    """The runs and sweeps of a report, and the reasons why other folders were left
    out."""

    runs: tuple[Run, ...]
    analyses: tuple[Analysis, ...]
    left_out: tuple[str, ...]

    @cached_property
    def by_folder(self) -> dict[Path, Run]:
        return {run.path: run for run in self.runs}

    @property
    def left_out_line(self) -> str:
        """The reasons for leaving folders out, in one line;
        empty if nothing was left out."""
        if not self.left_out:
            return ""
        return f"left out: {printable('; '.join(self.left_out))}"


def gather(named: Sequence[str], outputs: Path) -> Material:
    """Read the runs and sweeps of a report.

    Each item of `named` is a run folder, a sweep (its name or file), or a folder of
    runs. If `named` is empty, read everything inside `outputs`. Raise `NothingLeft` if
    no run can be read.
    """
    paths = [path for name in named for path in paths_of_name(name, outputs)]
    paths = paths or list(results_inside(outputs))
    left_out: list[str] = []
    sweeps: list[Sweep] = []
    for path in dict.fromkeys(paths):
        if path.suffix == ".json":
            try:
                sweeps.append(read_sweep(path))
            except Mistake as mistake:
                left_out.append(str(mistake))

    folders = [run.folder for sweep in sweeps for run in sweep.runs]
    folders += [path for path in paths if path.suffix != ".json"]
    runs, reasons = load_unique(folders, sweeps)
    left_out += reasons
    if not runs:
        raise NothingLeft(
            f"nothing is left to report: {'; '.join(left_out) or f'{outputs} holds no run'}"
        )
    analyses = list[Analysis]()
    for sweep in sweeps:
        try:
            analyses.append(analyse(sweep, runs))
        except Exception as error:  # one broken sweep does not stop the others
            left_out.append(str(unreadable(sweep.path, error)))
    return Material(tuple(runs.values()), tuple(analyses), tuple(left_out))


def load_unique(
    folders: Sequence[Path], sweeps: Sequence[Sweep]
) -> tuple[dict[Path, Run], list[str]]:
    """Load each run only once, also if several folders are links to it. Return the runs
    by folder, and the reasons why other runs were left out."""
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(Path(os.path.realpath(folder)), folder)
    unfinished = {
        run.folder: (sweep.name, run)
        for sweep in sweeps
        for run in sweep.runs
        if run.state != "done"
    }
    runs: dict[Path, Run] = {}
    reasons: list[str] = []
    # unfinished runs by sweep and state
    missing: dict[tuple[str, str], list[SweepRun]] = defaultdict(list)
    for folder, run in zip(unique.values(), load_runs(unique.values()), strict=True):
        if not isinstance(run, Mistake):
            runs[folder] = run
        elif folder in unfinished:
            name, of_sweep = unfinished[folder]
            missing[name, of_sweep.state].append(of_sweep)
        else:
            reasons.append(str(run))
    return runs, [*reasons, *map(unfinished_sentence, missing, missing.values())]


def unfinished_sentence(
    sweep_and_state: tuple[str, str], runs: Sequence[SweepRun]
) -> str:
    """Return the number of unfinished runs of a sweep with one state, in words. For a
    single run, return its status."""
    name, state = sweep_and_state
    if len(runs) == 1:
        return runs[0].status
    return f"{len(runs)} runs of {name}, {state}"


def paths_of_name(name: str, outputs: Path) -> list[Path]:
    """Return the run folders and sweep files that a name or path refers to."""
    path = Path(name).expanduser()
    for default_path in (outputs / "sweeps" / f"{name}.json", outputs / "runs" / name):
        if not path.exists() and default_path.exists():
            return [default_path]
    if is_run_folder(path):
        return [path]
    return list(results_inside(path)) or [path]


def results_inside(folder: Path) -> Iterator[Path]:
    yield from sorted((folder / "sweeps").glob("*.json"))
    for parent in (folder / "runs", folder):
        if parent.is_dir():
            yield from sorted(path for path in parent.iterdir() if is_run_folder(path))


def headline(material: Material) -> str:
    """Return the heading of a report: the name of its run,
    or the numbers of runs and sweeps."""
    if len(material.runs) == 1:
        return material.runs[0].name
    parts = [counted(len(material.runs), "run")]
    if material.analyses:
        parts.append(counted(len(material.analyses), "sweep"))
    return ", ".join(parts)


@dataclass(frozen=True)
class ReportTile:
    """One number on the first screen of a report."""

    label: str
    value: str
    note: str = ""


TILE_MACHINES = {
    "secant": "secant kernel machine",
    "left": "textbook sum",
    "frozen_start": "frozen kernel",
}


def tiles(runs: Sequence[Run]) -> list[ReportTile]:
    """Return the tiles of a report: errors of the main kernel machines,
    and the accuracy.

    The error of a run is its largest error over all splits. If there are several runs,
    a tile shows the median over the runs that did not diverge, or over all runs if all
    diverged."""
    found = []
    has_several = len(runs) > 1
    if has_several:
        runs = [run for run in runs if not run.diverged] or runs
    for machine, label in TILE_MACHINES.items():
        standings = [standing(run.ladder, machine) for run in runs]
        compared = [one for one in standings if one.likeness in COMPARED]
        if not compared:
            continue
        exact = sum(one.likeness is Likeness.EXACT for one in compared)
        if exact == len(compared):
            worst = short(max(one.error for one in compared))
            count = (
                f"{exact} of {counted(len(runs), 'network')}, " if has_several else ""
            )
            found.append(ReportTile(label, "exact", f"{count}to {worst}"))
        else:
            middle = statistics.median(one.error for one in compared)
            note = "largest over splits"
            if has_several:
                note += f", median over {counted(len(compared), 'run')}"
            found.append(ReportTile(label, f"{percent(middle)} off", note))
    accuracies = [
        run.metrics["accuracy_query"].iloc[-1]
        for run in runs
        if "accuracy_query" in run.metrics
    ]
    known = [float(accuracy) for accuracy in accuracies if math.isfinite(accuracy)]
    if known:
        note = (
            "of networks at queries, median"
            if has_several
            else "of the network at queries"
        )
        found.append(ReportTile("accuracy", percent(statistics.median(known)), note))
    return found


def what_was_run(material: Material) -> str:
    """Return the first sentence of a report: its runs and sweeps."""
    if len(material.runs) == 1:
        # the outcome without its remarks on leave-out effects
        ended, _, _ = material.runs[0].outcome.partition("; ")
        return f"{material.runs[0].name}, {ended or 'one run'}."
    failed = sum(run.diverged for run in material.runs)
    count = (
        f"{len(material.runs)} finished runs{f' ({failed} diverged)' if failed else ''}"
    )
    if not material.analyses:
        return f"{count}."
    swept = {
        run.folder for analysis in material.analyses for run in analysis.sweep.runs
    }
    in_sweeps = len(swept & material.by_folder.keys())
    some = f", {in_sweeps} of them in" if in_sweeps < len(material.runs) else ", in"
    sweeps = [analysis.sweep for analysis in material.analyses]
    names = listed([f"{sweep.name} ({sweep_extent(sweep)})" for sweep in sweeps])
    return f"{count}{some} the sweep{'s' * (len(sweeps) > 1)} {names}."


def what_came_out(runs: Sequence[Run]) -> str:
    """Return the second sentence of a report:
    the errors of the main kernel machines over all runs."""
    if len(runs) == 1:
        return ladder_sentence(runs[0].ladder, diverged=runs[0].diverged)
    clauses = [
        clause(name, [standing(run.ladder, machine) for run in runs])
        for machine, name in SPOKEN.items()
    ]
    text = "; ".join(filter(None, clauses))
    if not text:
        text = (
            f"no kernel machine was compared with any of {len(runs)} trained networks"
        )
    diverged = sum(run.diverged for run in runs)
    if diverged:
        verb = "is" if diverged == 1 else "are"
        text += f"; {diverged} of the networks diverged, and {verb} compared at the last step"
    return f"{text[0].upper()}{text[1:]}."
