"""Points beside the training examples that made most of their outputs, as a picture.

Images are shown as images, at whole multiples of their pixels; other examples as bars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ntkexp.report.examples import Example
from ntkexp.report.plots.style import BLACK, BLUE, GREY, VERMILION, WIDE
from ntkexp.text import short

TOP = 8  # examples beside a point
LONGEST = 11  # letters that fit below an image
ACROSS_A_POINT = 16  # letters that fit below a point, with the margin beside it
DPI = 200  # pixels are counted at this resolution
CELL, ROW, HEAD = 108, 196, 112  # pixels: an image, a row with its labels, the title
POINT, FIRST, ACROSS = 24, 180, 147  # pixels: where points and examples begin, and from one example to the next


@dataclass(frozen=True)
class Explained:
    """A point is explained by the examples that contributed most."""

    role: str
    said: str  # what the network gives the point
    point: Example
    top: tuple[Example, ...]
    shares: NDArray[np.float64]  # 𝒮 of each


def draw(rows: list[Explained]) -> Figure:
    """Draw points and examples as images if they are some, else as bars."""
    return pictures(rows) if picture(rows[0].point.shown) is not None else bars(rows)


def fitting(name: str, longest: int = LONGEST) -> str:
    """Shorten a name so that it fits below an image.

    >>> fitting("boot"), fitting("ankle boot (left)")
    ('boot', 'ankle boot…')
    """
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def picture(shown: NDArray[Any]) -> NDArray[Any] | None:
    """Give [height, width] or [height, width, colour], if this is an image."""
    if shown.ndim == 2:
        return shown
    if shown.ndim == 3 and shown.shape[0] in (1, 3):
        return shown[0] if shown.shape[0] == 1 else np.moveaxis(shown, 0, -1)
    return None


def pictures(rows: list[Explained]) -> Figure:
    """Draw a row per point: the point, then the examples with their contributions."""
    figure = Figure(figsize=(WIDE, (HEAD + ROW * len(rows)) / DPI))
    tall = HEAD + ROW * len(rows)
    remark(figure, POINT, "point")
    remark(figure, FIRST, "training examples: class, and what they added to the output (blue: raised, orange: lowered)")
    page = pixel_axes(figure)
    for down, row in enumerate(rows):
        bottom = tall - HEAD - ROW * (down + 1) + ROW - CELL
        label(page, image(page, row.point.shown, POINT, bottom), point_label(row), BLACK)
        for k, (shown, value) in enumerate(zip(row.top, row.shares, strict=True)):
            drawn = image(page, shown.shown, FIRST + ACROSS * k, bottom)
            phase = "" if shown.phase is None else f"phase {shown.phase}\n"
            label(page, drawn, f"{shown.name}\n{phase}{signed(value)}", ink(value))
    return figure


def pixel_axes(figure: Figure) -> Axes:
    """Put axes over the whole figure, whose unit is a pixel: axes for every image would take longer than all else."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, figure.get_figwidth() * DPI), ylim=(0, figure.get_figheight() * DPI), autoscale_on=False)
    return axes


def point_label(row: Explained) -> str:
    """Say the point's class, with its phase where that fits, why it was chosen, and what is explained."""
    name = row.point.label if len(row.point.label) <= LONGEST else row.point.name
    return f"{name}\n{row.role}\n{row.said}"


def remark(figure: Figure, x: int, text: str) -> None:
    """Say what a column of images is, over it."""
    wide, tall = figure.get_figwidth() * DPI, figure.get_figheight() * DPI
    figure.text(x / wide, 1 - (HEAD - 14) / tall, text, fontsize=7, color=GREY)


def image(page: Axes, shown: NDArray[Any], x: int, y: int) -> AxesImage:
    """Draw an example on whole pixels, each of its own as a square, in a frame."""
    pixels = picture(shown)
    assert pixels is not None
    times = max(1, CELL // max(pixels.shape[:2]))
    tall, wide = times * pixels.shape[0], times * pixels.shape[1]
    low, high = float(pixels.min()), float(pixels.max())
    scaled = (pixels - low) / (high - low or 1.0)
    place = (x, x + wide, y, y + tall)
    page.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor=GREY, linewidth=0.6))
    return page.imshow(
        scaled, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest", aspect="auto", extent=place
    )  # fmt: skip


def label(page: Axes, image: AxesImage, text: str, colour: str) -> None:
    """Write below an image."""
    left, right, bottom, _ = image.get_extent()
    page.annotate(
        text, ((left + right) / 2, bottom), xytext=(0, -2), textcoords="offset points",
        ha="center", va="top", fontsize=7, color=colour,
    )  # fmt: skip


def bars(rows: list[Explained]) -> Figure:
    """Draw a panel per point, a bar per example, named by its class or target."""
    figure = Figure(figsize=(WIDE, 2.1), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        axes.barh(range(len(row.top)), row.shares, color=[ink(value) for value in row.shares], height=0.7)
        axes.set_yticks(range(len(row.top)), [f"{shown.label}  #{shown.index}" for shown in row.top])
        axes.invert_yaxis()
        axes.axvline(0, color=BLACK, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{row.role}, {row.said}\ntarget {row.point.label}  #{row.point.index}")
        axes.set_xlabel("contribution")
    figure.supylabel("training example", fontsize=8)
    return figure


def ink(value: float) -> str:
    """Choose blue for what raises the output, and vermilion for what lowers it."""
    return BLUE if value >= 0 else VERMILION


def signed(value: float) -> str:
    """Spell a contribution with its sign."""
    return "+" + short(value) if value >= 0 else minus(value)


def given(output: str, value: float) -> str:
    """Say what the network gives a point, in words that fit below it.

    >>> given("f for boot", -0.5), given("f for ankle boot", 0.125)
    ('f for boot: −0.5', 'f for a…: 0.125')
    """
    whole, number = f"{output}: {minus(value)}", minus(value)
    return whole if len(whole) <= ACROSS_A_POINT else f"{fitting(output, ACROSS_A_POINT - 3 - len(number))}: {number}"


def minus(value: float) -> str:
    """Spell a number with the sign that the axes use."""
    return short(value).replace("-", "−")
