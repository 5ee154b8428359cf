"""`LoadedSweep`, the object that `ntkexp.load_sweep` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.mistake import Mistake, in_short
from ntkexp.records.folder import is_run_folder
from ntkexp.records.sweep import Level, read_sweep
from ntkexp.report.analysis.tables import Analysis, analyse, load_runs_of
from ntkexp.report.loaded_run import LoadedRun, with_pictures
from ntkexp.report.material import SHOWN_MEASURES, paths_of_name, sweep_extent
from ntkexp.report.tables import format_text, table_of_frame
from ntkexp.text import counted, listed

if TYPE_CHECKING:
    from ntkexp.report.plots.sweep_plots import SweepPlots

OUTPUTS = Path("outputs")
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep with its runs, tables and pictures.

    Attributes:
        path: The file of the sweep, `sweeps/NAME.json`.
        name: The name of the sweep.
        axes: The swept keys with their values, a dict.
        table: A data frame with one row per run: its folder, values, seed, state, and
            numbers such as `loss` and `kernel_change`. `frozen_start.query` is the
            error of a kernel machine on a split. Numbers of unfinished runs are NaN.
        means: A data frame with one row per combination of swept values. It holds mean,
            standard deviation, count and 95 % interval over seeds of every number, such
            as `loss.mean` and `loss.low`.
        fits: A data frame with one row per power law that the sweep fits.
        runs: The readable runs by the name of their folder, a dict of `Run`.
        plot: Pictures as methods, such as `sweep.plot.errors()`.
    """

    analysis: Analysis
    by_folder: Mapping[Path, LoadedRun]
    mistakes: Mapping[Path, Mistake]

    @property
    def path(self) -> Path:
        """The file of the sweep."""
        return self.analysis.sweep.path

    @property
    def name(self) -> str:
        """The name of the sweep."""
        return self.analysis.sweep.name

    @property
    def axes(self) -> dict[str, tuple[Level, ...]]:
        """The swept keys with their values."""
        return dict(self.analysis.sweep.axes)

    @property
    def runs(self) -> dict[str, LoadedRun]:
        """The readable runs, by the name of their folder."""
        return {folder.name: run for folder, run in self.by_folder.items()}

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each run. A finished run that cannot be read is `unreadable`."""
        table = self.analysis.runs.copy()
        for row, run in enumerate(self.analysis.sweep.runs):
            if run.state == "done" and run.folder in self.mistakes:
                table.loc[row, "state"] = UNREADABLE
                table.loc[row, "reason"] = str(self.mistakes[run.folder])
        return table

    @property
    def means(self) -> pd.DataFrame:
        """A row for each combination of swept values, with means over its runs."""
        return self.analysis.points

    @property
    def fits(self) -> pd.DataFrame:
        """A row for each power law."""
        return self.analysis.fits

    @property
    def plot(self) -> SweepPlots:
        """Pictures of the sweep, as matplotlib axes: `sweep.plot.errors()`."""
        from ntkexp.report.plots.sweep_plots import SweepPlots  # noqa: PLC0415  loads matplotlib

        return SweepPlots(self.analysis, self.by_folder)

    def __repr__(self) -> str:
        runs = counted(len(self.analysis.sweep.runs), "run")
        return f"<sweep {self.name}: {runs}, {sweep_extent(self.analysis.sweep)}>"

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: the extent of the sweep and the main means."""
        columns = {
            f"{quantity}.mean": quantity
            for quantity in self.analysis.quantities
            if quantity in SHOWN_MEASURES or quantity.startswith("frozen_start.")
        }
        means = self.means[[*self.axes, *columns]].rename(columns=columns)
        text = f"{self!r}; means over seeds:\n\n{format_text(table_of_frame(means))}"
        return f"<pre>{escape(text)}</pre>"


def load_sweep(sweep: Path | str) -> LoadedSweep:
    """Load a sweep and its finished runs.

    Args:
        sweep: The name of a sweep in the folder `outputs`, its file `sweeps/NAME.json`,
            or the output folder if it contains one sweep.

    Returns:
        The sweep, with its table, runs and pictures.

    Raises:
        Mistake: if there is no such sweep, if its file is damaged,
            or if none of its runs can be read.

    Example:
        `ntkexp.load_sweep("width").plot.errors()`
    """
    if not isinstance(sweep, str | Path) or "\0" in str(sweep):
        kind = type(sweep).__name__
        raise Mistake(f"a sweep is {in_short(sweep)}, a {kind}; give its name or path")
    record = read_sweep(sweep_file(sweep))
    runs, mistakes = load_runs_of(record)
    if not runs:
        reasons = [run.status for run in record.runs if run.state != "done"]
        reasons = reasons or [str(mistake) for mistake in mistakes.values()]
        first = f": {reasons[0]}" if reasons else ""
        raise Mistake(f"{record.path} has no run that can be read{first}")
    by_folder = {folder: with_pictures(run) for folder, run in runs.items()}
    return LoadedSweep(analyse(record, runs), by_folder, mistakes)


def sweep_file(sweep: Path | str) -> Path:
    """Return the file of a sweep from its name, file or folder."""
    paths = paths_of_name(str(sweep), OUTPUTS)
    folder = Path(sweep).expanduser()
    if is_run_folder(folder):
        raise Mistake(f"{sweep} is a run; read it with `load_run`")
    files: Sequence[Path] = [path for path in paths if path.suffix == ".json"]
    files = files or sorted(folder.glob("*.json"))
    if len(files) == 1 and files[0].is_file():
        return files[0]
    if len(files) > 1:
        names = listed([file.stem for file in files])
        raise Mistake(f"{sweep} contains several sweeps, {names}; give the file of one")
    raise Mistake(
        f"there is no sweep {sweep}; give its name in {OUTPUTS}, or its file sweeps/NAME.json"
    )
