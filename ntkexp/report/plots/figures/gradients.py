"""How similar are the gradients at two examples along the path?

The picture shows Figure 1 of Domingos (2020) with the gradients of a run.

    K_s(x, x′) = ⟨∇f(x), ∇f(x′)⟩ = ‖∇f(x)‖ ‖∇f(x′)‖ cos(angle)        at the weights θ_s

The two training examples are the pair with the largest path kernel |𝒦(x, x′)|. Lengths
and angles are computed from the stored kernels, or from their traces over outputs if
there are several outputs. Kernels do not contain the directions of gradients, so each
pair of gradients is drawn symmetrically about the vertical."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.examples import example
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.figures.path_kernel import read as read_path_kernel
from ntkexp.report.plots.style import BLACK, BLUE, GREY, NARROW, ORANGE, End, name_ends
from ntkexp.report.run import Run
from ntkexp.text import fitting, short

MAX_STATIONS = 4  # largest number of steps with drawn gradients
HEIGHT_INCHES = 0.9  # length of the longest drawn gradient
WIDTH_INCHES = 1.7  # distance from the first to the last drawn pair of gradients
MAX_PARAMETER_LETTERS = 14

Array = NDArray[np.float64]


class Course(NamedTuple):
    """The lengths and inner products of the gradients at two training examples,
    along the path."""

    pair: tuple[int, int]
    moved: Array  # relative change of the weights, ‖θ_s − θ_0‖/‖θ_0‖
    lengths: Array  # ‖∇f(x)‖ and ‖∇f(x′)‖, [snapshot, 2]
    kernel: Array  # the inner product K_s(x, x′) of the gradients

    @property
    def angles(self) -> Array:
        """The angle between the gradients in degrees.

        >>> Course((0, 1), np.zeros(1), np.array([[2.0, 1.0]]), np.array([1.0])).angles.round(9).tolist()
        [60.0]
        """
        cosines: Array = self.kernel / self.lengths.prod(axis=1)
        return np.asarray(np.degrees(np.arccos(np.clip(cosines, -1, 1))))


def read(run: Run) -> Course | None:
    """Read the lengths and inner products of the gradients at the pair of examples.

    Return None if fewer than two kernels between training examples are stored.
    """
    kernel_and_order = read_path_kernel(run)
    if kernel_and_order is None or "tangent" not in run.kernels:
        return None
    path_kernel, _ = kernel_and_order
    if len(path_kernel) < 2:
        return None

    # select the pair with the largest |𝒦(x, x′)|
    sizes = np.abs(path_kernel)
    np.fill_diagonal(sizes, -1)
    pair = [int(place) for place in np.unravel_index(np.argmax(sizes), sizes.shape)]

    # read the tangent kernels of the pair, traced over outputs, [snapshot, 2, 2]
    places = [run.points["train"].start + place for place in pair]
    kernels = run.kernels["tangent"].isel(query=places, train=pair).to_numpy()
    kernels = np.einsum("sacbc->sab", kernels)
    diagonal = np.einsum("saa->sa", kernels)

    # select snapshots with finite kernels and weights
    steps = run.series("weights_moved")
    moved_at = dict(zip(steps["step"], steps["weights_moved"], strict=True))
    snapshots = run.kernels["step"].to_numpy().tolist()
    moved = np.array([moved_at.get(step, np.nan) for step in snapshots])
    known = np.isfinite(moved) & np.isfinite(kernels).all(axis=(1, 2))
    known &= (diagonal > 0).all(axis=1)
    if known.sum() < 2 or not moved[known].max() > 0:
        return None
    lengths = np.sqrt(diagonal[known])
    return Course((pair[0], pair[1]), moved[known], lengths, kernels[known, 0, 1])


def draw(run: Run, canvas: Canvas) -> Figure | None:
    course = read(run)
    if course is None:
        return None
    names = [
        fitting(name_of(run, place), MAX_PARAMETER_LETTERS) for place in course.pair
    ]
    size = (NARROW, 3.0)
    above, below = canvas.panels(size, 2, 1, sharex=True, height_ratios=(3, 2))[:, 0]
    draw_pairs(above, course, names)
    below.plot(course.moved, course.kernel, "o-", color=BLACK, markersize=2.5)
    below.axhline(0, color=GREY, linewidth=0.5)
    below.set(xlabel="relative change of the weights ‖θ − θ₀‖/‖θ₀‖", ylabel="K(x, x′)")
    return canvas.finish(answer(course), caption(course, names))


def draw_pairs(axes: Axes, course: Course, names: list[str]) -> None:
    """Draw both gradients as arrows at some steps of the path,
    symmetrically about the vertical."""
    end = course.moved.max()
    stations = stations_of(course.moved / end)
    moved = course.moved[stations]
    baseline = np.zeros_like(moved)
    axes.plot(
        course.moved, np.zeros_like(course.moved), "-", color=BLACK, linewidth=0.8
    )
    axes.plot(moved, baseline, "o", color=BLACK, markersize=2.5)

    # scale the longest gradient to the height of the panel, or to less, so that
    # neighbouring pairs do not cross
    turn = np.radians(course.angles[stations]) / 2
    half_spacing = WIDTH_INCHES / (MAX_STATIONS - 1) / 2
    inches = min(HEIGHT_INCHES, half_spacing / max(np.sin(turn).max(), 1e-9))
    lengths = inches * course.lengths[stations] / course.lengths[stations].max()
    for side, length, ink in zip((-1, 1), lengths.T, (BLUE, ORANGE), strict=True):
        across = side * length * np.sin(turn)
        upward = length * np.cos(turn)
        arrows = axes.quiver(
            moved, baseline, across, upward, color=ink,
            angles="uv", scale_units="inches", scale=1, width=0.006, clip_on=False,
        )  # fmt: skip
        arrows.set_in_layout(False)  # exclude the arrows from the layout
    axes.set(
        xlim=(-0.2 * end, 1.2 * end), ylim=(-0.1, 1), yticks=[], ylabel="∇f(x), ∇f(x′)"
    )
    axes.spines["left"].set_visible(False)
    name_ends(axes, [End(names[0], 0.85, BLUE), End(names[1], 0.6, ORANGE)])


def stations_of(places: Array) -> list[int]:
    """Return the indices of snapshots that are far enough apart on the path to be drawn
    side by side."""
    stations = [0]
    for k in range(1, len(places)):
        if places[k] - places[stations[-1]] >= 0.9 / (MAX_STATIONS - 1):
            stations.append(k)
    return stations


def name_of(run: Run, place: int) -> str:
    shown = example(run, "train", place)
    return f"#{shown.index} ({shown.label})"


def table(run: Run) -> pd.DataFrame:
    course = read(run)
    if course is None:
        return pd.DataFrame()
    first, second = course.pair
    return pd.DataFrame({
        "weights_moved": course.moved,
        f"norm_{first}": course.lengths[:, 0],
        f"norm_{second}": course.lengths[:, 1],
        "angle": course.angles,
        "kernel": course.kernel,
    })  # fmt: skip


def answer(course: Course) -> str:
    start, end = course.angles[[0, -1]]
    return f"The angle between two gradients: {start:.0f}° at first, {end:.0f}° at last"


def caption(course: Course, names: list[str]) -> str:
    """Name the examples, and state the growth of the gradients' lengths."""
    grown = course.lengths[-1].mean() / course.lengths[0].mean()
    pair = f"Training examples {names[0]} and {names[1]}, the pair with the largest path kernel."
    return f"{pair} At the end, the gradients are {short(grown)} times as long as at the start."
