"""A run as a reader sees it: what was run, what was measured, and what came out; and several runs side by side.

`load_run` asks for a finished and undamaged folder, `load_tables` the same but for the kernels, which it leaves
closed; `read_run` takes the folder as it is, which is how a run draws its own pictures before it is declared finished.
Arrays are looked at whole, by the seals of DONE.json, when they are first asked for.

The numbers that a run yields, each by its name, are what sweeps tabulate, fit and compare:

    <measure>             a column of metrics.csv, at the last step where it was measured
    limit_distance_start  `limit_distance` at the first step
    start_variance        of a sweep: how far the first kernel is from that of the other seeds
    weights_moved.<name>  the same of one parameter
    <machine>.<split>     the relative error of a kernel machine, ‖f̂ − f_T‖/‖f_T − f_0‖

A run that diverged has no numbers: what it ends in says where it was stopped.

>>> describe("drift"), describe("frozen_start.test")
('movement of the kernel', 'error of frozen start (test)')
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, in_short, nearest
from ntkexp.records.array_schema import RunAxes, read_headers, refuse_odd_data, refuse_odd_steps
from ntkexp.records.atomic import Damaged
from ntkexp.records.contributions import (
    COMPONENT,
    CONTRIBUTION,
    EXAMPLE_PHASE,
    LAST_STEP,
    PHASES,
    POINT_PHASE,
    called,
    explained_rule,
    refuse_odd_contributions,
)
from ntkexp.records.data import OUT_NAME, read_data
from ntkexp.records.folder import CONFIG, DONE, REDO, RunFolder, is_run_folder, refuse_other_version
from ntkexp.records.kernels import LARGEST_CHUNK, refuse_odd_kernels, refuse_odd_predictions
from ntkexp.records.results import COLUMNS, NUMBER_COLUMNS, RETRACED, SPLITS, Result, read_results
from ntkexp.records.schema import refuse_odd_metrics
from ntkexp.report.analysis.estimate import POSITIVE, SHARE, Range
from ntkexp.report.inventory import differing, flatten_config
from ntkexp.report.sentence import main_split, tabulate_ladder
from ntkexp.report.tables import format_text
from ntkexp.text import printable, spoken

if TYPE_CHECKING:
    import xarray as xr

    from ntkexp.report.plots.run_plots import RunPlots
    from ntkexp.report.scores import Attribution


TABLES = (CONFIG, "metrics.csv", "results.csv")
NUMBERS: Mapping[str, type[float]] = defaultdict(lambda: float, step=int, phase=int)
"""What the columns of metrics.csv hold."""

DIVERGED = 1e100  # numbers beyond are on their way to infinity


@dataclass(frozen=True)
class Run:
    """A run in its folder. Large arrays are read when they are first asked for."""

    path: Path
    config: dict[str, Any]
    metrics: pd.DataFrame
    ladder: tuple[Result, ...]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def outcome(self) -> str:
        """How training ended, in words; empty before it has."""
        return str(self.facts.get("outcome", ""))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What DONE.json says; before it is there, nothing."""
        return RunFolder(self.path).sealed_facts if self.finished else {}

    @property
    def finished(self) -> bool:
        """Whether there is a DONE.json, by which all other files are sealed."""
        return (self.path / DONE).is_file()

    @property
    def diverged(self) -> bool:
        """Whether training diverged. A run that draws its own pictures is not finished: progress.json says it then."""
        with suppress(Mistake):
            facts = self.facts if self.finished else RunFolder(self.path).progress
            return bool(facts.get("diverged"))
        return False

    def sealed(self, name: str) -> Path:
        """The path of a file or a store; of a finished run, it is refused if it is not as it was written."""
        if self.finished:
            RunFolder(self.path).check(name)
        return self.path / name

    @cached_property
    def results(self) -> pd.DataFrame:
        """The ladder as a data frame."""
        return pd.DataFrame(self.ladder, columns=list(COLUMNS)).astype(dict.fromkeys(NUMBER_COLUMNS, float))

    @cached_property
    def kernels(self) -> xr.Dataset:
        """Tangent kernels by snapshot, and path kernels by rule."""
        path = self.sealed("kernels.zarr")
        if self.finished:
            refuse_odd_kernels(path, self.axes.lengths)
        return open_store(path).set_coords("step")

    @cached_property
    def axes(self) -> RunAxes:
        """The lengths of the axes of its arrays."""
        path = self.sealed("data.npz")
        return RunAxes.of(read_headers(path), self.read, path)

    @cached_property
    def contributions(self) -> Attribution:
        """What made each output, and in which phase where there are phases: `records.contributions`."""
        from ntkexp.report.examples import example_on_axis  # noqa: PLC0415  which imports this module
        from ntkexp.report.scores import Attribution  # noqa: PLC0415  loads xarray: slow, and tables need none

        path = self.sealed("contributions.zarr")
        if self.finished:
            refuse_odd_contributions(path, self.axes.lengths, self.outputs)
        store = open_store(path)
        labels = [name for name in ("example", "out", COMPONENT) if name in store.attrs]
        store = store.assign_coords({name: store.attrs.pop(name) for name in labels})
        store = store.set_coords([LAST_STEP] if LAST_STEP in store else [])
        if OUT_NAME in self.data:  # a measure takes the place of outputs
            if len(self.data[OUT_NAME]) != store.sizes["out"]:
                raise Damaged(f"{self.path} is damaged: its outputs have other names; {REDO}")
            store = store.assign_coords({OUT_NAME: ("out", self.data[OUT_NAME])})
        if PHASES in store.attrs:
            names = store.attrs.pop(PHASES)
            store = store.assign_coords(phase=np.arange(1, len(names) + 1), phase_name=("phase", names))
            store = store.set_coords([EXAMPLE_PHASE, POINT_PHASE])
        return Attribution(store.data_vars, store.coords, store.attrs).showing(partial(example_on_axis, self))

    @property
    def plot(self) -> RunPlots:
        """Its pictures, as matplotlib axes: `run.plot.ladder()`."""
        from ntkexp.report.plots.run_plots import RunPlots  # noqa: PLC0415  which imports this module, and matplotlib

        return RunPlots(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: how training ended, and the ladder."""
        text = "\n\n".join([f"{self.name}: {self.outcome}", format_text(tabulate_ladder(self.ladder))])
        return f"<pre>{escape(text)}</pre>"

    @property
    def outs(self) -> tuple[int, ...]:
        """The outputs at which the path was integrated, which are those of contributions and effects."""
        return tuple(self.contributions.coords["out"].to_numpy().tolist())

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules by which the path was integrated."""
        parts = [self.contributions[name] for name in self.contributions if str(name).startswith(CONTRIBUTION)]
        return tuple(str(part.attrs["rule"]) for part in parts)

    def by_rule(self, kind: str, rule: str) -> xr.DataArray | None:
        """What a rule says, of a kind such as `contribution` and `decay`, if it does."""
        return self.contributions.get(called(kind, rule, explained_rule(self.rules) or rule))

    def parts(self, rule: str) -> xr.DataArray:
        """The contributions by a rule by which the path was integrated."""
        return self.contributions[called(CONTRIBUTION, rule, explained_rule(self.rules) or rule)]

    @cached_property
    def predictions(self) -> xr.DataArray:
        """Outputs of the network and of each machine, [machine, probe, out], labelled by machine."""
        path = self.sealed("predictions.zarr")
        if self.finished:
            refuse_odd_predictions(path, self.axes.lengths)
        store = open_store(path)
        return store["prediction"].assign_coords(machine=store.attrs["machines"])

    @cached_property
    def outputs(self) -> int:
        """The number of the network's outputs."""
        return refuse_odd_predictions(self.sealed("predictions.zarr"), self.axes.lengths)

    @cached_property
    def data(self) -> dict[str, NDArray[Any]]:
        """The examples, named as in `records.data`."""
        arrays = read_data(self.sealed("data.npz"))
        if self.finished:
            _ = self.axes
            refuse_odd_data(arrays, self.path / "data.npz")
        return arrays

    @cached_property
    def points(self) -> dict[str, slice]:
        """Where each split that was read lies along the axis `probe`."""
        ends = np.cumsum([0, *(len(self.data[f"{split}_index"]) for split in self.read)]).tolist()
        return {split: slice(*ends[k : k + 2]) for k, split in enumerate(self.read)}

    def series(self, *columns: str) -> pd.DataFrame:
        """The steps at which all of these were measured, and are numbers that a picture can hold."""
        chosen = self.metrics.reindex(columns=["step", *columns])
        fit = (np.abs(chosen.to_numpy(dtype=float)) < DIVERGED).all(axis=1)
        found: pd.DataFrame = chosen.loc[fit].reset_index(drop=True)
        return found

    @property
    def read(self) -> tuple[str, ...]:
        """The splits at which the network was read."""
        chosen = self.config.get("path", {}).get("probes", SPLITS)
        return tuple(split for split in SPLITS if split in chosen)


def load_run(folder: Path | str) -> Run:
    """Load a finished run. A folder that is none is a `Mistake` that says why."""
    if not isinstance(folder, str | Path) or "\0" in str(folder):
        raise Mistake(f"the folder of a run is {in_short(folder)}, a {type(folder).__name__}; give its path")
    run = load_tables(folder)
    _ = run.kernels  # what cannot be opened is better known now
    return run


def load_tables(folder: Path | str) -> Run:
    """Load a finished run; its kernels are opened when they are first used."""
    path = Path(folder)
    if path.is_dir() and not is_run_folder(path):
        raise Mistake(f"{path} is not a run folder: it lacks config.json and DONE.json")
    if (defect := RunFolder(path).defect) is not None:
        running = RunFolder(path).state == "running"
        advice = f"; {REDO}" if (path / DONE).is_file() else ""
        raise Mistake(f"{path} is still being written" if running else f"{path} {defect}{advice}")
    refuse_other_version(path)
    RunFolder(path).check(*TABLES, *([RETRACED] if (path / RETRACED).exists() else []))
    return read_run(path)


def load_runs(folders: Iterable[Path | str]) -> list[Run | Mistake]:
    """Load runs, or find why one cannot be read, in the order of the folders.

    Two at a time: most of it is reading and hashing files, for which no lock of Python's is held.
    """

    def load(folder: Path | str) -> Run | Mistake:
        try:
            return load_tables(folder)
        except Mistake as mistake:
            return mistake
        except Exception as error:  # one folder never takes the others with it
            return unreadable(Path(folder), error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(load, folders))


def read_run(path: Path) -> Run:
    """Read a run from its files, finished or not."""
    return Run(
        path=path,
        config=RunFolder(path).config,
        metrics=read_metrics(path / "metrics.csv"),
        ladder=checked_ladder(read_results(path / "results.csv"), path / "results.csv"),
    )


def checked_ladder(rows: Sequence[Result], path: Path) -> tuple[Result, ...]:
    """Return the rows with their texts made printable, or raise if one is of no split or of no machine."""
    if any(row.split not in SPLITS or not row.machine for row in rows):
        raise Damaged(f"{path} holds what no run writes: a row of another split than {', '.join(SPLITS)}; {REDO}")
    return tuple(
        replace(row, machine=printable(row.machine), detail=printable(row.detail), note=printable(row.note))
        for row in rows
    )


def read_metrics(path: Path) -> pd.DataFrame:
    """Read what was measured, a row per step, all numbers, with what a second pass found; empty cells are NaN."""
    try:
        refuse_odd_metrics(path)
        metrics = pd.read_csv(path, index_col=False, dtype=NUMBERS)
        refuse_odd_steps(metrics["step"].to_numpy(), path)
        if (retraced := path.with_name(RETRACED)).is_file():
            refuse_odd_metrics(retraced)
            shares = pd.read_csv(retraced, index_col="step", dtype=float)
            refuse_odd_steps(shares.index.to_numpy(), retraced)
            shares = shares.reindex(metrics["step"])
            metrics = metrics.assign(**{str(name): shares[name].to_numpy() for name in shares})
        return metrics
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise (
            error if isinstance(error, Mistake) else Mistake(f"{path} is missing or damaged: {one_line(error)}")
        ) from error


def open_store(path: Path) -> xr.Dataset:
    """Open a zarr store with its dimensions named; the numbers are read when they are used."""
    import xarray as xr  # noqa: PLC0415  slow, and tables need none

    try:
        store: xr.Dataset = xr.open_zarr(path, consolidated=False, chunks=None)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{path} is missing or damaged: {one_line(error)}") from error
    return store


def blocks(parts: xr.DataArray) -> Iterator[NDArray[Any]]:
    """Read an array that may be larger than the memory, some of its rows at a time."""
    rows, row = len(parts), max(1, parts[:1].nbytes)
    step = max(1, LARGEST_CHUNK // row)
    return (parts[start : start + step].to_numpy() for start in range(0, max(1, rows), step))


def unreadable(path: Path, error: Exception) -> Mistake:
    """Make a mistake of an error that the schema of run folders did not foresee."""
    return Damaged(f"{path} cannot be read ({type(error).__name__}: {one_line(error)}); {REDO}")


def one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


START_VARIANCE = "start_variance"
MEASURES = {
    "drift": "movement of the kernel",
    "weights_moved": "movement of the weights",
    "loss": "training loss",
    "loss_probe": "loss on new points",
    "accuracy": "training accuracy",
    "accuracy_probe": "accuracy on new points",
    "alignment": "alignment of the kernel with the first",
    "limit_distance": "distance of the kernel from the infinite one",
    "limit_distance_start": "distance of the first kernel from the infinite one",
    START_VARIANCE: "variance of the first kernel over seeds",
    "limit_alignment": "alignment of the kernel with the infinite one",
    "label_alignment": "alignment of the kernel with the labels",
    "trace": "trace of the kernel",
    "lambda_max": "largest eigenvalue of the kernel",
    "condition": "condition number of the kernel",
    "effective_rank": "effective rank of the kernel",
    "pattern_change": "share of units that switched",
    "stability": "largest eigenvalue, as a share of the edge of stability",
    "closure": "error of one step's sum",
    "selectivity": "selectivity of the hidden units",
}
LAYER = "weights_moved."
SHARES = {
    *("accuracy", "accuracy_probe", "pattern_change", "selectivity"),
    *("alignment", "limit_alignment", "label_alignment"),  # cosines between kernels that are ≥ 0
}
FROM_ONE = {"condition", "effective_rank"}


def range_of(quantity: str) -> Range:
    """Return the ends between which a number of a run lies; all other numbers are sizes, which are positive."""
    if quantity in SHARES:
        return SHARE
    return (1.0, math.inf) if quantity in FROM_ONE else POSITIVE


def quantities(run: Run) -> dict[str, float]:
    if run.diverged:
        return {}
    columns = [name for name in map(str, run.metrics) if name in MEASURES or name.startswith(LAYER)]
    values = run.metrics[columns].to_numpy(dtype=float)
    measured = dict[str, float]()
    if len(values):
        last = len(values) - 1 - np.argmax(~np.isnan(values[::-1]), axis=0)
        measured = dict(zip(columns, values[last, np.arange(len(columns))].tolist(), strict=True))
    if "limit_distance" in columns and len(values):
        measured["limit_distance_start"] = float(values[0, columns.index("limit_distance")])
    errors = {f"{row.machine}.{row.split}": row.relative_error for row in run.ladder}
    return {name: value for name, value in (measured | errors).items() if value is not None and np.isfinite(value)}


def describe(quantity: str) -> str:
    """Spell a quantity in words; one that there cannot be is a mistake."""
    if quantity in MEASURES:
        return MEASURES[quantity]
    if quantity.startswith(LAYER):
        return f"movement of {quantity.removeprefix(LAYER)}"
    machine, _, split = quantity.rpartition(".")
    if machine and split in SPLITS:
        return f"error of {spoken(machine)} ({split})"
    raise Mistake(
        f"'{quantity}' is not a number of a run{nearest(quantity, MEASURES)}; "
        f"there are {', '.join(MEASURES)}, and MACHINE.SPLIT such as left.test"
    )


# --- Several runs side by side, as a person reads them.


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """Tabulate a row per run: its name, where its configuration differs from the others', and each machine's relative
    error.
    """
    configs = [flatten_config(run.config) for run in runs]
    keys = differing(configs)
    rows = []
    for run, config in zip(runs, configs, strict=True):
        split = main_split(run.ladder)  # by which the run is judged
        here = [row for row in run.ladder if row.split == split and row.relative_error is not None]
        row = {"run": run.name} | {key: config.get(key) for key in keys} | {"split": split}
        rows.append(row | {each.machine: each.relative_error for each in here})
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
    return table.assign(outcome=[run.outcome for run in runs])


CHOICES = ("data", "model", "optimizer", "loss")
"""The parts of an experiment by whose options runs are grouped."""
FOREMOST = ("model.", "steps", "seed")
"""The settings that are named before others."""
LONGEST = 60  # letters of what sets a run apart


@dataclass(frozen=True)
class RunGroup:
    """Runs that chose the same parts: which, as far as others chose otherwise, and a row for each run, errors first."""

    title: str
    runs: tuple[Run, ...]
    table: pd.DataFrame


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs by their parts, in the order in which these first stand; runs that are alone in that make the last
    group."""
    configs = {run.path: flatten_config(run.config) for run in runs}
    chosen = [key for key in differing(list(configs.values())) if key in CHOICES]
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(configs[run.path].get(key) for key in chosen), []).append(run)
    alone = [run for group in groups.values() if len(group) == 1 for run in group]
    found = []
    for parts, group in groups.items():
        if len(group) > 1:
            found.append((" ".join(f"{key}={part}" for key, part in zip(chosen, parts, strict=True)), group))
    if alone:
        found.append(("unlike any other" if found else "", alone))
    return [RunGroup(title, tuple(group), errors_first(group)) for title, group in found]


def errors_first(runs: Sequence[Run]) -> pd.DataFrame:
    """Tabulate what sets each run apart from the others, in a few letters, its relative errors, and its outcome."""
    configs = [flatten_config(run.config) for run in runs]
    keys = sorted(differing(configs), key=lambda key: (key not in CHOICES, not key.startswith(FOREMOST)))
    last = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    rows = []
    for run, config in zip(runs, configs, strict=True):
        words = " ".join(f"{names[key]}={config[key]}" for key in keys if config.get(key) is not None)
        split = main_split(run.ladder)
        errors = {row.machine: row.relative_error for row in run.ladder if row.split == split}
        rows.append({"run": textwrap.shorten(words, LONGEST, placeholder=" …") or run.name, "split": split} | errors)
    table = pd.DataFrame(rows).dropna(axis=1, how="all")
    longest = max(runs, key=lambda run: len(run.ladder))  # in whose order machines stand, before those of others
    machines = dict.fromkeys(row.machine for run in (longest, *runs) for row in run.ladder)
    chosen = ["run", *(name for name in machines if name in table), "split"]
    return table[chosen].assign(outcome=[run.outcome for run in runs])


def compare_configs(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each key whose value differs; a key that one of them lacks has none there."""
    one, other = flatten_config(first.config), flatten_config(second.config)
    rows = [(key, one.get(key), other.get(key)) for key in differing([one, other])]
    return pd.DataFrame(rows, columns=["key", "first", "second"], dtype=object)


def compare_results(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each number that both yield, with their ratio."""
    one, other = quantities(first), quantities(second)
    rows = [
        (name, one[name], other[name], other[name] / one[name] if one[name] else float("nan"))
        for name in one
        if name in other
    ]
    return pd.DataFrame(rows, columns=["quantity", "first", "second", "second/first"])


def numbers_of_one_alone(first: Run, second: Run) -> tuple[list[str], list[str]]:
    """The numbers that only one of them yields."""
    one, other = quantities(first), quantities(second)
    return [name for name in one if name not in other], [name for name in other if name not in one]
