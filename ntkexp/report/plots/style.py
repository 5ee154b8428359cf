"""The style of all pictures: print sizes, accessible colours, and labels at line ends."""

from __future__ import annotations

import colorsys
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import dist
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import RcParams, rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)
from numpy.typing import NDArray

from ntkexp.text import short, spoken

# --- Settings of matplotlib, sizes and colours. Files are reproducible byte by byte.


EXPONENT = re.compile(r"\^\{(.*?)\}")
SUPERSCRIPTS = str.maketrans("-−0123456789", "⁻⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NARROW, WIDE = 3.3, 6.8  # inches: one and two columns of a paper
LEAST = 1e-17  # smaller errors, also 0, are drawn here on a log axis

RC = RcParams(
    {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so files are reproducible
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.titlelocation": "left",
        "axes.labelsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "lines.linewidth": 1.2,
        "lines.markersize": 3,
        "legend.frameon": False,
        "legend.fontsize": 7,
        "image.composite_image": False,  # do not merge the images of examples
        "savefig.dpi": 200,
        "figure.dpi": 200,
        "svg.fonttype": "none",
        "svg.hashsalt": "ntkexp",
        "text.parse_math": False,  # names of classes may contain a dollar sign
    }
)
HOUSE = {key: value for key, value in (rcParamsDefault | RC).items() if key != "backend"}
"""All settings of matplotlib except the backend, so that no setting of the user has an effect."""

BLACK, GREY, PALE = "#000000", "#808080", "#d9d9d9"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
)

# The palette of Okabe & Ito. Kernel machines of one family share a hue. The network is black.
COLOUR = {
    "secant": BLUE,
    "gauss": SKY,
    "left": VERMILION,
    "fixed_coefficients": GREEN,
    "kernel_regression": "#66c5ab",
    "frozen_start": ORANGE,
    "frozen_end": "#8a5f00",
    "frozen_limit": "#f0c566",
    "linearised": PURPLE,
    "nngp": "#b3a800",
    "rbf_identity": "#999999",
    "rbf_regression": "#666666",
}
APART = 0.25
"""Readers can distinguish two colours with at least this distance in RGB (each channel in [0, 1]).
"""


def colour(machine: str) -> str:
    """Return the colour of a kernel machine.

    A machine without a fixed colour gets one from a hash of its name.
    """
    return COLOUR.get(machine) or hashed_colour(machine)


def hashed_colour(name: str) -> str:
    """Choose a colour from the digest of a name. It differs visibly from all fixed colours.

    >>> hashed_colour("my_machine") == hashed_colour("my_machine") != hashed_colour("your_machine")
    True
    """
    taken = [to_rgb(other) for other in (*COLOUR.values(), BLACK, PALE)]
    digest = sha256(name.encode()).digest()
    colours = []
    for hue, light in zip(digest[::2], digest[1::2], strict=True):
        colours.append(colorsys.hls_to_rgb(hue / 256, 0.3 + light / 800, 0.8))

    def distance(colour: tuple[float, float, float]) -> float:
        return min(APART, *(dist(colour, other) for other in taken))

    return to_hex(max(colours, key=distance))


@contextmanager
def house_style() -> Iterator[None]:
    """Use the style of this package inside the block.

    Ignore warnings about letters that the font lacks.
    """
    # set only settings that differ, which is faster
    others = {key: value for key, value in HOUSE.items() if rcParams[key] != value}
    with warnings.catch_warnings(), rc_context(RcParams(others)):
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


class PowersOfTen(LogFormatterSciNotation):
    """Format powers of ten as text with superscripts, which is much faster to draw than a formula.

    >>> PowersOfTen()(1e-15), PowersOfTen(labelOnlyBase=False)(0.3)
    ('10⁻¹⁵', '3×10⁻¹')
    """

    def __call__(self, x: float, pos: int | None = None) -> str:
        formula = str(super().__call__(x, pos)).removeprefix(r"$\mathdefault{").removesuffix("}$")
        formula = formula.replace(r"\times", "×")
        return EXPONENT.sub(lambda match: match[1].translate(SUPERSCRIPTS), formula)


def log_axis(axes: Axes, name: Literal["x", "y"]) -> None:
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_formatter(PowersOfTen())
    axis.set_minor_formatter(PowersOfTen(labelOnlyBase=False))


def heading(figure: Figure, text: str) -> None:
    """Write the title of a picture, wrapped to the width of the figure."""
    lines = wrapped(text.rstrip("."), int(14 * figure.get_figwidth()))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8, fontweight="bold")


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into as few lines as the width allows, of about equal length.

    Keep "5 %" on one line.

    >>> wrapped("one two three four", 16)
    ['one two', 'three four']
    """
    whole = text.replace(" %", "\N{NO-BREAK SPACE}%")
    fewest = len(textwrap.wrap(whole, width))
    narrower = 1
    while len(lines := textwrap.wrap(whole, narrower)) != fewest:
        narrower += 1
    return lines


def step_axis(axes: Axes, last: int) -> None:
    """Set the x axis to steps from 0 to `last`.

    Use a logarithmic scale for many steps, like the stored kernels.

    If the run has no step, the axis ends at 1.

    >>> step_axis(axes := Figure().subplots(), 0)
    >>> [float(end) for end in axes.get_xlim()]
    [0.0, 1.0]
    """
    if last > 20:
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        axes.set_xticks([0, *(10**k for k in range(int(np.log10(last)) + 1))])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_xlim(0, max(last, 1))
    axes.set_xlabel("step")


def machine_rows(axes: Axes, machines: Sequence[str]) -> None:
    """Label a row for each kernel machine, from top to bottom, and set ticks at powers of ten."""
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(machines)), [spoken(machine) for machine in machines])
    axes.set_ylim(len(machines) - 0.5, -0.5)


def write_beside(axes: Axes, text: str, height: float, color: str = BLACK) -> None:
    """Write a text to the right of the axes."""
    axes.annotate(
        text, (1, height), xytext=(3, 0), xycoords=("axes fraction", "data"), color=color,
        textcoords="offset points", va="center", fontsize=7, annotation_clip=False,
    )  # fmt: skip


def tick(axes: Axes, positions: list[float]) -> None:
    """Set ticks at `positions`. If there are more than seven, set ticks at evenly spaced ones."""
    every = -(-len(positions) // 7)
    axes.set_xticks(positions[::every], [short(position) for position in positions[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    # use text, because formulas are slow to draw
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


# --- Labels at the ends of lines, in the colours of the lines, instead of a legend.


class End(NamedTuple):
    """The label at the end of a line. `height` is the last value of the line, in data units."""

    text: str
    height: float
    colour: str


def name_ends(axes: Axes, ends: Sequence[End], gap: float = 0.11) -> None:
    """Write labels to the right of the axes.

    Their distance is at least `gap`, in units of the axes' height.
    """
    heights = np.array([end.height for end in ends])
    axes.autoscale_view()  # compute the automatic limits now
    points = np.column_stack([np.ones_like(heights), heights])
    positions = axes.transLimits.transform(axes.transScale.transform(points))
    for end, height in zip(ends, spread(positions[:, 1], gap), strict=True):
        axes.annotate(
            end.text, (1, height), xytext=(3, 0), xycoords="axes fraction", textcoords="offset points",
            color=end.colour, va="center", fontsize=7, annotation_clip=False,
        )  # fmt: skip


def spread(heights: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Move heights as little as possible, so that they lie in [0, 1] and differ by at least `gap`.

    The order of the heights is kept, and the sum of squared changes is minimal. If there are too
    many heights for the gap, they may exceed 1.

    >>> spread(np.array([0.5, 0.5, 0.0]), 0.2).tolist()
    [0.4, 0.6, 0.0]
    """
    order = np.argsort(heights, kind="stable")
    # Let z_k = height_k − k·gap. The gaps are kept if z is non-decreasing, so z is an isotonic
    # regression.
    steps = gap * np.arange(len(heights))
    room = max(0.0, 1 - gap * (len(heights) - 1))
    fit = np.clip(isotonic(heights[order] - steps), 0, room)
    places = np.empty(len(heights))
    places[order] = fit + steps
    return places


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares fit by a non-decreasing sequence (pool adjacent violators).

    >>> isotonic(np.array([1.0, 3.0, 2.0])).tolist()
    [1.0, 2.5, 2.5]
    """
    blocks: list[list[float]] = []
    for value in values.tolist():
        block = [value]
        while blocks and np.mean(blocks[-1]) > np.mean(block):
            block = blocks.pop() + block
        blocks.append(block)
    fit: list[float] = []
    for block in blocks:
        fit += [float(np.mean(block))] * len(block)
    return np.array(fit)
