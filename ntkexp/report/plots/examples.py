"""What was asked of a point, as pictures: the examples that made its output, and what would change without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument
from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_STEP,
    COMPONENT,
    CONTRIBUTION,
    DECAY_BY_COMPONENT,
    LAST_STEP,
    LeaveOut,
)
from ntkexp.report.examples import Example, image_pixels
from ntkexp.report.explain import Explanation
from ntkexp.report.leave_out import Agreement
from ntkexp.report.ledger import LedgerEntry
from ntkexp.report.outputs import one_output
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
from ntkexp.text import percent, short

# --- Points beside the training examples that made most of their outputs, as a picture.
#
# Images are shown as images, at whole multiples of their pixels; other examples as bars.


TOP = 8  # examples beside a point
LONGEST = 11  # letters that fit below an image
ACROSS_A_POINT = 16  # letters that fit below a point, with the margin beside it
DPI = 200  # pixels are counted at this resolution
CELL, ROW, HEAD = 108, 196, 112  # pixels: an image, a row with its labels, the title
POINT, FIRST, ACROSS = (
    24,
    180,
    147,
)  # pixels: where points and examples begin, and from one example to the next


@dataclass(frozen=True)
class Explained:
    """A point and the examples that contributed most to its output."""

    role: str
    prediction: str  # what the network gives the point
    point: Example
    top: tuple[Example, ...]
    shares: NDArray[np.float64]  # 𝒮 of each


def draw(rows: list[Explained]) -> Figure:
    """Draw points and examples as images if they are some, else as bars."""
    return pictures(rows) if image_pixels(rows[0].point.shown) is not None else bars(rows)


def fitting(name: str, longest: int = LONGEST) -> str:
    """Shorten a name so that it fits below an image.

    >>> fitting("boot"), fitting("ankle boot (left)")
    ('boot', 'ankle boot…')
    """
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def pictures(rows: list[Explained]) -> Figure:
    """Draw a row per point: the point, then the examples with their contributions."""
    figure = Figure(figsize=(WIDE, (HEAD + ROW * len(rows)) / DPI))
    tall = HEAD + ROW * len(rows)
    remark(figure, POINT, "point")
    remark(
        figure,
        FIRST,
        "training examples: class, and what they added to the output (blue: raised, orange: lowered)",
    )
    page = pixel_axes(figure)
    for down, row in enumerate(rows):
        bottom = tall - HEAD - ROW * (down + 1) + ROW - CELL
        # The point's class, with its phase where that fits, why it was chosen, and what is explained
        name = row.point.label if len(row.point.label) <= LONGEST else row.point.name
        label(
            page,
            image(page, row.point.shown, POINT, bottom),
            f"{name}\n{row.role}\n{row.prediction}",
            BLACK,
        )
        for k, (shown, value) in enumerate(zip(row.top, row.shares, strict=True)):
            axes_image = image(page, shown.shown, FIRST + ACROSS * k, bottom)
            phase = "" if shown.phase is None else f"phase {shown.phase}\n"
            added = f"+{short(value)}" if value >= 0 else minus(value)
            label(page, axes_image, f"{shown.name}\n{phase}{added}", ink(value))
    return figure


def pixel_axes(figure: Figure) -> Axes:
    """Put axes over the whole figure, whose unit is a pixel: axes for every image would take longer than all else."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(
        xlim=(0, figure.get_figwidth() * DPI),
        ylim=(0, figure.get_figheight() * DPI),
        autoscale_on=False,
    )
    return axes


def remark(figure: Figure, x: int, text: str) -> None:
    """Say what a column of images is, over it."""
    wide, tall = figure.get_figwidth() * DPI, figure.get_figheight() * DPI
    figure.text(x / wide, 1 - (HEAD - 14) / tall, text, fontsize=7, color=GREY)


def image(page: Axes, shown: NDArray[Any], x: int, y: int) -> AxesImage:
    """Draw an example on whole pixels, each of its own as a square, in a frame."""
    pixels = image_pixels(shown)
    assert pixels is not None
    times = max(1, CELL // max(pixels.shape[:2]))
    tall, wide = times * pixels.shape[0], times * pixels.shape[1]
    low, high = float(pixels.min()), float(pixels.max())
    scaled = (pixels - low) / (high - low or 1.0)
    extent = (x, x + wide, y, y + tall)
    page.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor=GREY, linewidth=0.6))
    return page.imshow(
        scaled, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest", aspect="auto", extent=extent
    )  # fmt: skip


def label(page: Axes, image: AxesImage, text: str, colour: str) -> None:
    left, right, bottom, _ = image.get_extent()
    page.annotate(
        text, ((left + right) / 2, bottom), xytext=(0, -2), textcoords="offset points",
        ha="center", va="top", fontsize=7, color=colour,
    )  # fmt: skip


def bars(rows: list[Explained]) -> Figure:
    """Draw a panel per point, a bar per example, named by its class or target."""
    figure = Figure(figsize=(WIDE, 2.1), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        axes.barh(
            range(len(row.top)), row.shares, color=[ink(value) for value in row.shares], height=0.7
        )
        axes.set_yticks(
            range(len(row.top)), [f"{shown.label}  #{shown.index}" for shown in row.top]
        )
        axes.invert_yaxis()
        axes.axvline(0, color=BLACK, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_title(
            f"{row.role}, {row.prediction}\ntarget {row.point.label}  #{row.point.index}"
        )
        axes.set_xlabel("contribution")
    figure.supylabel("training example", fontsize=8)
    return figure


def ink(value: float) -> str:
    """Choose blue for what raises the output, and vermilion for what lowers it."""
    return BLUE if value >= 0 else VERMILION


def spell_prediction(output: str, value: float) -> str:
    """Say what the network gives a point, in words that fit below it.

    >>> spell_prediction("f for boot", -0.5), spell_prediction("f for ankle boot", 0.125)
    ('f for boot: −0.5', 'f for a…: 0.125')
    """
    whole, number = f"{output}: {minus(value)}", minus(value)
    return (
        whole
        if len(whole) <= ACROSS_A_POINT
        else f"{fitting(output, ACROSS_A_POINT - 3 - len(number))}: {number}"
    )


def minus(value: float) -> str:
    """Spell a number with the sign that the axes use."""
    return short(value).replace("-", "−")


# --- Explanations as a picture: each point, and beside it the examples that made most of its prediction.


def save(explanations: Sequence[Explanation], path: Path) -> None:
    """Write the picture as a file, SVG or PNG by its name."""
    rows = [row(explanation) for explanation in explanations]
    with house_style():
        figure = draw(rows)
        heading(figure, answer(explanations))
        write(figure, path, path.suffix.removeprefix("."))


def row(explanation: Explanation) -> Explained:
    """Put a point in the terms of the picture that a run draws of itself."""
    top = explanation.parts[:TOP]
    return Explained(
        role=f"{explanation.split} {explanation.number}",
        prediction=spell_prediction(explanation.output, explanation.prediction),
        point=labelled(explanation.point),
        top=tuple(labelled(part.example) for part in top),
        shares=np.array([part.added for part in top]),
    )


def labelled(example: Example) -> Example:
    """Give an example a name that fits below it."""
    return replace(example, name=fitting(example.text or example.name))


def answer(explanations: Sequence[Explanation]) -> str:
    masses = [explanation.mass for explanation in explanations]
    largest = [
        sum(abs(part.added) for part in explanation.parts[:TOP]) for explanation in explanations
    ]
    share = percent(sum(largest) / sum(masses)) if sum(masses) else "0 %"
    where = (
        f"these {len(explanations)} points, taken together"
        if len(explanations) > 1
        else "this point"
    )
    return f"The examples shown make {share} of the contributions to {where}"


# --- What was asked of a point, as pictures: what examples added beside what would change without them, when it came,
# how a removal splits, and whether predicted changes came true.


BARS = 12  # examples that have bars
LINES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE)  # of components that have lines
ACROSS_A_LINE = 24  # letters of their names
Array = NDArray[np.float64]


def picture_beside(explanation: Explanation) -> Picture:
    """Draw what each of the first examples added, and by how much the output would change without it, if known."""
    parts = explanation.parts[:BARS]
    tells = any(part.left_out is not None for part in parts)
    shown = [replace(part.example, name=fitting(part.example.name)) for part in parts]
    names = [each.label if each.text else f"#{each.index} {each.label}" for each in shown]
    table = pd.DataFrame({
        "example": names,
        "added": [part.added for part in parts],
        **({"if_left_out": [part.left_out for part in parts]} if tells else {}),
    })  # fmt: skip
    with house_style():
        figure = Figure(
            figsize=(WIDE if tells else NARROW, 0.8 + 0.17 * len(parts)), layout="constrained"
        )
        panels = np.atleast_1d(figure.subplots(1, 1 + tells, sharey=True))
        named_bars(
            panels[0],
            names,
            table["added"].to_numpy(dtype=float),
            "added on the way, in this training",
        )
        if tells:
            changes = table["if_left_out"].to_numpy(dtype=float)
            named_bars(panels[1], names, changes, "change of the output, if left out")
        heading(
            figure,
            f"What made {explanation.split} {explanation.number}"
            + ", and what would change it" * tells,
        )
    return Picture("beside", figure, table)


def shares(entry: LedgerEntry) -> Picture:
    """Draw how the change that a removal made splits over the examples that were left out, and the change itself."""
    order = np.argsort(-np.abs(entry.shares), kind="stable")[:BARS].tolist()
    names = [*(fitting(entry.names[k]) for k in order), "all of them"]
    values = np.array([*(float(entry.shares[k]) for k in order), entry.actual])
    with house_style():
        figure = Figure(figsize=(NARROW, 0.8 + 0.17 * len(names)), layout="constrained")
        axes = figure.subplots()
        named_bars(axes, names, values, "share of the change")
        if entry.predicted is not None:
            axes.plot([entry.predicted], [len(names) - 1], "|", color=BLACK, markersize=10)
        marked = "; the mark: as predicted" if entry.predicted is not None else ""
        heading(figure, f"What leaving them out changed: {short(entry.actual)}{marked}")
    return Picture("shares", figure, pd.DataFrame({"left_out": names, "share": values}))


def through(explanation: Explanation) -> Picture:
    """Draw what came through each component, in the order of the network; of many, through those that moved it most."""
    most = sorted(explanation.components, key=lambda part: -abs(part.together))[:BARS]
    chosen = [part for part in explanation.components if part in most]
    values = np.array([part.together for part in chosen])
    shown = [part.name for part in chosen]
    figure = bar_figure(
        shown, values, "examples and decay did", "Through which components the output moved"
    )
    names = [part.name for part in explanation.components]
    table = {"component": names, "in_all": [part.together for part in explanation.components]}
    return Picture("components", figure, pd.DataFrame(table))


def through_by_step(explanation: Explanation) -> Picture:
    """Draw when it came through the components that moved the output most, and through all others, from the first step
    on; what came late through one shows what it learned late.
    """
    ordered = sorted(explanation.components, key=lambda part: -abs(part.together))
    lines = {part.name: part.movement.by_step for part in ordered[: len(LINES)]}
    if rest := ordered[len(LINES) :]:
        lines["all others"] = np.sum([part.movement.by_step for part in rest], axis=0)
    last = ordered[0].movement.last_step + 1
    with house_style():
        figure = Figure(figsize=(NARROW, 2.2), layout="constrained")
        axes = figure.subplots()
        inks = dict(zip(lines, LINES, strict=False)) | {"all others": GREY}
        for name, by_step in lines.items():
            axes.plot([0, *last], [0.0, *np.cumsum(by_step)], color=inks[name])
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.set(xlabel="step", ylabel="came so far", xlim=(0, last[-1]))
        ends = [
            End(fitting(name, ACROSS_A_LINE), float(each.sum()), inks[name])
            for name, each in lines.items()
        ]
        name_ends(axes, ends)
        heading(figure, "When it came through them")
    table = pd.DataFrame(
        {"step": last, **{name: np.cumsum(by_step) for name, by_step in lines.items()}}
    )
    return Picture("components-when", figure, table)


def when(by_step: Array, title: str, last_step: NDArray[np.int64] | None = None) -> Picture:
    """Draw what came of each step, or of each stretch up to its last step, added up from the first."""
    last = np.arange(len(by_step)) if last_step is None else last_step
    table = pd.DataFrame({"step": last + 1, "so_far": np.cumsum(by_step)})
    with house_style():
        figure = Figure(figsize=(NARROW, 2.0), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, *table["step"]], [0.0, *table["so_far"]], color=BLUE)
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.set(xlabel="step", ylabel="added so far")
        heading(figure, title)
    return Picture("when", figure, table)


def checked(retrained: LeaveOut, agreement: Agreement) -> Picture:
    """Draw predicted over actual changes: a dot for each removal, point and output whose effect is known."""
    rows = [
        (k, removal.influential, len(removal.examples), name, came)
        for k, removal in enumerate(retrained.removals)
        for name, came in zip(
            retrained.predicted[k].ravel(), retrained.actual[k].ravel(), strict=True
        )
        if np.isfinite(name)
    ]
    table = pd.DataFrame(
        rows, columns=["removal", "influential", "left_out", "predicted", "actual"]
    )
    with house_style():
        figure = Figure(figsize=(NARROW, NARROW), layout="constrained")
        axes = figure.subplots()
        axes.axline((0, 0), slope=1, color=BLACK, linewidth=0.5)
        most = table["influential"].astype(bool)
        others = "random examples" if most.any() else "each example by itself"
        for influential, ink, name in ((False, GREY, others), (True, BLUE, "the most influential")):
            chosen = table[most == influential]
            if chosen.empty:
                continue
            axes.plot(
                chosen["actual"], chosen["predicted"], "o", color=ink, alpha=0.6, markeredgewidth=0, label=name,
                rasterized=len(table) > 1000,
            )  # fmt: skip
        axes.set(
            xlabel="change that came, trained again without them",
            ylabel="change that was predicted",
        )
        axes.legend()
        heading(figure, agreement.sentence)
    return Picture("checked", figure, table)


def bar_figure(names: Sequence[str], values: Array, label: str, title: str) -> Figure:
    """Draw a bar for each name, in one panel."""
    with house_style():
        figure = Figure(figsize=(NARROW, 0.8 + 0.17 * len(names)), layout="constrained")
        named_bars(figure.subplots(), names, values, label)
        heading(figure, title)
    return figure


def named_bars(axes: Axes, names: Sequence[str], values: Array, label: str) -> None:
    """Draw bars downwards: blue raises the output, orange lowers it."""
    axes.barh(
        range(len(values)), values, color=[BLUE if value >= 0 else VERMILION for value in values]
    )
    axes.set_yticks(range(len(values)), list(names))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.set_xlabel(label)


# --- The same of what `attribute` and `load_run(…).contributions` give, as matplotlib axes.


@dataclass(frozen=True)
class AttributionPlots:
    """Pictures of one point, each as the axes that it is drawn on; `axes.figure` is what `savefig` writes.

    `probe` is the place of the point, and `out` names an output, if there are several. What is not here is what
    xarray's own `plot` has.
    """

    found: xr.Dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(xr.Dataset(self.found.data_vars, self.found.coords).plot, name)

    def contributions(
        self, probe: int | np.integer[Any] = 0, *, out: str | int | None = None, top: int = BARS
    ) -> Axes:
        """Draw the examples that added most to an output, or took most from it."""
        parts = self.array(CONTRIBUTION, probe, out)
        order = np.argsort(-np.abs(parts.to_numpy()), kind="stable")[:top]
        names = [fitting(str(name), ACROSS_A_LINE) for name in parts["example"].to_numpy()[order]]
        title = f"What made {self.name_of(probe)}"
        return bar_figure(names, parts.to_numpy()[order], "added on the way", title).axes[0]

    def components(self, probe: int | np.integer[Any] = 0, *, out: str | int | None = None) -> Axes:
        """Draw what came through each component, examples and decay together; it takes `by=`."""
        parts = self.array(BY_COMPONENT, probe, out).sum("example")
        if DECAY_BY_COMPONENT in self.found:
            parts = parts + self.array(DECAY_BY_COMPONENT, probe, out)
        names = [fitting(str(name), ACROSS_A_LINE) for name in parts[COMPONENT].to_numpy()]
        title = f"Through which components {self.name_of(probe)} moved"
        return bar_figure(names, parts.to_numpy(), "examples and decay did", title).axes[0]

    def timeline(self, probe: int | np.integer[Any] = 0, *, out: str | int | None = None) -> Axes:
        """Draw when it came, added up from the first step on."""
        by_step = self.array(BY_STEP, probe, out)
        last = by_step[LAST_STEP].to_numpy() if LAST_STEP in by_step.coords else None
        return when(by_step.to_numpy(), f"When {self.name_of(probe)} came", last).figure.axes[0]

    def array(self, name: str, probe: int | np.integer[Any], out: str | int | None) -> xr.DataArray:
        """An array at one point and output."""
        if name not in self.found:
            advice = "; attribute with by=" if "component" in name else ""
            raise WrongArgument(f"there is no '{name}' here to draw{advice}", "plot")
        points = self.found.sizes["probe"]
        if (
            isinstance(probe, bool)
            or not isinstance(probe, int | np.integer)
            or not -points <= probe < points
        ):
            raise WrongArgument(
                f"probe={probe!r}: it takes a number below {points}, the place of a point", "probe"
            )
        parts = one_output(self.found[name], out).isel(probe=probe)
        if not bool(np.isfinite(parts).all()):
            raise WrongArgument(f"probe={probe}: this point was not attributed", "probe")
        return parts

    def name_of(self, probe: int | np.integer[Any]) -> str:
        return f"point {self.found['probe'].to_numpy()[probe]}"
