"""`LoadedRun`, the object that `ntkexp.load_run` returns: a `Run` with pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake, in_short
from ntkexp.report.examples import example_on_axis
from ntkexp.report.run import Run, load_tables
from ntkexp.report.sentence import tabulate_ladder
from ntkexp.report.tables import format_text

if TYPE_CHECKING:
    from ntkexp.report.plots.run_plots import RunPlots
    from ntkexp.report.scores import Attribution


@dataclass(frozen=True)
class LoadedRun(Run):
    """A finished run with pictures: `run.plot` and `run.contributions.plot`.

    Large arrays are read from the folder when they are first used.

    Attributes:
        path: The folder of the run.
        config: The settings, as a nested dict.
        metrics: A data frame with one row per step: loss, kernel change, spectrum
            and more.
        results: The table of kernel machines, a data frame.
        predictions: The outputs of each kernel machine, [machine, query, out].
        kernels: Tangent kernels by snapshot, and path kernels by rule,
            an xarray data set.
        contributions: An `Attribution` with contributions,
            decay and other parts of the change.
        plot: Pictures as methods, such as `run.plot.ladder()`.
        diagnostics: The arrays of `diagnostics=` by snapshot, an xarray data set.
        recorded: The arrays of `path.record` by snapshot, an xarray data set.
        outcome: The result of training in words.
    """

    @cached_property
    def contributions(self) -> Attribution:
        """The contributions (see `records.contributions`),
        with `to_scores` and pictures."""
        from ntkexp.report.scores import Attribution  # noqa: PLC0415  loads xarray

        arrays = super().contributions
        return Attribution(arrays.data_vars, arrays.coords, arrays.attrs).showing(
            partial(example_on_axis, self)
        )

    @property
    def plot(self) -> RunPlots:
        """Pictures of the run, as matplotlib axes: for example, `run.plot.ladder()`."""
        from ntkexp.report.plots.run_plots import RunPlots  # noqa: PLC0415  loads matplotlib

        return RunPlots(self)

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: the outcome of training,
        and the table of errors."""
        text = "\n\n".join(
            [f"{self.name}: {self.outcome}", format_text(tabulate_ladder(self.ladder))]
        )
        return f"<pre>{escape(text)}</pre>"


def with_pictures(run: Run) -> LoadedRun:
    """Return a run with its pictures."""
    return LoadedRun(run.path, run.config, run.metrics, run.ladder)


def load_run(folder: Path | str) -> LoadedRun:
    """Load a finished run.

    Args:
        folder: The folder of the run (the command prints it), or the folder
            of an attributed trace.

    Returns:
        The run, with tables, arrays and pictures.

    Raises:
        Mistake: if the folder contains no finished run, or if a file is damaged.
    """
    if not isinstance(folder, str | Path) or "\0" in str(folder):
        raise Mistake(
            f"the folder of a run is {in_short(folder)}, a {type(folder).__name__}; give its path"
        )
    run = with_pictures(load_tables(folder))
    _ = run.kernels  # open the store now, so that a damaged store raises here
    return run
