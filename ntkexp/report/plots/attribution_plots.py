"""Pictures of the data set that `attribute` and `load_run(…).contributions` return.

They are methods of `found.plot` and return matplotlib axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument
from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_STEP,
    COMPONENT,
    CONTRIBUTION,
    DECAY_BY_COMPONENT,
    LAST_STEP,
)
from ntkexp.report.examples import image_pixels, unit_range
from ntkexp.report.outputs import one_output, refuse_query
from ntkexp.report.parts import strongest_first
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import (
    BAR_INCHES,
    COLOURS_IN_WORDS,
    MAX_BAR_LETTERS,
    MAX_BARS,
    MAX_LABEL_LETTERS,
    bars_height,
    draw_when,
    named_bars,
    sums_so_far,
)
from ntkexp.report.plots.style import NARROW, Style, style_of_user
from ntkexp.report.top_examples import FindExample
from ntkexp.text import fitting, numbered

THUMBNAIL_POINTS = 15  # largest height of an image next to a bar
THUMBNAIL_SHARE = 0.9  # of the height of a row
ROW_INCHES = 0.26  # height of a bar next to an image


@dataclass(frozen=True)
class AttributionPlots:
    """Plots of one query. Each method returns matplotlib axes.

    The first argument `query` is the index of the query along its axis.
    Each method takes:

    - `out`, the name or index of an output, which is required if there are several,
    - `ax`, axes to draw on. By default, a new figure is drawn,
    - `title`, instead of the title of the picture,
    - `style`, a style as `matplotlib.style.context` takes it, such as "ggplot" or
      `{"font.size": 10}`. Settings that you change in `matplotlib.rcParams` apply as well.

    All other names are looked up in `xarray.Dataset.plot`.

    >>> arrays = {"contribution": (("query", "out", "example"), np.array([[[2.0, -1.0]]]))}
    >>> found = xr.Dataset(arrays, {"example": ["cat", "dog"], "query": [0]})
    >>> axes = AttributionPlots(found).contributions(0, title="Why?")
    >>> [label.get_text() for label in axes.get_yticklabels()]
    ['cat', 'dog']
    """

    arrays: xr.Dataset
    find: FindExample = lambda axis, place: None

    def __getattr__(self, name: str) -> Any:
        return getattr(xr.Dataset(self.arrays.data_vars, self.arrays.coords).plot, name)

    def contributions(
        self,
        query: int | np.integer[Any] = 0,
        *,
        out: str | int | None = None,
        top: int = MAX_BARS,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes:
        """Draw the examples with the largest contributions, with their images or texts.

        Args:
            query: Index of the query.
            out: Name or index of the output. Required if there are several.
            top: Number of examples.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it names the query.
            style: A style of matplotlib.

        Returns:
            The axes. Save the figure with `axes.figure.savefig("picture.svg")`.

        Raises:
            Mistake: if there is no such query or output,
                or if the query was not attributed.

        Example:
            `found.plot.contributions(3, top=5, ax=ax, title="Why a cat?")`
        """
        parts = self.array(CONTRIBUTION, query, out)
        order = strongest_first(parts.to_numpy())[:top]
        values = parts.to_numpy()[order]
        examples = [self.find("example", place) for place in order]
        images = [
            None if shown is None else image_pixels(shown.shown) for shown in examples
        ]
        labels = [str(label) for label in parts["example"].to_numpy()]
        names = []
        for place, shown in zip(order, examples, strict=True):
            name = numbered(place, labels[place])
            if shown is not None and shown.text and shown.shown.dtype.kind not in "fc":
                name = f"{name} {shown.text}"
            names.append(fitting(name, MAX_BAR_LETTERS))
        canvas = Canvas(ax, title)
        with style_of_user(style, is_house=ax is None):
            height = bars_height(len(order))
            if any(pixels is not None for pixels in images):
                height += (ROW_INCHES - BAR_INCHES) * len(order)
            axes: Axes = canvas.panels((NARROW, height))[0, 0]
            named_bars(axes, names, values, "contribution to the output")
            draw_thumbnails(axes, images)
            canvas.finish(f"What made {self.name_of(query)}", COLOURS_IN_WORDS)
        return axes

    def components(
        self,
        query: int | np.integer[Any] = 0,
        *,
        out: str | int | None = None,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes:
        """Draw the change of the output through each component, including weight decay.

        Args:
            query: Index of the query.
            out: Name or index of the output. Required if there are several.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it names the query.
            style: A style of matplotlib.

        Returns:
            The axes. Save the figure with `axes.figure.savefig("picture.svg")`.

        Raises:
            Mistake: if the loop was attributed without `by=`.

        Example:
            `trace.attribute(by="module").plot.components(3)`
        """
        parts = self.array(BY_COMPONENT, query, out).sum("example")
        if DECAY_BY_COMPONENT in self.arrays:
            parts = parts + self.array(DECAY_BY_COMPONENT, query, out)
        names = [
            fitting(str(name), MAX_BAR_LETTERS) for name in parts[COMPONENT].to_numpy()
        ]
        canvas = Canvas(ax, title)
        with style_of_user(style, is_house=ax is None):
            axes: Axes = canvas.panels((NARROW, bars_height(len(names))))[0, 0]
            named_bars(axes, names, parts.to_numpy(), "change of the output")
            canvas.finish(f"Through which components {self.name_of(query)} moved")
        return axes

    def timeline(
        self,
        query: int | np.integer[Any] = 0,
        *,
        out: str | int | None = None,
        ax: Axes | None = None,
        title: str | None = None,
        style: Style | None = None,
    ) -> Axes:
        """Draw the cumulative change of the output over the steps.

        Args:
            query: Index of the query.
            out: Name or index of the output. Required if there are several.
            ax: Axes to draw on. By default, a new figure is drawn.
            title: The title. By default, it names the query.
            style: A style of matplotlib.

        Returns:
            The axes. Save the figure with `axes.figure.savefig("picture.svg")`.

        Raises:
            Mistake: if there is no such query or output.

        Example:
            `found.plot.timeline(3, style={"lines.linewidth": 2})`
        """
        by_step = self.array(BY_STEP, query, out)
        last = by_step[LAST_STEP].to_numpy() if LAST_STEP in by_step.coords else None
        canvas = Canvas(ax, title)
        with style_of_user(style, is_house=ax is None):
            axes: Axes = canvas.panels((NARROW, 2.0))[0, 0]
            draw_when(axes, sums_so_far(by_step.to_numpy(), last))
            canvas.finish(f"When {self.name_of(query)} moved")
        return axes

    def array(
        self, name: str, query: int | np.integer[Any], out: str | int | None
    ) -> xr.DataArray:
        """Return an array at one query and output. Raise if the array is missing, or if
        the query was not attributed."""
        if name not in self.arrays:
            advice = "; attribute with by=" if "component" in name else ""
            raise WrongArgument(f"there is no '{name}' here to draw{advice}", "plot")
        refuse_query(self.arrays, query)
        parts = one_output(self.arrays[name], out).isel(query=query)
        if not bool(np.isfinite(parts).all()):
            raise WrongArgument(
                f"query={query}: this point was not attributed", "query"
            )
        return parts

    def name_of(self, query: int | np.integer[Any]) -> str:
        shown = self.find("query", int(query) % self.arrays.sizes["query"])
        number = f"query {self.arrays['query'].to_numpy()[query]}"
        if shown is None or not shown.name or shown.name == number:
            return number
        return f"{number} ({fitting(shown.name, MAX_LABEL_LETTERS)})"


def draw_thumbnails(axes: Axes, images: Sequence[NDArray[Any] | None]) -> None:
    """Draw images between the rows of bars and their names.

    Images shrink where the rows are low, so that they do not overlap."""
    size = min(THUMBNAIL_POINTS, THUMBNAIL_SHARE * row_points(axes))
    for row, pixels in enumerate(images):
        if pixels is None:
            continue
        scaled = unit_range(pixels)
        zoom = size / max(scaled.shape[:2])
        shown = OffsetImage(
            scaled,
            zoom=zoom,
            cmap="gray_r",
            norm=Normalize(0, 1),
            interpolation="nearest",
        )
        axes.add_artist(
            AnnotationBbox(
                shown, (0, row), xybox=(-size / 2 - 2, 0), frameon=False, pad=0,
                xycoords=("axes fraction", "data"), boxcoords="offset points", annotation_clip=False,
            )
        )  # fmt: skip
    if any(pixels is not None for pixels in images):
        axes.tick_params(axis="y", length=0, pad=size + 4)


def row_points(axes: Axes) -> float:
    """Return the height of a row of bars, in points.

    >>> from matplotlib.figure import Figure
    >>> axes = Figure(figsize=(4, 4)).add_axes((0, 0, 1, 0.5))
    >>> _ = axes.set_ylim(7.5, -0.5)
    >>> float(row_points(axes))
    18.0
    """
    assert axes.figure is not None
    inches = axes.get_window_extent().height / axes.figure.dpi
    first, last = axes.get_ylim()
    return 72 * inches / abs(first - last)
