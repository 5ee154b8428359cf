"""The reader of a run folder: configuration, metrics, table of kernel machines,
and arrays.

`load_tables` reads a finished, undamaged run without opening its arrays. `read_run`
also reads unfinished runs, because a run draws its pictures before it is marked as
finished. DONE.json contains the checksum of each array file, which is verified when the
array is first used.

This module imports no other module of `ntkexp.report`. `report.loaded_run` adds
pictures and notebook displays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.array_schema import (
    RunAxes,
    read_headers,
    refuse_odd_data,
    refuse_odd_steps,
)
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
from ntkexp.records.diagnostics import DIAGNOSTICS, refuse_odd_diagnostics
from ntkexp.records.folder import (
    CONFIG,
    DONE,
    REDO,
    RunFolder,
    is_run_folder,
    refuse_other_version,
)
from ntkexp.records.kernels import (
    LARGEST_CHUNK,
    refuse_odd_kernels,
    refuse_odd_predictions,
)
from ntkexp.records.recorded import (
    RECORDED,
    read_outputs,
    read_weights,
    refuse_odd_recorded,
)
from ntkexp.records.results import (
    COLUMNS,
    NUMBER_COLUMNS,
    RETRACED,
    SPLITS,
    Result,
    read_results,
)
from ntkexp.records.schema import refuse_odd_metrics
from ntkexp.text import printable

if TYPE_CHECKING:
    import xarray as xr

RUN_TABLES = (CONFIG, "metrics.csv", "results.csv")
METRICS_TYPES: Mapping[str, type[float]] = defaultdict(
    lambda: float, step=int, phase=int
)
"""The types of the columns of metrics.csv."""

MAX_DRAWN_NUMBER = 1e100  # plots omit larger numbers, which occur if training diverges


@dataclass(frozen=True)
class Run:
    """A run, read from its folder. Large arrays are read when they are first used."""

    path: Path
    config: dict[str, Any]
    metrics: pd.DataFrame
    ladder: tuple[Result, ...]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def report_folder(self) -> Path:
        """The folder of pages about the run: `report`, next to the folder `runs`, or
        else next to the run."""
        folder = self.path.parent
        if folder.name == "runs":
            folder = folder.parent
        return folder / "report"

    @property
    def last_step(self) -> int:
        return int(self.metrics["step"].iloc[-1])

    @property
    def outcome(self) -> str:
        """The result of training in words; empty while the run is unfinished."""
        return str(self.facts.get("outcome", ""))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of DONE.json; empty while the run is unfinished."""
        if self.finished:
            return RunFolder(self.path).sealed_facts
        return {}

    @property
    def finished(self) -> bool:
        """True if DONE.json exists, the file with the checksums of all other files."""
        return (self.path / DONE).is_file()

    @property
    def diverged(self) -> bool:
        """True if training diverged. An unfinished run records this
        in progress.json."""
        with suppress(Mistake):
            facts = self.facts if self.finished else RunFolder(self.path).progress
            return bool(facts.get("diverged"))
        return False

    def sealed(self, name: str) -> Path:
        """Return the path of a file or store. Raise if it has changed
        since the run was finished."""
        if self.finished:
            RunFolder(self.path).check(name)
        return self.path / name

    @cached_property
    def results(self) -> pd.DataFrame:
        """The comparison of kernel machines as a data frame."""
        return pd.DataFrame(self.ladder, columns=list(COLUMNS)).astype(
            dict.fromkeys(NUMBER_COLUMNS, float)
        )

    @cached_property
    def kernels(self) -> xr.Dataset:
        """Tangent kernels by snapshot, and path kernels by rule."""
        path = self.sealed("kernels.zarr")
        if self.finished:
            refuse_odd_kernels(path, self.axes.lengths)
        return open_store(path).set_coords("step")

    @cached_property
    def diagnostics(self) -> xr.Dataset:
        """The arrays that diagnostics returned, by snapshot. `metrics` contains the
        single numbers that diagnostics returned.

        Empty if no diagnostic returned arrays.
        """
        import xarray as xr  # noqa: PLC0415  slow to import, and tables do not need it

        if not (self.path / DIAGNOSTICS).exists():
            return xr.Dataset()
        path = self.sealed(DIAGNOSTICS)
        if self.finished:
            refuse_odd_diagnostics(path)
        return open_store(path).set_coords("step")

    @cached_property
    def recorded(self) -> xr.Dataset:
        """The arrays of `path.record` by snapshot: `outputs` [snapshot, query, out] and
        `weights` [snapshot, weight]. The coordinate `step` holds the step of each
        snapshot.

        Empty if nothing was recorded.
        """
        import xarray as xr  # noqa: PLC0415  slow to import, and tables do not need it

        if not (self.path / RECORDED).exists():
            return xr.Dataset()
        return open_store(self.recorded_store).set_coords("step")

    @property
    def recorded_store(self) -> Path:
        """The checked path of the store of recorded arrays.
        Raise if nothing was recorded."""
        if not (self.path / RECORDED).exists():
            raise Mistake(
                f"{self.path} recorded nothing; run it with path.record=[outputs,weights]"
            )
        path = self.sealed(RECORDED)
        if self.finished:
            refuse_odd_recorded(path, self.axes.lengths)
        return path

    def outputs_at(self, step: int) -> NDArray[np.float64]:
        """Return the outputs [query, out] of the network at a recorded step."""
        return read_outputs(self.recorded_store, step)

    def weights_at(self, step: int) -> dict[str, NDArray[np.float64]]:
        """Return the weights at a recorded step, by the name of the parameter."""
        return read_weights(self.recorded_store, step)

    @cached_property
    def axes(self) -> RunAxes:
        """The lengths of the axes of the run's arrays."""
        path = self.sealed("data.npz")
        return RunAxes.of(read_headers(path), self.read, path)

    @cached_property
    def contributions(self) -> xr.Dataset:
        """The arrays of `records.contributions`,
        with an axis `phase` if the run has phases."""
        path = self.sealed("contributions.zarr")
        if self.finished:
            refuse_odd_contributions(path, self.axes.lengths, self.outputs)
        store = open_store(path)
        labels = [name for name in ("example", "out", COMPONENT) if name in store.attrs]
        store = store.assign_coords({name: store.attrs.pop(name) for name in labels})
        store = store.set_coords([LAST_STEP] if LAST_STEP in store else [])
        if OUT_NAME in self.data:  # the run attributes a measure instead of the outputs
            if len(self.data[OUT_NAME]) != store.sizes["out"]:
                raise Damaged(
                    f"{self.path} is damaged: its outputs have other names; {REDO}"
                )
            store = store.assign_coords({OUT_NAME: ("out", self.data[OUT_NAME])})
        if PHASES in store.attrs:
            names = store.attrs.pop(PHASES)
            store = store.assign_coords(
                phase=np.arange(1, len(names) + 1), phase_name=("phase", names)
            )
            store = store.set_coords([EXAMPLE_PHASE, POINT_PHASE])
        return store

    @property
    def outs(self) -> tuple[int, ...]:
        """The attributed outputs: the labels of the axis `out`
        of contributions and effects."""
        return tuple(self.contributions.coords["out"].to_numpy().tolist())

    @property
    def rules(self) -> tuple[str, ...]:
        """The attribution rules of the run."""
        parts = [
            self.contributions[name]
            for name in self.contributions
            if str(name).startswith(CONTRIBUTION)
        ]
        return tuple(str(part.attrs["rule"]) for part in parts)

    def parts(self, rule: str) -> xr.DataArray:
        """Return the contributions of an attribution rule, [query, out, example]."""
        return self.contributions[
            called(CONTRIBUTION, rule, explained_rule(self.rules) or rule)
        ]

    @cached_property
    def predictions(self) -> xr.DataArray:
        """Outputs of the network and of each kernel machine, [machine, query, out]."""
        path = self.sealed("predictions.zarr")
        if self.finished:
            refuse_odd_predictions(path, self.axes.lengths)
        store = open_store(path)
        return store["prediction"].assign_coords(machine=store.attrs["machines"])

    @cached_property
    def outputs(self) -> int:
        """The number of the network's outputs."""
        return refuse_odd_predictions(
            self.sealed("predictions.zarr"), self.axes.lengths
        )

    @cached_property
    def data(self) -> dict[str, NDArray[Any]]:
        """The arrays of `records.data`."""
        arrays = read_data(self.sealed("data.npz"))
        if self.finished:
            _ = self.axes
            refuse_odd_data(arrays, self.path / "data.npz")
        return arrays

    @cached_property
    def points(self) -> dict[str, slice]:
        """The slice of each split along the axis `query`."""
        ends = np.cumsum(
            [0, *(len(self.data[f"{split}_index"]) for split in self.read)]
        ).tolist()
        return {split: slice(*ends[k : k + 2]) for k, split in enumerate(self.read)}

    def series(self, *columns: str) -> pd.DataFrame:
        """Return `step` and the given columns, at the steps where all values are small
        enough to draw."""
        values = self.metrics.reindex(columns=["step", *columns])
        drawn = (np.abs(values.to_numpy(dtype=float)) < MAX_DRAWN_NUMBER).all(axis=1)
        rows: pd.DataFrame = values.loc[drawn].reset_index(drop=True)
        return rows

    @property
    def read(self) -> tuple[str, ...]:
        """The splits on which the network was evaluated."""
        splits = self.config.get("path", {}).get("queries", SPLITS)
        return tuple(split for split in SPLITS if split in splits)


# --- Queries of a run: their indices along the axis `query`, and their outputs.


def slice_of_split(run: Run, split: str) -> slice:
    """Return the slice of a split along the axis `query`."""
    if split not in run.points:
        splits = f"{', '.join(run.points)}{nearest(split, run.points)}"
        raise WrongArgument(f"split={split}: {run.name} was read at {splits}", "split")
    return run.points[split]


def point_index(run: Run, split: str, number: int) -> int:
    """Return the index of an example of a split along the axis `query`."""
    points = slice_of_split(run, split)
    count = points.stop - points.start
    if not 0 <= number < count:
        raise WrongArgument(
            f"query={number}: the split {split} of {run.name} has points 0 to {count - 1}",
            "query",
        )
    return int(points.start) + number


def outputs_of(run: Run, machine: str) -> NDArray[np.float64]:
    """Return the outputs of the network (`f_0`, `f_T`) or of a kernel machine,
    [query, out]."""
    if machine not in run.predictions["machine"]:
        raise Mistake(f"{run.path} is damaged: its predictions lack {machine}")
    return np.asarray(run.predictions.sel(machine=machine).to_numpy(), dtype=float)


# --- Reading run folders.


def load_tables(folder: Path | str) -> Run:
    """Load a finished run. Its arrays are opened when they are first used.

    Raises:
        Mistake: The run is unfinished, damaged or of another version,
            or the folder is not a run.
    """
    path = Path(folder)
    if path.is_dir() and not is_run_folder(path):
        raise Mistake(f"{path} is not a run folder: it lacks config.json and DONE.json")
    if (defect := RunFolder(path).defect) is not None:
        running = RunFolder(path).state == "running"
        advice = f"; {REDO}" if (path / DONE).is_file() else ""
        raise Mistake(
            f"{path} is still being written" if running else f"{path} {defect}{advice}"
        )
    refuse_other_version(path)
    RunFolder(path).check(
        *RUN_TABLES, *([RETRACED] if (path / RETRACED).exists() else [])
    )
    return read_run(path)


def load_runs(folders: Iterable[Path | str]) -> list[Run | Mistake]:
    """Load runs in the order of the folders. For a run that cannot be read,
    return the `Mistake`.

    Use two threads, because reading and hashing files releases the GIL.
    """

    def load(folder: Path | str) -> Run | Mistake:
        try:
            return load_tables(folder)
        except Mistake as mistake:
            return mistake
        except Exception as error:
            # a broken folder must not prevent the others from being read
            return unreadable(Path(folder), error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(load, folders))


def read_run(path: Path) -> Run:
    """Read a finished or unfinished run from its files."""
    return Run(
        path=path,
        config=RunFolder(path).config,
        metrics=read_metrics(path / "metrics.csv"),
        ladder=checked_ladder(read_results(path / "results.csv"), path / "results.csv"),
    )


def checked_ladder(rows: Sequence[Result], path: Path) -> tuple[Result, ...]:
    """Escape unprintable characters in the rows of results.csv.

    Raise if a row has an unknown split or no machine.
    """
    if any(row.split not in SPLITS or not row.machine for row in rows):
        raise Damaged(
            f"{path} has content that no run writes: a row of another split than {', '.join(SPLITS)}; {REDO}"
        )
    return tuple(
        replace(
            row,
            machine=printable(row.machine),
            detail=printable(row.detail),
            note=printable(row.note),
        )
        for row in rows
    )


def read_metrics(path: Path) -> pd.DataFrame:
    """Read metrics.csv, and the columns that a backward pass over the training
    measured.

    Empty cells are NaN.
    """
    try:
        refuse_odd_metrics(path)
        metrics = pd.read_csv(path, index_col=False, dtype=METRICS_TYPES)
        refuse_odd_steps(metrics["step"].to_numpy(), path)
        if (retraced := path.with_name(RETRACED)).is_file():
            refuse_odd_metrics(retraced)
            shares = pd.read_csv(retraced, index_col="step", dtype=float)
            refuse_odd_steps(shares.index.to_numpy(), retraced)
            shares = shares.reindex(metrics["step"])
            metrics = metrics.assign(
                **{str(name): shares[name].to_numpy() for name in shares}
            )
        return metrics
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise (
            error
            if isinstance(error, Mistake)
            else Mistake(f"{path} is missing or damaged: {one_line(error)}")
        ) from error


def open_store(path: Path) -> xr.Dataset:
    """Open a zarr store as a data set, with its arrays in alphabetical order. Each
    array is read when it is used."""
    import xarray as xr  # noqa: PLC0415  slow to import, and tables do not need it

    try:
        store: xr.Dataset = xr.open_zarr(path, consolidated=False, chunks=None)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{path} is missing or damaged: {one_line(error)}") from error
    # zarr lists the arrays in the order of the file system
    return store[sorted(store.data_vars, key=str)]


def blocks(parts: xr.DataArray) -> Iterator[NDArray[Any]]:
    """Yield an array in blocks of rows, because the array may exceed the memory."""
    row_bytes = max(1, parts[:1].nbytes)
    step = max(1, LARGEST_CHUNK // row_bytes)
    for start in range(0, max(1, len(parts)), step):
        yield parts[start : start + step].to_numpy()


def unreadable(path: Path, error: Exception) -> Mistake:
    """Return a `Damaged` for an unexpected error while reading a run folder."""
    return Damaged(
        f"{path} cannot be read ({type(error).__name__}: {one_line(error)}); {REDO}"
    )


def one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
