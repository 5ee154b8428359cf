"""Pictures of the sweep that `load_sweep` returns. They are methods of `sweep.plot`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.results import SPLITS
from ntkexp.records.sweep import Sweep
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.material import sweep_extent
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import Style, style_of_user
from ntkexp.report.plots.together import errors, heat_map, laws, over_steps
from ntkexp.report.run import Run
from ntkexp.text import counted


@dataclass(frozen=True)
class SweepPlots:
    """Plots of a sweep. Each method returns matplotlib axes, or a list of them.

    Each method takes:

    - `ax`, axes to draw on. By default, a new figure is drawn. Pictures with several panels divide
      the place of axes of `plt.subplots`,
    - `title`, instead of the title of the picture,
    - `style`, a style as `matplotlib.style.context` takes it, such as "ggplot" or
      `{"font.size": 10}`. Settings that you change in `matplotlib.rcParams` apply as well.
    """

    analysis: Analysis
    by_folder: Mapping[Path, Run]

    def errors(
        self,
        key: str | None = None,
        *,
        split: str | None = None,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes | list[Axes]:
        """Draw the error of each kernel machine against a swept key.

        Dots are runs. Lines are arithmetic means over the runs at each value. The
        caption names kernel machines that are exact to rounding in all runs.

        Args:
            key: The key on the x axis. By default, the key with the most values.
            split: The split of the errors: "query", "test" or "train".
                By default, the first of these splits that has errors.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it says how an error changes.
            style: A style of matplotlib.

        Returns:
            The axes. Save the figure with `axes.figure.savefig("picture.svg")`.

        Raises:
            Mistake: if there is no such key or split, or no error.

        Example:
            `sweep.plot.errors("model.width", split="test")`
        """
        if key is not None:
            refuse_other("key", key, self.analysis.sweep.axes)
        if split is not None:
            refuse_other("split", split, SPLITS)
        drawn = errors.pictures(self.analysis, self.by_folder, key=key, split=split)
        return draw_first(
            self.analysis.sweep, "errors", drawn, Canvas(ax, title), style
        )

    def heat_map(
        self,
        quantity: str | None = None,
        *,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes | list[Axes]:
        """Draw quantities in a sweep over two keys, as a cell for each pair of values.

        Cells are arithmetic means over runs. A cross marks a cell that has a run
        without a result, or a run whose loss did not fall by half.

        Args:
            quantity: A column of `sweep.table`, such as "frozen_start.test". By default,
                the kernel change and the error of the frozen kernel.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it gives the range of the quantity.
            style: A style of matplotlib.

        Returns:
            The axes, or a list of axes if there are several quantities.

        Raises:
            Mistake: if there is no such quantity, or if fewer than two keys
                have several values.

        Example:
            `sweep.plot.heat_map("frozen_start.test", ax=ax)`
        """
        if quantity is not None:
            refuse_other("quantity", quantity, self.analysis.quantities)
        drawn = heat_map.pictures(self.analysis, self.by_folder, quantity=quantity)
        return draw_first(
            self.analysis.sweep, "heat_map", drawn, Canvas(ax, title), style
        )

    def over_steps(
        self,
        *,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes | list[Axes]:
        """Draw the loss, the kernel change and the largest eigenvalue over the steps.

        There is a line for each combination of swept values: its first readable run.
        If there are more than 24 combinations, some are omitted.

        Args:
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it says how the kernel change varies.
            style: A style of matplotlib.

        Returns:
            A list of axes.

        Raises:
            Mistake: if fewer than two combinations have runs.

        Example:
            `sweep.plot.over_steps(style="ggplot")`
        """
        drawn = over_steps.pictures(self.analysis, self.by_folder)
        return draw_first(
            self.analysis.sweep, "over_steps", drawn, Canvas(ax, title), style
        )

    def laws(
        self,
        number: int = 1,
        *,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes | list[Axes]:
        """Draw a power law that the sweep fits, with the exponent of theory.

        Args:
            number: The row of the law in `sweep.fits`, counted from 1.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it gives the exponent.
            style: A style of matplotlib.

        Returns:
            The axes.

        Raises:
            Mistake: if the sweep fits no such law.

        Example:
            `sweep.plot.laws(1).figure.savefig("law.pdf")`
        """
        fitted = self.analysis.laws
        if not 1 <= number <= len(fitted):
            count = counted(len(fitted), "law")
            raise WrongArgument(f"number={number}: the sweep fits {count}", "number")
        if fitted[number - 1].law is None:
            raise Mistake(f"law {number} is not fitted: {fitted[number - 1].reason}")
        drawn = [
            picture
            for picture in laws.pictures(self.analysis, self.by_folder)
            if picture.suffix == f"-{number}"
        ]
        return draw_first(self.analysis.sweep, "laws", drawn, Canvas(ax, title), style)


def draw_first(
    sweep: Sweep,
    name: str,
    pictures: Iterable[SweepPicture],
    canvas: Canvas,
    style: Style | None,
) -> Axes | list[Axes]:
    """Draw the first of several pictures. Raise if there is none."""
    picture = next(iter(pictures), None)
    if picture is None:
        extent = sweep_extent(sweep) or "no keys"
        raise Mistake(f"{sweep.name} has no picture '{name}': it sweeps {extent}")
    with style_of_user(style, is_house=canvas.is_new):
        picture.draw(canvas)
    return canvas.axes


def refuse_other(argument: str, name: str, known: Iterable[str]) -> None:
    """Raise if a name is not known."""
    names = list(known)
    if name not in names:
        raise WrongArgument(
            f"{argument}: '{name}' is none of {', '.join(names)}{nearest(name, names)}",
            argument,
        )
