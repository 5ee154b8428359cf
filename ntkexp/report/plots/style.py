"""The style of all pictures: print sizes, accessible colours,
and labels at line ends."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from math import dist
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from matplotlib import RcParams, rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from ntkexp.text import short

# --- Settings of matplotlib, sizes and colours. With these settings, equal figures give
# equal files, byte by byte.


SUPERSCRIPTS = str.maketrans("-−0123456789", "⁻⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NARROW, WIDE = 3.3, 6.8  # widths of one column and of two columns of a paper, in inches
LEAST = 1e-17  # on a log axis, smaller errors, including 0, are drawn here

RC = RcParams(
    {
        # this font comes with matplotlib, so files are reproducible
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "axes.labelsize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "xtick.labelsize": "small",
        "ytick.labelsize": "small",
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "lines.linewidth": 1.2,
        "lines.markersize": 3,
        "legend.frameon": False,
        "legend.fontsize": "small",
        "image.composite_image": False,  # do not merge the images of examples
        "savefig.dpi": 200,
        "figure.dpi": 200,
        "svg.fonttype": "none",
        "svg.hashsalt": "ntkexp",
        "text.parse_math": False,  # names of classes may contain a dollar sign
    }
)
HOUSE = {
    key: value for key, value in (rcParamsDefault | RC).items() if key != "backend"
}
"""All settings of matplotlib except the backend,
so that no setting of the user has an effect."""

ON_DARK, ON_LIGHT = "#fdfdfd", "#020202"
"""Colours of text on dark and on light areas, such as the cells of a heat map. They
stay the same if the page has a dark background."""
BLACK, GREY, PALE = "#000000", "#808080", "#d9d9d9"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = (
    "#0060e0",
    "#0898f8",
    "#209850",
    "#d07808",
    "#b83820",
    "#c038b0",
)
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
"""Colours of lines, in the order of their use.

These colours and grey have a contrast of at least 3 on white and on a dark page. Any
two of them have a distance of at least 20 in CIELAB for readers with normal vision,
protanopia or deuteranopia, and of at least 18 with tritanopia."""

Dashes: TypeAlias = str | tuple[float, tuple[float, ...]]
SOLID, DASHED, DOTTED = "-", (0, (4, 1.5)), (0, (1, 1.2))
DASHES: tuple[Dashes, ...] = (SOLID, DASHED, DOTTED, (0, (5, 1, 1, 1)))

# Kernel machines of one family share a colour, but their lines have different dashes.
# The network is black.
COLOUR = {
    "secant": BLUE,
    "gauss": SKY,
    "left": VERMILION,
    "fixed_coefficients": GREEN,
    "kernel_regression": GREEN,
    "frozen_start": ORANGE,
    "frozen_end": ORANGE,
    "frozen_limit": ORANGE,
    "linearised": PURPLE,
    "nngp": PURPLE,
    "rbf_identity": GREY,
    "rbf_regression": GREY,
}
LINE = {
    "kernel_regression": DASHED,
    "frozen_end": DASHED,
    "frozen_limit": DOTTED,
    "nngp": DOTTED,
    "rbf_regression": DASHED,
}
APART = 0.25
"""Readers can distinguish two colours whose distance in RGB is at least this, with
channels in [0, 1]."""
LUMINANCE = 0.2
"""The luminance of all colours that are not fixed. Their contrast is then 4.2 on white
and on a dark page."""


def colour(machine: str) -> str:
    """Return the colour of a kernel machine.

    A machine without a fixed colour gets one from a hash of its name.
    """
    return COLOUR.get(machine) or hashed_colour(machine)


def dashes(machine: str) -> Dashes:
    """Return the line style of a kernel machine."""
    return LINE.get(machine, SOLID)


def line_look(k: int) -> dict[str, Any]:
    """Return the colour and dashes of the k-th line. The first 24 lines differ.

    >>> line_look(0)["color"] == line_look(6)["color"], line_look(6)["linestyle"]
    (True, (0, (4, 1.5)))
    """
    dash = DASHES[k // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": dash}


SEQUENCE = LinearSegmentedColormap.from_list(
    "sequence", [BLUE, "#8c50d8", PURPLE, "#c83858", ORANGE]
)


def shade(k: int, count: int) -> str:
    """Return the colour of line k out of `count` lines that have an order, from blue to
    orange.

    >>> shade(0, 3), shade(2, 3)
    ('#0060e0', '#d07808')
    """
    return to_hex(SEQUENCE(k / max(1, count - 1)))


def hashed_colour(name: str) -> str:
    """Choose one of 16 colours, which the bytes of a digest of the name give: the first
    that differs visibly from all fixed colours.

    >>> hashed_colour("my_machine") == hashed_colour("my_machine") != hashed_colour("your_machine")
    True
    """
    fixed = [to_rgb(other) for other in (*COLOUR.values(), BLACK, PALE)]
    digest = sha256(name.encode()).digest()
    colours = [
        with_luminance(hue / 256, 0.5 + saturation / 512)
        for hue, saturation in zip(digest[::2], digest[1::2], strict=True)
    ]

    def distance(colour: tuple[float, float, float]) -> float:
        return min(APART, *(dist(colour, other) for other in fixed))

    return to_hex(max(colours, key=distance))


def with_luminance(hue: float, saturation: float) -> tuple[float, float, float]:
    """Return the colour of this hue and saturation whose luminance is `LUMINANCE`.

    >>> round(luminance(with_luminance(0.1, 0.8)), 3)
    0.2
    """
    low, high = 0.0, 1.0
    for _ in range(20):  # bisection: luminance grows with lightness
        middle = (low + high) / 2
        if luminance(hls_to_rgb(hue, middle, saturation)) < LUMINANCE:
            low = middle
        else:
            high = middle
    return hls_to_rgb(hue, high, saturation)


def luminance(rgb: tuple[float, float, float]) -> float:
    """Return the relative luminance of an sRGB colour (WCAG 2)."""
    linear = []
    for channel in rgb:
        is_dark = channel <= 0.04045
        linear.append(
            channel / 12.92 if is_dark else ((channel + 0.055) / 1.055) ** 2.4
        )
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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


Style: TypeAlias = str | dict[str, Any] | Sequence[str | Path | dict[str, Any]]
"""A style as `matplotlib.style.context` takes it: a name, settings,
or several of these."""


@contextmanager
def style_of_user(style: Style | None, *, is_house: bool) -> Iterator[None]:
    """Use the settings of the user inside the block. The settings of `style` have
    precedence. If `is_house` is True, the style of this package replaces all settings
    that the user has not changed."""
    changed = {
        key: rcParams[key] for key in HOUSE if rcParams[key] != rcParamsDefault[key]
    }
    with ExitStack() as stack:
        if is_house:
            stack.enter_context(house_style())
            stack.enter_context(rc_context(RcParams(changed)))
        if style is not None:
            from matplotlib import style as styles  # noqa: PLC0415  reads the files of all styles

            stack.enter_context(styles.context(style))
        yield


class LogLabels(Formatter):
    """Labels of a log axis: powers of ten. If fewer than two powers of ten are in view,
    2 and 5 times powers of ten also have labels.

    >>> labels = LogLabels()
    >>> labels.axis = Figure().subplots().xaxis
    >>> labels.axis.set_view_interval(1e-16, 1.0, ignore=True)
    >>> labels(1e-15), labels(2e-15)
    ('10⁻¹⁵', '')
    >>> labels.axis.set_view_interval(0.15, 0.7, ignore=True)
    >>> [labels(value) for value in (0.2, 0.3, 0.5)]
    ['0.2', '', '0.5']
    """

    def __call__(self, x: float, pos: int | None = None) -> str:
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        if x <= 0 or low <= 0:
            return ""
        exponent = math.floor(math.log10(x) + 1e-9)
        factor = x / 10**exponent
        factors = labelled_factors(low, high)
        if factors and not any(
            math.isclose(factor, one, rel_tol=1e-6) for one in factors
        ):
            return ""
        power = f"10{str(exponent).translate(SUPERSCRIPTS)}"
        if factors == (1,):
            return power
        if low >= PLAIN[0] and high <= PLAIN[1]:
            return short(x)
        return f"{short(factor)}×{power}"


PLAIN = 1e-3, 1e4
"""If multiples of powers of ten are labelled, numbers in this range are
written without an exponent."""


def labelled_factors(low: float, high: float) -> tuple[int, ...]:
    """Return the multiples of powers of ten that get a label. () means that all ticks
    get a label.

    >>> labelled_factors(0.05, 20), labelled_factors(0.3, 3), labelled_factors(0.3, 0.45)
    ((1,), (1, 2, 5), ())
    """
    for factors in ((1,), (1, 2, 5)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        if sum(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks) > 1:
            return factors
    return ()


def log_axis(axes: Axes, name: Literal["x", "y"]) -> None:
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_formatter(LogLabels())
    axis.set_minor_formatter(LogLabels())


# maximum number of letters; numbers and remarks belong in the caption
LONGEST_TITLE = 60
CAPTION_MARGIN_INCHES = 0.06
POINTS_PER_INCH = 72
# mean width of a letter, relative to the size of the font
BOLD_LETTER = 0.643
SMALL_LETTER = 0.54
CAPTION_SPACING = 1.35  # distance of lines, relative to the size of the font


def heading(figure: Figure, title: str, caption: str = "") -> None:
    """Write the title above a picture and the caption below it,
    wrapped to the width."""
    letters = letters_per_line(figure, "medium", BOLD_LETTER)
    lines = wrapped(title.rstrip("."), letters)
    figure.suptitle(
        "\n".join(lines), x=0.01, ha="left", fontsize="medium", fontweight="bold"
    )
    if caption:
        write_caption(figure, caption)


def write_caption(figure: Figure, caption: str) -> None:
    """Write a text below a picture. The figure becomes higher;
    its axes keep their sizes."""
    letters = letters_per_line(figure, "small", SMALL_LETTER)
    lines = textwrap.wrap(caption.replace(" %", "\N{NO-BREAK SPACE}%"), letters)
    above = figure.get_figheight()
    line_inches = CAPTION_SPACING * size_in_points("small") / POINTS_PER_INCH
    below = CAPTION_MARGIN_INCHES + line_inches * len(lines)
    height = above + below
    figure.set_figheight(height)
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        left, _, width, _ = engine.get()["rect"]
        engine.set(rect=(left, below / height, width, above / height))
    else:
        for axes in figure.axes:
            place = axes.get_position()
            bottom = (place.y0 * above + below) / height
            axes.set_position(
                (place.x0, bottom, place.width, place.height * above / height)
            )
    text = "\n".join(lines)
    figure.text(
        0.01,
        CAPTION_MARGIN_INCHES / 2 / height,
        text,
        fontsize="small",
        va="bottom",
        gid=CAPTION,
    )


def letters_per_line(figure: Figure, size: str, letter: float) -> int:
    """Return the number of letters that fit into the width of a figure."""
    return int(
        POINTS_PER_INCH * figure.get_figwidth() / (letter * size_in_points(size))
    )


def size_in_points(size: str) -> float:
    return FontProperties(size=size).get_size_in_points()


CAPTION = "caption"


def brief(title: str, otherwise: str) -> str:
    """Return the title, or `otherwise` if the title is too long.

    >>> brief("Exact to rounding: secant", "One is exact"), brief("long " * 20, "One is exact")
    ('Exact to rounding: secant', 'One is exact')
    """
    if len(title) <= LONGEST_TITLE:
        return title
    return otherwise


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into as few lines as the width allows, of about equal length.

    Do not break words, and do not break between a number and "%".

    >>> wrapped("one two three four", 16)
    ['one two', 'three four']
    """
    whole = text.replace(" %", "\N{NO-BREAK SPACE}%")
    wrap = partial(textwrap.wrap, whole, break_long_words=False)
    fewest = len(wrap(width))
    narrower = 1
    while len(lines := wrap(narrower)) != fewest:
        narrower += 1
    return lines


def step_axis(axes: Axes, last: int) -> None:
    """Set the x axis to steps from 0 to `last`.

    Use a logarithmic scale for more than 20 steps. If the run has no step, the axis
    ends at 1.

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


def machine_rows(axes: Axes, labels: Mapping[int, str]) -> None:
    """Label the rows from top to bottom, and set ticks at powers of ten."""
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_ylim(max(labels) + 0.5, -0.5)


def write(axes: Axes, text: str, place: tuple[float, float], **look: Any) -> None:
    """Write a small text next to a point, which may lie outside of the axes.

    `look` are arguments of `Axes.annotate`. By default, `place` is (fraction of the
    width, y), and the text is to the right of it.
    """
    look = {"xycoords": ("axes fraction", "data"), "xytext": (3, 0), **look}
    axes.annotate(
        text, place, textcoords="offset points", fontsize="small", annotation_clip=False,
        **{"va": "center", **look},
    )  # fmt: skip


def tick(axes: Axes, positions: list[float]) -> None:
    """Set ticks at `positions`, or at every k-th position if there are more than
    seven."""
    every = -(-len(positions) // 7)
    axes.set_xticks(
        positions[::every], [short(position) for position in positions[::every]]
    )
    axes.xaxis.set_minor_locator(NullLocator())


# --- Labels at the ends of lines, in the colours of the lines, instead of a legend.


class End(NamedTuple):
    """The label at the end of a line. `height` is the last value of the line,
    in data units."""

    text: str
    height: float
    colour: str
    start: float | None = None  # if given, draw a thin line from this x to the label


def name_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write labels to the right of the axes, so that they do not overlap."""
    heights = np.array([end.height for end in ends])
    axes.autoscale_view()  # compute the automatic limits now
    points = np.column_stack([np.ones_like(heights), heights])
    positions = axes.transLimits.transform(axes.transScale.transform(points))
    apart = spread(positions[:, 1], gap_of_labels(axes))
    for end, height in zip(ends, apart, strict=True):
        if end.start is not None:
            axes.annotate(
                "", (end.start, end.height), xytext=(1, height), textcoords="axes fraction",
                arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6}, zorder=0,
            )  # fmt: skip
        look = {"xycoords": "axes fraction", "color": end.colour, "gid": END_LABEL}
        write(axes, end.text, (1, height), **look)


END_LABEL = "end-label"
LINE_SPACING = 1.25
LAYOUT_SHARE = 0.8
"""Axes keep at least this fraction of their default height after
titles and labels are placed."""


def gap_of_labels(axes: Axes) -> float:
    """Return the minimum distance of two labels of one line each,
    in units of the axes' height."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = 72 / figure.dpi * axes.get_window_extent().height
    return LINE_SPACING * size_in_points("small") / (LAYOUT_SHARE * points)


def spread(heights: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Move heights as little as possible, so that they lie in [0,
    1] and differ by at least `gap`.

    The order of the heights stays the same, and the sum of squared changes is minimal.
    If there are too many heights for the gap, moved heights can exceed 1.

    >>> spread(np.array([0.5, 0.5, 0.0]), 0.2).tolist()
    [0.4, 0.6, 0.0]
    """
    order = np.argsort(heights, kind="stable")
    # Let z_k be the k-th moved height minus k·gap. Moved heights differ by at least the
    # gap if z is non-decreasing, so the best z is an isotonic regression.
    steps = gap * np.arange(len(heights))
    room = max(0.0, 1 - gap * (len(heights) - 1))
    fit = np.clip(isotonic(heights[order] - steps), 0, room)
    places = np.empty(len(heights))
    places[order] = fit + steps
    return places


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares fit by a non-decreasing sequence (pool adjacent
    violators).

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
