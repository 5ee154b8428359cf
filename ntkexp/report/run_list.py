"""The list of runs that `ntkexp runs` prints: one line for each run.

Numbers come from the small files of a run: the last row of `metrics.csv`,
`results.csv`, `DONE.json` and the timings. A file that cannot be read leaves its
columns empty."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.folder import CONFIG, DONE, RunFolder
from ntkexp.records.results import read_results, read_timings
from ntkexp.report.inventory import ListedRun, differing
from ntkexp.report.sentence import main_split
from ntkexp.report.tables import Table, format_text, tabulate
from ntkexp.text import MISSING, duration, percent, short

LAST_BYTES = 1 << 16  # the last row of metrics.csv is expected within this many bytes
FROZEN = "frozen_start"  # the kernel machine whose error is listed
SETTINGS = ("data", "optimizer")  # settings that are listed if they differ between runs
NUMBERS = ("steps", "accuracy", "loss", "frozen", "age", "took")


def numbers_in_words(run: ListedRun, now: float) -> list[str]:
    """Return the texts of the columns `NUMBERS`."""
    last = last_row(run.path / "metrics.csv")
    return [
        steps_of(run),
        # at the queries, else at the training examples
        spelt(number_in(last, "accuracy_query", "accuracy"), percent),
        spelt(number_in(last, "loss_query", "loss"), short),
        # relative error of the frozen kernel on the main split
        spelt(if_readable(lambda: frozen_error(run.path)), percent),
        # seconds since the run was finished, else since it was begun
        spelt(if_readable(lambda: age(run.path, now)), duration),
        # wall seconds of the run
        spelt(if_readable(lambda: seconds_of(run.path)) or None, duration),
    ]


def if_readable(read: Callable[[], float | None]) -> float | None:
    """Return the result of `read`, or None if a file is missing or damaged."""
    try:
        return read()
    except (Mistake, OSError, ValueError):
        return None


def steps_of(run: ListedRun) -> str:
    """Return the number of steps of a finished run, or the steps done and planned."""
    folder = RunFolder(run.path)
    try:
        if (run.path / DONE).is_file():
            return str(folder.sealed_facts["steps"])
        reached = folder.progress
        return f"{reached['step']}/{reached['steps']}"
    except (Mistake, OSError, KeyError):
        return MISSING


def last_row(path: Path) -> Mapping[str, str]:
    """Return the last row of a CSV file, or an empty mapping.
    Read only the header and the end of the file."""
    try:
        with path.open("rb") as file:
            header = file.readline().decode()
            start = max(file.tell(), path.stat().st_size - LAST_BYTES)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    if not lines:
        return {}
    rows = list(csv.DictReader([header, lines[-1]]))
    return rows[0] if rows else {}


def number_in(row: Mapping[str, str], *names: str) -> float | None:
    """Return the number in the first of the columns `names` that has a number."""
    for name in names:
        try:
            return float(row[name])
        except (KeyError, ValueError, TypeError):
            continue
    return None


def frozen_error(path: Path) -> float | None:
    results = read_results(path / "results.csv")
    main = main_split(results)
    errors = [
        row.relative_error
        for row in results
        if (row.machine, row.split) == (FROZEN, main)
    ]
    return errors[0] if errors else None


def last_change(path: Path) -> float:
    """Return the time when the run was finished. If it is unfinished, return the time
    when config.json was written."""
    newest = path / DONE
    return (newest if newest.is_file() else path / CONFIG).stat().st_mtime


def age(path: Path, now: float) -> float | None:
    """Return the seconds since the last change of a run, or None if it lies in the
    future, because a clock was wrong."""
    seconds = now - last_change(path)
    return seconds if seconds >= 0 else None


def seconds_of(path: Path) -> float:
    """Return the wall seconds of a run. Skip the timings of single kernel machines
    (names with a dot), because 'run' includes them."""
    parts = read_timings(path / "timings.csv")
    return sum(part.wall for name, part in parts.items() if "." not in name)


def tabulate_runs(
    runs: Sequence[ListedRun], keys: Sequence[str], now: float | None = None
) -> Table:
    """Return a row for each run.

    Omit columns without values, and the loss if there is an accuracy. Also omit data
    and optimizer if they are the same in all runs.

    Args:
        runs: The runs.
        keys: Keys of the configuration to list, besides data and optimizer.
        now: The present time, in seconds since the epoch.
    """
    now = time.time() if now is None else now
    refuse_unknown(keys, runs)
    differ = differing([run.config for run in runs if run.config])
    settings = [*(key for key in SETTINGS if key in differ), *keys]
    rows = []
    for run in runs:
        values = [str(run.config.get(key, MISSING)) for key in settings]
        numbers = numbers_in_words(run, now)
        rows.append([run.path.name, run.state, *values, *numbers])
    names = ["run", "state", *settings, *NUMBERS]
    full = tabulate(names, rows, numbers=NUMBERS)
    empty = {
        name
        for k, name in enumerate(names)
        if name in NUMBERS and {row[k] for row in rows} == {MISSING}
    }
    if "accuracy" not in empty:
        empty.add("loss")  # one measure of quality is enough
    return full.select(*(name for name in names if name not in empty))


def format_within(table: Table, width: float) -> str:
    """Format a table. Omit as many columns on the right as needed to
    fit into `width` letters."""
    names = [column.name for column in table.columns]
    text = format_text(table)
    while len(names) > 2 and max(map(len, text.splitlines())) > width:
        names.pop()
        text = format_text(table.select(*names))
    return text


def spelt(number: float | None, spell: Callable[[float], str]) -> str:
    return MISSING if number is None or math.isnan(number) else spell(number)


def refuse_unknown(keys: Sequence[str], runs: Sequence[ListedRun]) -> None:
    """Raise if one of the keys is not a setting of any run."""
    known_keys = {key for run in runs for key in run.config}
    for key in keys:
        if key not in known_keys:
            raise WrongArgument(
                f"columns={key}: no run has this key{nearest(key, known_keys)}",
                "columns",
            )


def is_usual(run: ListedRun) -> bool:
    """Return True for a run that is complete or in progress, if it is readable and did
    not diverge."""
    is_read = bool(run.config) and not run.outcome.startswith(str(run.path))
    return (
        is_read and run.state in {"done", "running"} and "diverged" not in run.outcome
    )


def remarks(runs: Sequence[ListedRun]) -> list[str]:
    """Return a line for each run that did not end as planned."""
    return [
        f"{run.path.name}: {run.outcome}"
        for run in runs
        if run.outcome and not is_usual(run)
    ]
