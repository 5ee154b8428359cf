"""Two panels for relative errors: a strip for errors that are only rounding errors, and
a log axis for all others.

A single log axis for all errors would spend most of its width on the empty decades
between 1e-12 and 1e-4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from ntkexp.report.plots.canvas import STRIP, Canvas
from ntkexp.report.plots.style import (
    BLACK,
    DASHED,
    GREY,
    LEAST,
    PALE,
    log_axis,
    machine_rows,
    write,
)
from ntkexp.text import spoken

CONTROLS = "controls"  # the label of the empty row above the controls
LARGEST_EXACT = 1e-9  # right end of the strip, unless an exact error is larger
STRIP_WIDTH = 0.22  # width of the strip, relative to the log axis
# minimum length of the log axis, so that at least two ticks have labels
FEWEST_DECADES = 2


@dataclass(frozen=True)
class ErrorPanels:
    """Axes with a row for each kernel machine. Errors that are only rounding errors are
    drawn in `strip`, all others in `axes`. Without rounding errors, `strip` is None. If
    there are only rounding errors, `axes` is `strip`."""

    strip: Axes | None
    axes: Axes

    @classmethod
    def of(
        cls,
        canvas: Canvas,
        size: tuple[float, float],
        errors: Sequence[float],
        exact: Sequence[float],
    ) -> ErrorPanels:
        """Add the panels to a canvas: both, or one if all errors are of one kind.

        Args:
            canvas: An empty canvas.
            size: The width and height of a new figure, in inches.
            errors: The errors that are larger than rounding.
            exact: The errors that are only rounding.
        """
        if exact and not errors:
            strip = canvas.panels(size)[0, 0]
            shape_strip(strip, exact)
            return cls(strip, strip)
        if not exact:
            axes = canvas.panels(size)[0, 0]
            strip = None
        else:
            panels = canvas.panels(
                size, 1, 2, sharey=True, width_ratios=[STRIP_WIDTH, 1]
            )
            strip, axes = panels[0]
            shape_strip(strip, exact)
            axes.spines["left"].set_visible(False)
            axes.tick_params(left=False)

        low, high = log_range(errors)
        log_axis(axes, "x")
        axes.set_xlim(low, high)
        axes.set_xlabel("relative error")
        return cls(strip, axes)

    def plot(
        self, error: float, row: int, marker: str, *, is_exact: bool, **look: Any
    ) -> None:
        """Draw an error in its panel."""
        self.panel(is_exact).plot(
            max(error, LEAST), row, marker, markeredgewidth=0, **look
        )

    def mark(self, error: float, row: int, *, is_exact: bool) -> None:
        """Draw a vertical bar at the median of several errors."""
        self.panel(is_exact).plot(
            max(error, LEAST), row, "|", color=BLACK, markersize=7
        )

    def panel(self, is_exact: bool) -> Axes:
        return self.strip if is_exact and self.strip is not None else self.axes

    def name_rows(
        self,
        machines: Sequence[str],
        rows: Sequence[int],
        numbers: Sequence[str],
        heading: str,
    ) -> None:
        """Label the rows on the left, and write a column of numbers
        with a heading on the right."""
        self.label_rows(self.axes, machines, rows)
        if self.strip is not None:
            self.label_rows(self.strip, machines, rows)
            self.strip.set_xticks([])
        if self.strip not in (None, self.axes):
            self.axes.tick_params(labelleft=False)
        for row, number in zip(rows, numbers, strict=True):
            write(self.axes, number, (1, row), color=BLACK)
        look = {"xycoords": "axes fraction", "xytext": (3, 3), "va": "bottom"}
        write(self.axes, heading, (1, 1), color=GREY, **look)

    def label_rows(
        self, axes: Axes, machines: Sequence[str], rows: Sequence[int]
    ) -> None:
        """Label the rows, and draw a line above the controls."""
        labels = {
            row: spoken(machine) for row, machine in zip(rows, machines, strict=True)
        }
        gaps = {*range(max(rows))} - labels.keys()
        for gap in gaps:
            labels[gap] = CONTROLS
            axes.axhline(gap, color=GREY, linewidth=0.5, linestyle=DASHED)
        machine_rows(axes, labels)
        for label in axes.get_yticklabels():
            if label.get_text() == CONTROLS:
                label.set_color(GREY)


def shape_strip(strip: Axes, exact: Sequence[float]) -> None:
    """Set up the axes for errors that are only rounding, without ticks."""
    strip.set_label(STRIP)
    log_axis(strip, "x")
    strip.set_facecolor(PALE)
    # rounding in float32 can exceed LARGEST_EXACT; then the strip is wider
    strip.set_xlim(LEAST / 3, max(LARGEST_EXACT, 10 * max(exact)))
    strip.set_xticks([])
    strip.set_xticks([], minor=True)
    strip.set_xlabel("exact", color=GREY)


def rows_of(controls: Sequence[bool]) -> list[int]:
    """Return the row of each kernel machine.
    An empty row separates the controls, which come last.

    >>> rows_of([False, False, True]), rows_of([True, True])
    ([0, 1, 3], [0, 1])
    """
    if all(controls):
        return list(range(len(controls)))
    return [k + is_control for k, is_control in enumerate(controls)]


def log_range(errors: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a log axis: powers of ten around the errors.

    >>> log_range([0.003, 0.2]), log_range([0.3, 0.4]), log_range([])
    ((0.001, 1.0), (0.01, 1.0), (0.01, 1.0))
    """
    shown = [error for error in errors if error > 0] or [1.0]
    high = math.ceil(math.log10(max(shown)))
    low = min(math.floor(math.log10(min(shown))), high - FEWEST_DECADES)
    return float(f"1e{low}"), float(f"1e{high}")
