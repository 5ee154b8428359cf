"""Which training examples made a prediction? The largest |𝒮(x, xᵢ)| for the surest, a typical and the least sure point.

Images are shown as images, at whole multiples of their pixels; other examples as bars. With several outputs, the
contributions to the one that the network gives the point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.records.contributions import telling
from ntkexp.report.explain import largest_known, read_at
from ntkexp.report.plots.style import BLACK, BLUE, GREY, VERMILION, WIDE, heading
from ntkexp.report.run import Run
from ntkexp.text import percent, short

TOP = 8
LONGEST = 11  # letters that fit below an image
DPI = 200  # pixels are counted at this resolution
CELL, ROW, HEAD = 108, 196, 112  # pixels: an image, a row with its labels, the title
POINT, FIRST, ACROSS = 24, 180, 147  # pixels: where points and examples begin, and from one example to the next


@dataclass(frozen=True)
class Example:
    """An example as a person sees it."""

    shown: NDArray[Any]
    name: str
    index: int


@dataclass(frozen=True)
class Explained:
    """A point and the examples that contributed most."""

    role: str
    said: str  # what the network gives the point
    point: Example
    top: tuple[Example, ...]
    shares: NDArray[np.float64]  # 𝒮 of each


class Read(NamedTuple):
    """What is known of the points of a split."""

    rule: str
    split: str
    known: NDArray[np.int64]
    parts: NDArray[np.float64]
    outputs: NDArray[np.float64]


def read(run: Run) -> Read | None:
    """The contributions to the points that the run is judged by, if there are any."""
    rule = telling(run.rules)
    split = next((s for s in ("probe", "test", "train") if s in run.points and len(run.data[f"{s}_index"])), None)
    if rule is None or split is None:
        return None
    parts = run.contributions[rule].isel(probe=run.points[split]).to_numpy()
    outputs = run.predictions.sel(machine="f_T").isel(probe=run.points[split]).to_numpy()
    known = np.flatnonzero(read_at(parts).any(axis=1))  # with some optimizers a few points alone
    if not known.size or not np.isfinite(outputs).all() or not parts.size:
        return None
    return Read(rule, split, known, parts, outputs)


def draw(run: Run) -> Figure | None:
    found = read(run)
    if found is None:
        return None
    rows = explain(run, found.split, found.known, found.parts, found.outputs)
    figure = pictures(rows) if picture(rows[0].point.shown) is not None else bars(rows)
    heading(figure, answer(found.parts[found.known], run.contributions[found.rule].attrs))
    return figure


def table(run: Run) -> pd.DataFrame:
    found = read(run)
    rows = explain(run, found.split, found.known, found.parts, found.outputs) if found else []
    lines = [
        (row.role, row.point.index, row.point.name, shown.index, shown.name, value)
        for row in rows
        for shown, value in zip(row.top, row.shares.tolist(), strict=True)
    ]
    return pd.DataFrame(lines, columns=["point", "index", "target", "example", "its_target", "contribution"])


def explain(
    run: Run, split: str, known: NDArray[np.int64], parts: NDArray[np.float64], outputs: NDArray[np.float64]
) -> list[Explained]:
    """Three of the points that are known, by how far their largest output is from zero or from the next one."""
    sure = np.abs(outputs[:, 0]) if outputs.shape[1] == 1 else np.diff(np.sort(outputs, axis=1)[:, -2:])[:, 0]
    order = known[np.argsort(sure[known], kind="stable")]
    roles = ("surest", "typical", "least sure") if len(run.data["classes"]) else ("largest", "typical", "smallest")
    found = []
    for role, k in zip(roles, order[[-1, len(order) // 2, 0]].tolist(), strict=True):
        chosen = largest_known(outputs[k], parts[k])
        here = parts[k, chosen]
        top = np.argsort(-np.abs(here), kind="stable")[:TOP]
        examples = tuple(example(run, "train", i) for i in top.tolist())
        said = f"{output_name(run, chosen, outputs.shape[1])} {minus(float(outputs[k, chosen]))}"
        found.append(Explained(role, said, example(run, split, k), examples, here[top]))
    return found


def output_name(run: Run, chosen: int, outputs: int) -> str:
    """The output that is explained: f, or that of a class."""
    classes = run.data["classes"]
    return f"f for {classes[chosen]}:" if 1 < outputs == len(classes) else "f:"


def example(run: Run, split: str, k: int) -> Example:
    """One example with its class or its values."""
    classes, target = run.data["classes"], run.data[f"{split}_target"][k]
    values = " ".join(minus(float(value)) for value in np.atleast_1d(target)[:2])
    name = str(classes[target]) if len(classes) else values
    shortened = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    return Example(run.data[f"{split}_shown"][k], shortened, int(run.data[f"{split}_index"][k]))


def picture(shown: NDArray[Any]) -> NDArray[Any] | None:
    """[height, width] or [height, width, colour], if this is an image."""
    if shown.ndim == 2:
        return shown
    if shown.ndim == 3 and shown.shape[0] in (1, 3):
        return shown[0] if shown.shape[0] == 1 else np.moveaxis(shown, 0, -1)
    return None


def pictures(rows: list[Explained]) -> Figure:
    """A row per point: the point, then the examples with their contributions."""
    figure = Figure(figsize=(WIDE, (HEAD + ROW * len(rows)) / DPI))
    tall = HEAD + ROW * len(rows)
    remark(figure, POINT, "point")
    remark(figure, FIRST, "training examples: class, and what they added to the output (blue: raised, orange: lowered)")
    for down, row in enumerate(rows):
        bottom = tall - HEAD - ROW * (down + 1) + ROW - CELL
        image(figure, row.point.shown, POINT, bottom).set_xlabel(point_label(row), fontsize=7, labelpad=2)
        for k, (shown, value) in enumerate(zip(row.top, row.shares, strict=True)):
            axes = image(figure, shown.shown, FIRST + ACROSS * k, bottom)
            axes.set_xlabel(f"{shown.name}\n{signed(value)}", fontsize=7, labelpad=2, color=ink(value))
    return figure


def point_label(row: Explained) -> str:
    """The point's class, why it was chosen, and what is explained."""
    return f"{row.point.name}\n{row.role}\n{row.said}"


def remark(figure: Figure, x: int, text: str) -> None:
    """What a column of images is, over it."""
    wide, tall = figure.get_figwidth() * DPI, figure.get_figheight() * DPI
    figure.text(x / wide, 1 - (HEAD - 14) / tall, text, fontsize=7, color=GREY)


def image(figure: Figure, shown: NDArray[Any], x: int, y: int) -> Axes:
    """An example on whole pixels, each of its own as a square."""
    pixels = picture(shown)
    assert pixels is not None
    times = max(1, CELL // max(pixels.shape[:2]))
    tall, wide = times * pixels.shape[0], times * pixels.shape[1]
    canvas = np.array([figure.get_figwidth(), figure.get_figheight()] * 2) * DPI
    axes = figure.add_axes(tuple(np.array([x, y, wide, tall]) / canvas))
    low, high = float(pixels.min()), float(pixels.max())
    scaled = (pixels - low) / (high - low or 1.0)
    axes.imshow(scaled, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(GREY)
    return axes


def bars(rows: list[Explained]) -> Figure:
    """A panel per point, a bar per example, named by its class or target."""
    figure = Figure(figsize=(WIDE, 2.1), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        axes.barh(range(len(row.top)), row.shares, color=[ink(value) for value in row.shares], height=0.7)
        axes.set_yticks(range(len(row.top)), [f"{shown.name}  #{shown.index}" for shown in row.top])
        axes.invert_yaxis()
        axes.axvline(0, color=BLACK, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{row.role}, {row.said}\ntarget {row.point.name}  #{row.point.index}")
        axes.set_xlabel("contribution")
    figure.supylabel("training example", fontsize=8)
    return figure


def ink(value: float) -> str:
    """Blue raises the output, vermilion lowers it."""
    return BLUE if value >= 0 else VERMILION


def signed(value: float) -> str:
    """A contribution with its sign."""
    return "+" + short(value) if value >= 0 else minus(value)


def minus(value: float) -> str:
    """A number with the sign that the axes use."""
    return short(value).replace("-", "−")


def answer(parts: NDArray[np.float64], facts: dict[str, Any]) -> str:
    """The title: how concentrated the contributions are, and how well their parts are known."""
    rows = np.abs(parts).reshape(-1, parts.shape[-1])
    sizes = np.sort(rows[read_at(rows)], axis=1)[:, ::-1]
    total = sizes.sum()
    top = min(10, parts.shape[-1])
    part = percent(sizes[:, :top].sum() / total) if total > 0 else "0 %"
    where = f"each of {len(parts)} points" if len(parts) > 1 else "a point"
    return f"The top {top} of {parts.shape[-1]} examples for {where} make {part} of its contributions{known(facts)}"


def known(facts: dict[str, Any]) -> str:
    """How far the parts can be trusted, where that was measured."""
    error, cancellation = facts.get("error_bar"), facts.get("cancellation")
    accuracy = [f"are known to {percent(error)}"] if error is not None and np.isfinite(error) else []
    cancels = [f"cancel {short(cancellation)}-fold"] if cancellation is not None and np.isfinite(cancellation) else []
    return f"; the parts {' and '.join([*accuracy, *cancels])}" if accuracy or cancels else ""
