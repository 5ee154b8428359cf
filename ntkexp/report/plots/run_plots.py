"""Pictures of a run, a sweep, many runs and an ensemble,
as reproducible SVG and CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, nearest
from ntkexp.naming import module_names
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots import figures, together
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.error_panels import ErrorPanels, rows_of
from ntkexp.report.plots.rendering import Picture, svg
from ntkexp.report.plots.style import (
    BLACK,
    GREY,
    NARROW,
    WIDE,
    Style,
    brief,
    colour,
    heading,
    house_style,
    style_of_user,
)
from ntkexp.report.run import Run
from ntkexp.report.sentence import Likeness, likeness, main_split
from ntkexp.report.tables import format_csv
from ntkexp.text import listed, short, spoken

Draw: TypeAlias = Callable[[Run, Canvas], Figure | None]


def exhibition(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[Picture]:
    """Yield the pictures of a sweep, which the modules in `together`
    draw. Power laws come first."""
    with house_style():
        for name in sorted(module_names(together), key=lambda name: name != "laws"):
            module = import_module(f"{together.__name__}.{name}")
            for picture in module.pictures(analysis, runs):
                figure = picture.draw(Canvas())
                yield Picture(f"{name}{picture.suffix}", figure, picture.table)


def gallery() -> Iterator[tuple[str, Draw]]:
    """Yield the pictures of a run: the name and the function `draw` of
    each module in `figures`."""
    for name in module_names(figures):
        yield name, import_module(f"{figures.__name__}.{name}").draw


@dataclass(frozen=True)
class RunPlots:
    """The plots of a run, as methods that return matplotlib axes. A picture with
    several panels returns a list of axes.

    `dir(run.plot)` lists the names of the methods. Each method takes:

    - `ax`, axes to draw on. By default, a new figure is drawn. Pictures with several panels divide
      the place of axes of `plt.subplots`,
    - `title`, instead of the title of the picture,
    - `style`, a style as `matplotlib.style.context` takes it, such as "ggplot" or
      `{"font.size": 10}`. Settings that you change in `matplotlib.rcParams` apply as well.

    Show `axes.figure` in a notebook, or call `axes.figure.savefig`.
    """

    run: Run

    def __dir__(self) -> list[str]:
        return [name for name, _ in gallery()]

    def __getattr__(self, name: str) -> Plot:
        draw = dict(gallery()).get(name)
        if draw is None:
            raise AttributeError(
                f"there is no picture '{name}' of a run{nearest(name, dir(self))}"
            )

        def plot(
            *,
            ax: Axes | None = None,
            title: str | None = None,
            style: Style | None = None,
        ) -> Axes | list[Axes]:
            canvas = Canvas(ax, title)
            with style_of_user(style, is_house=ax is None):
                if draw(self.run, canvas) is None:
                    raise Mistake(
                        f"{self.run.name} has no data for the picture '{name}'"
                    )
            return canvas.axes

        plot.__name__ = name
        plot.__doc__ = (
            f"{import_module(draw.__module__).__doc__}\n{PLOT_ARGUMENTS.format(name)}"
        )
        return plot


class Plot(Protocol):
    """A method of `RunPlots`."""

    def __call__(
        self,
        *,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes | list[Axes]: ...


PLOT_ARGUMENTS = """Args:
    ax: Axes to draw on. By default, a new figure is drawn.
    title: A title, instead of that of the picture.
    style: A style of matplotlib, such as "ggplot".

Returns:
    The axes, or a list of axes if the picture has several panels.

Example:
    `run.plot.{}(title="My network").figure.savefig("mine.pdf")`
"""


def figure_of(run: Run, draw: Draw) -> Figure | None:
    """Draw a picture in the style of this package. Ignore the settings of the user."""
    with house_style():
        return draw(run, Canvas())


def files_of(run: Run, name: str, draw: Draw) -> Iterator[tuple[str, str]]:
    """Yield the file name and content of a picture, then of its data.

    Yield nothing if there is no picture.
    """
    figure = figure_of(run, draw)
    if figure is not None:
        yield f"{name}.svg", svg(figure)
        yield (
            f"{name}.csv",
            format_csv(import_module(f"{figures.__name__}.{name}").table(run)),
        )


def all_files_of(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the file names and contents of all pictures and their data."""
    for name, draw in gallery():
        yield from files_of(run, name, draw)


# --- The errors of kernel machines in many runs: a row for each machine, a dot for each
# run, a bar at the median.
#
# Errors that are not finite have no dot. The text at the end
# of the row states their number.


def strip(runs: Sequence[Run]) -> Picture | None:
    """Return the picture of errors, or None if no kernel machine has a finite error."""
    rows: dict[tuple[int, str], tuple[object, ...]] = {}
    for k, run in enumerate(runs):
        for row in run.ladder:
            if row.split == main_split(run.ladder) and row.relative_error is not None:
                is_exact = likeness(row) is Likeness.EXACT
                numbers = (row.relative_error, is_exact, row.control)
                rows[k, row.machine] = (run.name, row.machine, row.split, *numbers)
    columns = ["run", "machine", "split", "relative_error", "exact", "control"]
    # index by the number of the run, because two runs may have the same name
    table = pd.DataFrame(rows.values(), [k for k, _ in rows], columns)
    if not np.isfinite(table["relative_error"].to_numpy(dtype=float)).any():
        return None
    with house_style():
        return Picture("machines", draw_strip(table, len(runs), Canvas()), table)


def draw_strip(table: pd.DataFrame, runs: int, canvas: Canvas) -> Figure:
    """Draw a row for each kernel machine."""
    controls = dict(zip(table["machine"], table["control"].astype(bool), strict=True))
    names = sorted(controls, key=controls.__getitem__)  # controls last
    heights = rows_of([controls[name] for name in names])
    finite = table[np.isfinite(table["relative_error"])]
    is_exact = finite["exact"].astype(bool)
    width = NARROW if runs == 1 else WIDE
    size = (width, 1.3 + 0.19 * len(names))
    others = finite.loc[~is_exact, "relative_error"].tolist()
    rounding = finite.loc[is_exact, "relative_error"].tolist()
    panels = ErrorPanels.of(canvas, size, others, rounding)
    for height, name in zip(heights, names, strict=True):
        of_machine = finite[finite["machine"] == name]
        for error, exact in zip(
            of_machine["relative_error"], of_machine["exact"], strict=True
        ):
            alpha = 1.0 if runs == 1 else 0.4
            panels.plot(
                error, height, "o", is_exact=exact, color=colour(name), alpha=alpha
            )
        if runs > 1 and len(of_machine):
            middle = float(of_machine["relative_error"].median())
            at_rounding = bool(of_machine["exact"].median() > 0.5)
            panels.mark(middle, height, is_exact=at_rounding)
    texts = [
        errors_in_words(table.loc[table["machine"] == name, "relative_error"])
        for name in names
    ]
    split = ", ".join(dict.fromkeys(table["split"]))
    panels.name_rows(names, heights, texts, f"{split} error")
    words = f"Relative errors, {split}."
    if runs > 1:
        words += " Dots are runs; bars and the first number are medians over runs."
    return canvas.finish(strip_title(table, runs), words)


def errors_in_words(errors: pd.Series[float]) -> str:
    """Format the errors of a machine: the median, the largest,
    and how many are not finite.

    >>> errors_in_words(pd.Series([1e-15])), errors_in_words(pd.Series([0.01, 0.02, 0.3, float("nan")]))
    ('1e-15', '0.02, worst 0.3; 1 not finite')
    """
    finite = errors[np.isfinite(errors)]
    words = ""
    if len(finite):
        words = short(float(finite.median()))
    if len(finite) > 1:
        words += f", worst {short(float(finite.max()))}"
    if len(finite) == len(errors):
        return words
    infinite = f"{len(errors) - len(finite)} not finite"
    if words:
        return f"{words}; {infinite}"
    return infinite


def strip_title(table: pd.DataFrame, runs: int) -> str:
    """Return the title: the kernel machine that has the smallest error most often.

    Controls are ignored, and errors that are only rounding count as 0.
    """
    own = table[~table["control"].astype(bool) & np.isfinite(table["relative_error"])]
    ranks = own["relative_error"].mask(own["exact"].astype(bool), 0.0)
    least = ranks.groupby(level=0).transform("min")
    times = own.loc[(ranks == least).to_numpy(), "machine"].value_counts(sort=False)
    if not len(times):
        return "No machine that knows the network has a finite error"
    first = [spoken(str(name)) for name in times.index[times == times.max()]]
    where = "" if runs == 1 else f" in {times.max()} of {runs} runs"
    title = f"Nearest to the network: {listed(first)}{where}"
    return brief(title, f"Nearest to the network: {len(first)} machines{where}")


# --- Which Gaussian process do trained networks follow? There is one panel for each
# kind of networks:
#
#     faint lines    single networks
#     band           mean ± 2 standard deviations of the process that theory predicts
#     thin lines     mean ± 2 standard deviations of the other processes
#     dashed lines   mean ± 2 standard deviations of the networks
#     dots           training data


Curve: TypeAlias = NDArray[np.float64]
LINES = 25  # largest number of drawn networks
# each process has the colour of this kernel machine
PROCESSES = {"ntk": "frozen_limit", "nngp": "nngp"}


@dataclass(frozen=True)
class Theory:
    """The mean and standard deviation of a Gaussian process at the plotted inputs."""

    process: str
    mean: Curve
    deviation: Curve


@dataclass(frozen=True)
class Panel:
    """The content of one panel: the networks, the Gaussian process that theory predicts
    for them, and other processes."""

    title: str
    networks: NDArray[np.float64]  # outputs, [network, input]
    own: Theory
    others: Sequence[Theory]


def draw_ensemble(
    places: Curve,
    panels: Sequence[Panel],
    learned: tuple[Curve, Curve],
    axis: str,
    answer: str,
) -> Figure:
    """Draw panels side by side, with a shared y axis.
    `places` are the inputs on the x axis."""
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        draw_panel(axes, places, panel)
        axes.plot(*learned, "o", color=BLACK, markersize=4, zorder=5)
        axes.set(xlabel=axis, xlim=(places.min(), places.max()))
        axes.set_title(panel.title)
    figure.axes[0].set_ylabel("output")
    curves = (
        "Mean ± 2 standard deviations: orange of the NTK process, purple of the NNGP process, black "
        f"dashes of {len(panels[0].networks)} networks. The band is the process that theory predicts."
    )
    title = "Trained networks, and the Gaussian processes of theory"
    heading(figure, title, f"{curves} {answer}.")
    return figure


def draw_panel(axes: Axes, places: Curve, panel: Panel) -> None:
    """Draw networks, and the mean ± 2 standard deviations of each process and
    of the networks."""
    for network in panel.networks[:LINES]:
        axes.plot(places, network, color=GREY, linewidth=0.4, alpha=0.35, zorder=1)

    # draw the process that theory predicts for these networks as a band
    machine = PROCESSES[panel.own.process]
    mean = panel.own.mean
    low = mean - 2 * panel.own.deviation
    high = mean + 2 * panel.own.deviation
    own = colour(machine)
    axes.fill_between(places, low, high, color=own, alpha=0.35, linewidth=0, zorder=2)
    axes.plot(places, mean, color=own, linewidth=1.6, zorder=3)

    def three_lines(mean: Curve, deviation: Curve, look: dict[str, Any]) -> None:
        axes.plot(places, mean, **look)
        axes.plot(places, mean - 2 * deviation, **look)
        axes.plot(places, mean + 2 * deviation, **look)

    # draw the other processes as thin lines,
    # and the statistics of the networks as dashed lines
    for other in panel.others:
        thin = {
            "color": colour(PROCESSES[other.process]),
            "linewidth": 0.9,
            "zorder": 3.5,
        }
        three_lines(other.mean, other.deviation, thin)
    networks = panel.networks
    broken = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (4, 2)), "zorder": 4}
    deviation = networks.std(axis=0, ddof=1)
    three_lines(networks.mean(axis=0), deviation, broken)
