"""Render a figure as SVG, with the values of points and bars as tooltips, or as PNG.

Equal figures give equal bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ntkexp.records.atomic import write_atomically
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import house_style
from ntkexp.text import short

# omit matplotlib's version and the date, so that bytes are reproducible
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
"""Characters that XML forbids, in UTF-8: most control characters,
and two noncharacters."""


@dataclass(frozen=True)
class Picture:
    """A figure with its name and its data."""

    name: str
    figure: Figure
    table: pd.DataFrame


@dataclass(frozen=True)
class SweepPicture:
    """A picture of a sweep that is not drawn yet, and its data.

    `suffix` distinguishes the pictures of one module.
    """

    suffix: str
    table: pd.DataFrame
    draw: Callable[[Canvas], Figure]


def write(figure: Figure, path: Path, kind: str) -> Path:
    write_atomically(path, render(figure, kind))
    return path


def png(figure: Figure) -> bytes:
    with house_style():
        return render(figure, "png")


def svg(figure: Figure) -> str:
    with house_style():
        return render(figure, "svg").decode()


def render(figure: Figure, kind: str) -> bytes:
    """Render a figure as "svg" or "png". Compute the layout only
    for the first file of a figure."""
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
    values = values_of(figure) if kind == "svg" else {}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=METADATA[kind])
    if kind != "svg":
        return buffer.getvalue()
    return with_values(NO_XML.sub(b"?", buffer.getvalue()).decode(), values).encode()


# --- The values of points and bars become <title> elements in an SVG.
# Browsers show them as tooltips.


POINTS = 500
"""Lines with more points than this get no tooltips. Their points would overlap, and the
file size would double."""
GROUP = re.compile(
    r'<g id="(values-\d+)">(.*?)</g>\s*</g>|<g id="(bar-\d+)">(.*?)</g>', re.S
)
USED = re.compile(r'(<use [^>]*?x="([-\d.]+)" y="([-\d.]+)"[^>]*?)/>')

Values: TypeAlias = dict[str, str | dict[tuple[int, int], str]]
"""Texts of tooltips, by the id of an SVG group. A bar has one text. A line has a text
for each position (in units of 0.1 pt)."""


def values_of(figure: Figure) -> Values:
    """Set SVG ids for all bars, and for all lines with markers and at most `POINTS`
    points. Return the texts of the tooltips by id."""
    values: Values = {}
    height = 72 * figure.get_figheight()
    for axes in figure.axes:
        for line in axes.get_lines():
            data = np.asarray(line.get_xydata(), dtype=np.float64)
            if (
                line.get_marker() in ("None", "", " ", None)
                or not 0 < len(data) <= POINTS
            ):
                continue
            name = f"values-{len(values)}"
            line.set_gid(name)
            places = line.get_transform().transform(data) * 72 / figure.dpi
            points = {}
            for (x, y), pair in zip(places, data, strict=True):
                if np.isfinite([x, y]).all():
                    position = (round(10 * x), round(10 * (height - y)))
                    points[position] = value_in_words(axes, *pair)
            values[name] = points
        bars = [bars for bars in axes.containers if isinstance(bars, BarContainer)]
        for container in bars:
            for bar in container.patches:
                name = f"bar-{len(values)}"
                bar.set_gid(name)
                (left, low), (right, high) = bar.get_bbox().get_points()
                end = (right, (low + high) / 2)
                if container.orientation == "vertical":
                    end = ((left + right) / 2, high)
                values[name] = value_in_words(axes, *end)
    return values


def value_in_words(axes: Axes, x: float, y: float) -> str:
    """Describe a point by its coordinates. Use the tick label if it is a name, else the
    axis label and the number.

    >>> axes = Figure().subplots()
    >>> _ = axes.set(xlabel="step", ylabel="loss")
    >>> value_in_words(axes, 3.0, 0.25)
    'step 3, loss 0.25'
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    coordinates = (
        (axes.xaxis, x, figure.get_supxlabel()),
        (axes.yaxis, y, figure.get_supylabel()),
    )
    words = []
    for axis, value, label_of_figure in coordinates:
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FuncFormatter):  # tick labels can be names
            name = formatter(value, 0)
            if name:
                words.append(name)
                continue

        # also look for the label in panels with the same limits: a shared axis has only
        # one label
        labels = [axis.get_label_text()]
        for other_axes in figure.axes:
            other = getattr(other_axes, f"{axis.axis_name}axis")
            if tuple(other.get_view_interval()) == tuple(axis.get_view_interval()):
                labels.append(other.get_label_text())
        label = next(filter(None, [*labels, label_of_figure]), "")
        words.append(f"{label} {short(value)}".strip())
    return ", ".join(words)


def with_values(drawing: str, values: Values) -> str:
    """Insert the tooltips of points and bars into an SVG."""

    def titled(match: re.Match[str]) -> str:
        value = values[match[1] or match[3]]
        if isinstance(value, str):
            return f'<g id="{match[3]}"><title>{escape(value)}</title>{match[4]}</g>'

        def point(use: re.Match[str]) -> str:
            position = (round(10 * float(use[2])), round(10 * float(use[3])))
            words = value.get(position)
            if not words:
                return use[0]
            return f"{use[1]}><title>{escape(words)}</title></use>"

        return match[0].replace(match[2], USED.sub(point, match[2]))

    return GROUP.sub(titled, drawing)
