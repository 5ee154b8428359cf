"""The place of a picture: a new figure in the style of this package,
or axes that the user provides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument
from ntkexp.report.plots.style import heading

STRIP = "strip"  # the label of axes that only complete other axes


@dataclass
class Canvas:
    """The axes on which one picture is drawn, and the title of the picture.

    A module of pictures first calls `panels`, draws, and then calls `finish`.
    """

    ax: Axes | None = None
    """The user's axes. If a picture has several panels, the panels divide the place of
    these axes."""
    title: str | None = None
    """The user's title, which replaces the title of the picture."""
    grid: NDArray[Any] = field(default_factory=lambda: np.empty((0, 0), dtype=object))
    subfigure: SubFigure | None = None
    """The place of the user's axes, if several panels divide it."""

    @property
    def is_new(self) -> bool:
        """True if the picture gets a new figure."""
        return self.ax is None

    @property
    def figure(self) -> Figure:
        figure = self.grid[0, 0].get_figure(root=True)
        assert isinstance(figure, Figure)
        return figure

    @property
    def axes(self) -> Axes | list[Axes]:
        """The axes of the picture, or a list if there are several."""
        panels: list[Axes] = list(self.grid.flat)
        shown = [axes for axes in panels if axes.get_label() != STRIP and axes.axison]
        if len(shown) == 1:
            return shown[0]
        return shown or panels[0]

    def panels(
        self, size: tuple[float, float], rows: int = 1, columns: int = 1, **layout: Any
    ) -> NDArray[Any]:
        """Return the axes of a picture, [row, column].

        Args:
            size: The width and height of a new figure, in inches.
            rows: Number of rows.
            columns: Number of columns.
            **layout: Arguments of `Figure.subplots`,
                such as `sharex` and `width_ratios`.
        """
        if self.ax is None:
            figure = Figure(figsize=size, layout="constrained")
            self.grid = figure.subplots(rows, columns, squeeze=False, **layout)
        elif rows * columns == 1:
            self.grid = np.array([[self.ax]], dtype=object)
        else:
            self.subfigure = subfigure_of(self.ax)
            self.grid = self.subfigure.subplots(rows, columns, squeeze=False, **layout)
        return self.grid

    def finish(self, title: str, caption: str = "") -> Figure:
        """Write the title and the caption. The user's axes get no caption."""
        if self.ax is None:
            heading(self.figure, self.title or title, caption)
        elif self.subfigure is not None:
            self.subfigure.suptitle(self.title or title)
        else:
            self.ax.set_title(self.title or title)
        return self.figure


def subfigure_of(ax: Axes) -> SubFigure:
    """Hide the axes, and return a subfigure in their place."""
    place = ax.get_subplotspec()
    if place is None:
        raise WrongArgument(
            "ax: this picture has several panels, and divides axes of `plt.subplots` only",
            "ax",
        )
    ax.set_axis_off()
    ax.set_in_layout(False)
    figure = ax.get_figure(root=False)
    assert figure is not None
    return figure.add_subfigure(place)
