"""Pictures of explanations: contributions, changes over the steps,
and leave-out effects.

If examples are images, they are drawn as images, scaled by an integer factor. Other
examples are drawn as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ntkexp.records.contributions import LeaveOut
from ntkexp.report.breakdown import BreakdownEntry
from ntkexp.report.examples import Example, image_pixels, unit_range
from ntkexp.report.explain import Explanation
from ntkexp.report.leave_out import Agreement, removal_scales
from ntkexp.report.parts import ComponentPart, strongest_first
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import Picture, write
from ntkexp.report.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ORANGE,
    PURPLE,
    VERMILION,
    WIDE,
    End,
    heading,
    house_style,
    name_ends,
)
from ntkexp.text import fitting, percent, short

# --- Queries, each with the training examples that have the largest contributions.


TOP = 8  # number of training examples shown for each query
MAX_LABEL_LETTERS = 11  # length of a label below an image
MAX_QUERY_LETTERS = 16  # length of a label below a query
DPI = 200  # resolution for the pixel sizes below
IMAGE_PIXELS = 108
ROW_PIXELS = 196  # height of an image with its labels
TITLE_PIXELS = 86
QUERY_X = 24
EXAMPLES_X = 180
EXAMPLE_SPACING = 147


@dataclass(frozen=True)
class Explained:
    """A query, and the examples with the largest contributions to its output."""

    # reason for showing the query, such as "surest", or its name, such as "query 3"
    role: str
    prediction: str  # name and value of the explained output, as text
    point: Example
    top: tuple[Example, ...]
    shares: NDArray[np.float64]  # the contribution 𝒮(x, xᵢ) of each example


COLOURS_IN_WORDS = "Blue raised the output, red lowered it."


def draw(rows: list[Explained], canvas: Canvas | None = None) -> Figure:
    """Draw queries and examples as images if the examples are images, else as bars."""
    canvas = canvas or Canvas()
    if image_pixels(rows[0].point.shown) is None:
        bars(rows, canvas)
    else:
        pictures(rows, canvas)
    return canvas.figure


def pictures(rows: list[Explained], canvas: Canvas) -> None:
    """Draw a row for each query: its image, then its top examples
    with their contributions."""
    height = TITLE_PIXELS + ROW_PIXELS * len(rows)
    page = pixel_axes(canvas, height)
    remark(page, QUERY_X, "query")
    remark(
        page, EXAMPLES_X, "training examples: name, and what they added to the output"
    )
    for down, row in enumerate(rows):
        bottom = height - TITLE_PIXELS - ROW_PIXELS * down - IMAGE_PIXELS
        # the labels: the class (with its phase if that fits), the role of the query,
        # and the query's output
        name = row.point.label
        if len(name) > MAX_LABEL_LETTERS:
            name = row.point.name
        query_image = image(page, row.point.shown, QUERY_X, bottom)
        lines = dict.fromkeys((name, row.role, row.prediction))
        label(page, query_image, "\n".join(lines), BLACK)
        for k, (shown, value) in enumerate(zip(row.top, row.shares, strict=True)):
            axes_image = image(
                page, shown.shown, EXAMPLES_X + EXAMPLE_SPACING * k, bottom
            )
            words = [shown.name]
            if shown.phase is not None:
                words.append(f"phase {shown.phase}")
            words.append(f"+{short(value)}" if value >= 0 else minus(value))
            label(page, axes_image, "\n".join(words), ink(value))


def pixel_axes(canvas: Canvas, height: int) -> Axes:
    """Return axes over the whole figure, in pixels.
    Separate axes for each image would be slow."""
    axes: Axes = canvas.panels((WIDE, height / DPI))[0, 0]
    if canvas.is_new:
        canvas.figure.set_layout_engine("none")
        axes.set_position((0, 0, 1, 1))
    else:
        axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set(xlim=(0, WIDE * DPI), ylim=(0, height), autoscale_on=False)
    return axes


def remark(page: Axes, x: int, text: str) -> None:
    """Write the heading of a column of images."""
    page.text(
        x, page.get_ylim()[1] - TITLE_PIXELS + 14, text, fontsize="small", color=GREY
    )


def image(page: Axes, shown: NDArray[Any], x: int, y: int) -> AxesImage:
    """Draw an image in a frame, scaled by an integer factor."""
    pixels = image_pixels(shown)
    assert pixels is not None
    scale = max(1, IMAGE_PIXELS // max(pixels.shape[:2]))
    height = scale * pixels.shape[0]
    width = scale * pixels.shape[1]
    page.add_patch(
        Rectangle((x, y), width, height, fill=False, edgecolor=GREY, linewidth=0.6)
    )
    return page.imshow(
        unit_range(pixels),
        cmap="gray_r",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="auto",
        extent=(x, x + width, y, y + height),
    )


def label(page: Axes, image: AxesImage, text: str, colour: str) -> None:
    left, right, bottom, _ = image.get_extent()
    page.annotate(
        text, ((left + right) / 2, bottom), xytext=(0, -2), textcoords="offset points",
        ha="center", va="top", fontsize="small", color=colour,
    )  # fmt: skip


def bars(rows: list[Explained], canvas: Canvas) -> None:
    """Draw a panel for each query, with a bar for each example.

    Bars are labelled by class or target, or by text and name.
    """
    panels = canvas.panels((WIDE, 2.1), 1, len(rows))[0]
    for axes, row in zip(panels, rows, strict=True):
        places = range(len(row.top))
        axes.barh(
            places, row.shares, color=[ink(value) for value in row.shares], height=0.7
        )
        axes.set_yticks(places, list(map(bar_label, row.top)))
        axes.invert_yaxis()
        axes.axvline(0, color=BLACK, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        point = bar_label(row.point)
        if row.point.text is None:
            point = f"target {point}"
        axes.set_title(f"{row.role}, {row.prediction}\n{point}")
        axes.set_xlabel("contribution")
    panels[0].set_ylabel("training example")


def bar_label(shown: Example) -> str:
    """Return the label of a bar: the target and the index in the data. For an example
    of a followed loop, return its text and name instead.

    >>> bar_label(Example(17, "cat", np.zeros(2)))
    'cat  #17'
    >>> bar_label(Example(17, "#17", np.zeros(2), text="a line of words"))
    'a line of …  #17'
    >>> bar_label(Example(0, "174", np.zeros(2), text=""))
    '174'
    """
    if shown.text is None:
        return f"{shown.label}  #{shown.index}"
    if not shown.text:
        return shown.label
    return f"{fitting(shown.text, MAX_LABEL_LETTERS)}  {shown.label}"


def ink(value: float) -> str:
    """Return blue for a part that raises the output, and
    vermilion for a part that lowers it."""
    if value >= 0:
        return BLUE
    return VERMILION


def spell_prediction(output: str, value: float) -> str:
    """Format the output at a query, shortened to `MAX_QUERY_LETTERS`.

    >>> spell_prediction("f for boot", -0.5), spell_prediction("f for ankle boot", 0.125)
    ('f for boot: −0.5', 'f for a…: 0.125')
    """
    number = minus(value)
    line = f"{output}: {number}"
    if len(line) <= MAX_QUERY_LETTERS:
        return line
    return f"{fitting(output, MAX_QUERY_LETTERS - 3 - len(number))}: {number}"


def minus(value: float) -> str:
    """Format a number with the minus sign (−) that the axes use."""
    return short(value).replace("-", "−")


# --- Explanations as a picture file.


def save(explanations: Sequence[Explanation], path: Path) -> None:
    """Write the picture as an SVG or PNG file, according to the suffix of the path."""
    rows = [row(explanation) for explanation in explanations]
    with house_style():
        figure = draw(rows)
        heading(figure, *answer(explanations))
        write(figure, path, path.suffix.removeprefix("."))


def row(explanation: Explanation) -> Explained:
    """Return the row of the picture for an explanation."""
    top = explanation.parts[:TOP]
    return Explained(
        role=f"{explanation.split} {explanation.number}",
        prediction=spell_prediction(explanation.output, explanation.prediction),
        point=labelled(explanation.point),
        top=tuple(labelled(part.example) for part in top),
        shares=np.array([part.added for part in top]),
    )


def labelled(example: Example) -> Example:
    """Return the example with a name that fits below its image."""
    return replace(example, name=fitting(example.name, MAX_LABEL_LETTERS))


def answer(explanations: Sequence[Explanation]) -> tuple[str, str]:
    """Return the title and the caption. The title states the share of the shown
    examples in all contributions."""
    mass = 0.0
    shown = 0.0
    for explanation in explanations:
        mass += explanation.mass
        shown += sum(abs(part.added) for part in explanation.parts[:TOP])
    share = percent(shown / mass) if mass else "0 %"
    where = "the query"
    if len(explanations) > 1:
        where = f"{len(explanations)} queries"
    sums = f"The share is that of Σ|contributions|, summed over {where}."
    return (
        f"The examples shown make {share} of contributions",
        f"{COLOURS_IN_WORDS} {sums}",
    )


# --- The pictures of one query on a page.


MAX_BARS = 12
LINE_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE)  # one line per component
MAX_BAR_LETTERS = 24  # length of the name of a component next to a line or bar
Array = NDArray[np.float64]


def picture_beside(explanation: Explanation) -> Picture:
    """Draw the contributions of the strongest examples,
    and their leave-out effects, if known."""
    parts = explanation.parts[:MAX_BARS]
    shown = [labelled(part.example) for part in parts]
    names = [
        f"#{part.index} {part.label}" if part.text is None else part.label
        for part in shown
    ]
    columns: dict[str, list[Any]] = {
        "example": names,
        "added": [part.added for part in parts],
    }
    has_effects = any(part.left_out is not None for part in parts)
    if has_effects:
        columns["if_left_out"] = [part.left_out for part in parts]
    table = pd.DataFrame(columns)
    title = f"What made {explanation.split} {explanation.number}"
    with house_style():
        width = WIDE if has_effects else NARROW
        canvas = Canvas()
        size = (width, bars_height(len(parts)))
        panels = canvas.panels(size, 1, 1 + has_effects, sharey=True)[0]
        added = table["added"].to_numpy(dtype=float)
        named_bars(panels[0], names, added, "added in this training")
        if has_effects:
            changes = table["if_left_out"].to_numpy(dtype=float)
            named_bars(panels[1], names, changes, "change of the output, if left out")
            title += ", and what would change it"
        figure = canvas.finish(title, COLOURS_IN_WORDS)
    return Picture("beside", figure, table)


def shares(entry: BreakdownEntry) -> Picture:
    """Draw the shares of the removed examples in the change of the output,
    and the total change."""
    order = strongest_first(entry.shares)[:MAX_BARS]
    names = [fitting(entry.names[k], MAX_LABEL_LETTERS) for k in order]
    names.append("all of them")
    values = np.array([*(float(entry.shares[k]) for k in order), entry.actual])
    caption = ""
    with house_style():
        canvas = Canvas()
        axes = canvas.panels((NARROW, bars_height(len(names))))[0, 0]
        named_bars(axes, names, values, "share of the change")
        if entry.predicted is not None:
            axes.plot(
                [entry.predicted], [len(names) - 1], "|", color=BLACK, markersize=10
            )
            caption = "The mark is the predicted change."
        title = f"Change without these examples: {short(entry.actual)}"
        figure = canvas.finish(title, caption)
    return Picture("shares", figure, pd.DataFrame({"left_out": names, "share": values}))


def through(explanation: Explanation) -> Picture:
    """Draw the contributions through the `MAX_BARS` strongest components,
    in the order of the network."""
    strongest = strongest_components(explanation)[:MAX_BARS]
    drawn = [part for part in explanation.components if part in strongest]
    values = np.array([part.together for part in drawn])
    title = "Through which components the output moved"
    names = [part.name for part in drawn]
    with house_style():
        canvas = Canvas()
        axes = canvas.panels((NARROW, bars_height(len(names))))[0, 0]
        named_bars(axes, names, values, "examples and decay did")
        figure = canvas.finish(title)
    names = [part.name for part in explanation.components]
    table = {
        "component": names,
        "in_all": [part.together for part in explanation.components],
    }
    return Picture("components", figure, pd.DataFrame(table))


def through_by_step(explanation: Explanation) -> Picture:
    """Draw the cumulative contributions over the steps: a line for each of the
    strongest components, and a line for the sum of all other components."""
    ordered = strongest_components(explanation)
    lines = {part.name: part.movement.by_step for part in ordered[: len(LINE_COLOURS)]}
    others = ordered[len(LINE_COLOURS) :]
    if others:
        lines["all others"] = np.sum([part.movement.by_step for part in others], axis=0)
    last = ordered[0].movement.last_step + 1
    colors = dict(zip(lines, LINE_COLOURS, strict=False)) | {"all others": GREY}
    so_far = {name: np.cumsum(by_step) for name, by_step in lines.items()}
    ends = []
    with house_style():
        canvas = Canvas()
        axes = canvas.panels((NARROW, 2.2))[0, 0]
        for name, by_step in lines.items():
            axes.plot([0, *last], [0.0, *so_far[name]], color=colors[name])
            end = float(by_step.sum())
            ends.append(End(fitting(name, MAX_BAR_LETTERS), end, colors[name]))
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.set(xlabel="step", ylabel="came so far", xlim=(0, last[-1]))
        name_ends(axes, ends)
        figure = canvas.finish("When it came through them")
    return Picture("components-when", figure, pd.DataFrame({"step": last, **so_far}))


def strongest_components(explanation: Explanation) -> list[ComponentPart]:
    return sorted(explanation.components, key=lambda part: -abs(part.together))


def when(
    by_step: Array, title: str, last_step: NDArray[np.int64] | None = None
) -> Picture:
    """Draw the cumulative change over the steps.

    `last_step` is the last step of each interval of `by_step`.
    """
    table = sums_so_far(by_step, last_step)
    with house_style():
        canvas = Canvas()
        draw_when(canvas.panels((NARROW, 2.0))[0, 0], table)
        figure = canvas.finish(title)
    return Picture("when", figure, table)


def sums_so_far(by_step: Array, last_step: NDArray[np.int64] | None) -> pd.DataFrame:
    if last_step is None:
        last_step = np.arange(len(by_step))
    return pd.DataFrame({"step": last_step + 1, "so_far": np.cumsum(by_step)})


def draw_when(axes: Axes, table: pd.DataFrame) -> None:
    axes.plot([0, *table["step"]], [0.0, *table["so_far"]], color=BLUE)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.set(xlabel="step", ylabel="cumulative contribution")


SCALED = "Changes are divided by the root mean square of each removal's actual changes."


def checked(retrained: LeaveOut, agreement: Agreement) -> Picture:
    """Draw predicted against actual changes of the outputs, with a dot for each
    removal, query and output."""
    table = changes_of(retrained)
    drawn = table[table["scale"] > 0]
    is_influential = table["influential"].astype(bool)
    others = "random examples" if is_influential.any() else "each example by itself"
    with house_style():
        canvas = Canvas()
        axes = canvas.panels((NARROW, NARROW))[0, 0]
        axes.axline((0, 0), slope=1, color=BLACK, linewidth=0.5)
        kinds = ((False, GREY, others), (True, BLUE, "the most influential"))
        for influential, color, name in kinds:
            dots = drawn[drawn["influential"].astype(bool) == influential]
            if dots.empty:
                continue
            axes.plot(
                dots["actual"] / dots["scale"],
                dots["predicted"] / dots["scale"],
                "o",
                color=color,
                alpha=0.6,
                markeredgewidth=0,
                label=name,
                rasterized=len(table) > 1000,
            )
        axes.set_xlabel("actual change, by training again (scaled)")
        axes.set_ylabel("predicted change (scaled)")
        axes.legend()
        title = "Predicted changes are too uncertain to be shown"
        if agreement.believed:
            title = f"Predicted changes correlate {agreement.correlation:.2f} with retrainings"
        figure = canvas.finish(title, f"{agreement.sentence}. {SCALED}")
    return Picture("checked", figure, table)


def changes_of(retrained: LeaveOut) -> pd.DataFrame:
    """Return a row for each predicted change. The column `scale` is the root mean
    square of the actual changes of the removal, as in `report.leave_out`."""
    rows = []
    for k, removal in enumerate(retrained.removals):
        pairs = zip(
            retrained.predicted[k].ravel(), retrained.actual[k].ravel(), strict=True
        )
        for predicted, actual in pairs:
            if np.isfinite(predicted):
                left_out = len(removal.examples)
                rows.append((k, removal.influential, left_out, predicted, actual))
    columns = ["removal", "influential", "left_out", "predicted", "actual"]
    table = pd.DataFrame(rows, columns=columns)
    scales = removal_scales(retrained, ~np.isnan(retrained.predicted))
    return table.assign(scale=scales[table["removal"].to_numpy(dtype=int)])


BAR_INCHES = 0.17  # height of a bar


def bars_height(bars: int) -> float:
    """Return the height of a figure of bars in inches."""
    return 0.8 + BAR_INCHES * bars


def named_bars(axes: Axes, names: Sequence[str], values: Array, label: str) -> None:
    """Draw horizontal bars from top to bottom."""
    axes.barh(range(len(values)), values, color=[ink(value) for value in values])
    axes.set_yticks(range(len(values)), list(names))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.set_xlabel(label)
