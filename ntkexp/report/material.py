"""What a report speaks of: runs and sweeps that were named, or all of them, and what could not be read; what was run
and what came out, in two sentences; and a sweep in few columns.
"""

from __future__ import annotations

import math
import os
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
from ntkexp.report.sentence import SPOKEN, clause, ladder_sentence, standing
from ntkexp.text import MISSING, listed, printable, short

TELLING = ("drift", "weights_moved", "loss")
JUDGED = ("exponent", "low", "high", "theory", "verdict", "more_seeds", "curved")


def sweep_extent(sweep: Sweep) -> str:
    """Say how far the axes of a sweep go.

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
            parts.append(f"{key} {len(values)} values from {min(numbers)} to {max(numbers)}")
    seeds, done = (
        len({run.seed for run in sweep.runs}),
        sum(run.state == "done" for run in sweep.runs),
    )
    missing = [f"{done} of {len(sweep.runs)} runs done"] if done < len(sweep.runs) else []
    return "; ".join([*parts, *([f"{seeds} seeds"] if seeds > 1 else []), *missing])


def tabulate_fits(analysis: Analysis) -> pd.DataFrame:
    """Give the laws, each number in words, with the name to be used in commands."""
    expected = [law.fit.expected for law in analysis.laws]
    theory = [
        None if each is None else f"{limit(each)} ± {short(each.margin)}" for each in expected
    ]
    fits, words = analysis.fits.assign(theory=pd.Series(theory, dtype=object)), []
    for name in map(str, fits["quantity"]):
        try:
            words.append(f"{describe(name)} [{name}]")
        except ValueError:  # a number that this version does not know
            words.append(name)
    columns = (
        "quantity",
        *analysis.sweep.axes,
        *JUDGED,
        "axis",
        "from",
        "to",
        "points",
        "seeds",
        "left_out",
    )
    return fits[[column for column in columns if column in fits]].assign(quantity=words)


def tabulate_points(analysis: Analysis) -> pd.DataFrame:
    """Give the means that tell most, each with its interval, and of how many runs; the CSV has all."""
    table, split = (
        analysis.points,
        "probe" if any(q.endswith(".probe") for q in analysis.quantities) else "test",
    )
    errors = [q for q in analysis.quantities if q.endswith(f".{split}")]
    chosen = [*errors, *(q for q in analysis.quantities if q in TELLING and q not in errors)]
    points = table[list(analysis.sweep.axes)].copy()
    counts = table[[f"{name}.count" for name in chosen]].to_numpy(dtype=int).tolist()
    ranges = [
        (min(row, default=0), max(row, default=0)) for row in counts
    ]  # which need not be as many for each
    points["runs"] = [str(low) if low == high else f"{low} to {high}" for low, high in ranges]
    for name in chosen:
        points[name] = table[f"{name}.mean"]
        if table[f"{name}.low"].notna().any():
            ends = table[[f"{name}.low", f"{name}.high"]].to_numpy(dtype=float).tolist()
            points[f"95 % of {name}"] = [format_ends(low, high) for low, high in ends]
    return points


def format_ends(low: float, high: float) -> str:
    """Spell an interval; one seed has none.

    >>> format_ends(0.25, 0.5), format_ends(math.nan, math.nan)
    ('0.25 to 0.5', '–')
    """
    return MISSING if math.isnan(low) else f"{short(low)} to {short(high)}"


# --- What a report speaks of.


class NothingLeft(Mistake):
    """No run can be read of what was named."""


@dataclass(frozen=True)
class Material:
    """Runs that can be read, sweeps of them, and why the rest was left out."""

    runs: tuple[Run, ...]
    analyses: tuple[Analysis, ...]
    left_out: tuple[str, ...]

    @cached_property
    def by_folder(self) -> dict[Path, Run]:
        return {run.path: run for run in self.runs}

    @property
    def left_out_line(self) -> str:
        """One line says all that was left out; it is empty if nothing was."""
        if not self.left_out:
            return ""
        return f"left out: {printable('; '.join(self.left_out))}"


def gather(named: Sequence[str], outputs: Path) -> Material:
    """Gather everything under the names: run folders, sweeps by name or file, folders of runs; all of `outputs` if
    none.
    """
    paths = [run for name in named for run in paths_of_name(name, outputs)] or list(
        results_inside(outputs)
    )
    left_out: list[str] = []
    sweeps: list[Sweep] = []
    for path in dict.fromkeys(paths):
        if path.suffix == ".json":
            try:
                sweeps.append(read_sweep(path))
            except Mistake as mistake:
                left_out.append(str(mistake))

    # Runs of sweeps, and those that were named, each once: a folder may be a link to another
    swept = [run for sweep in sweeps for run in sweep.runs]
    unfinished = {
        run.folder: (sweep.name, run)
        for sweep in sweeps
        for run in sweep.runs
        if run.state != "done"
    }
    unique: dict[Path, Path] = {}
    for folder in [
        *(run.folder for run in swept),
        *(path for path in paths if path.suffix != ".json"),
    ]:
        unique.setdefault(Path(os.path.realpath(folder)), folder)
    runs: dict[Path, Run] = {}
    missing: dict[tuple[str, str], list[SweepRun]] = defaultdict(
        list
    )  # those of a sweep that are in one state
    for folder, run in zip(unique.values(), load_runs(unique.values()), strict=True):
        if not isinstance(run, Mistake):
            runs[folder] = run
        elif folder in unfinished:
            name, of_sweep = unfinished[folder]
            missing[name, of_sweep.state].append(of_sweep)
        else:
            left_out.append(str(run))
    for (name, state), alike in missing.items():
        one = alike[0].standing if len(alike) == 1 else f"{len(alike)} runs of {name}, {state}"
        left_out.append(one)
    if not runs:
        raise NothingLeft(
            f"nothing is left to report: {'; '.join(left_out) or f'{outputs} holds no run'}"
        )
    analyses = list[Analysis]()
    for sweep in sweeps:
        try:
            analyses.append(analyse(sweep, runs))
        except Exception as error:  # one sweep never takes the others with it
            left_out.append(str(unreadable(sweep.path, error)))
    return Material(tuple(runs.values()), tuple(analyses), tuple(left_out))


def paths_of_name(name: str, outputs: Path) -> list[Path]:
    """The run folders and records of sweeps that a name stands for."""
    path = Path(name).expanduser()
    for usual in (outputs / "sweeps" / f"{name}.json", outputs / "runs" / name):
        if not path.exists() and usual.exists():
            return [usual]
    return [path] if is_run_folder(path) else list(results_inside(path)) or [path]


def results_inside(folder: Path) -> Iterator[Path]:
    yield from sorted((folder / "sweeps").glob("*.json"))
    for parent in (folder / "runs", folder):
        if parent.is_dir():
            yield from sorted(path for path in parent.iterdir() if is_run_folder(path))


def what_was_run(material: Material) -> str:
    """The first sentence."""
    if len(material.runs) == 1:
        ended, _, _ = material.runs[0].outcome.partition(
            "; "
        )  # what there is to say of effects stands below
        return f"{material.runs[0].name}, {ended or 'one run'}."
    failed = sum(run.diverged for run in material.runs)
    count = f"{len(material.runs)} finished runs{f' ({failed} diverged)' if failed else ''}"
    if not material.analyses:
        return f"{count}."
    swept = {run.folder for analysis in material.analyses for run in analysis.sweep.runs}
    part = len(swept & material.by_folder.keys())
    some = f", {part} of them in" if part < len(material.runs) else ", in"
    names = listed(
        [
            f"{analysis.sweep.name} ({sweep_extent(analysis.sweep)})"
            for analysis in material.analyses
        ]
    )
    return f"{count}{some} the sweep{'s' * (len(material.analyses) > 1)} {names}."


def what_came_out(runs: Sequence[Run]) -> str:
    """The second sentence: how far the machines that are spoken of are from the networks, of all runs."""
    if len(runs) == 1:
        return ladder_sentence(runs[0].ladder, diverged=runs[0].diverged)
    clauses = [
        clause(name, [standing(run.ladder, machine) for run in runs])
        for machine, name in SPOKEN.items()
    ]
    text = (
        "; ".join(filter(None, clauses))
        or f"no kernel machine was compared with any of {len(runs)} trained networks"
    )
    failed = sum(run.diverged for run in runs)
    left = (
        f"; {failed} of the networks diverged, and {'is' if failed == 1 else 'are'} compared as left"
        if failed
        else ""
    )
    return f"{text[0].upper()}{text[1:]}{left}."
