"""How much does the kernel change while the network learns?

Draw the loss, and the relative changes of weights and kernel over the steps s: ‖θ_s −
θ_0‖/‖θ_0‖ and ‖K_s − K_0‖/‖K_0‖."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import (
    BLACK,
    BLUE,
    GREY,
    NARROW,
    ORANGE,
    End,
    log_axis,
    name_ends,
    step_axis,
)
from ntkexp.report.run import Run
from ntkexp.text import percent, short

FEW = 40  # lines with at most this many points have markers


def draw(run: Run, canvas: Canvas) -> Figure | None:
    loss = run.series("loss")
    if len(loss) < 2:
        return None
    above, below = canvas.panels((NARROW, 3.3), 2, 1, sharex=True)[:, 0]
    losses = lines(
        above, run, {"loss": ("train", BLACK), "loss_query": ("query", GREY)}
    )
    above.set(ylabel="loss")
    if (loss["loss"] > 0).all():
        log_axis(above, "y")
    name_ends(above, losses)
    changes = lines(
        below,
        run,
        {"weights_moved": ("weights", ORANGE), "kernel_change": ("kernel", BLUE)},
    )
    below.set(ylabel="relative change", ylim=(0, None))
    name_ends(below, changes)
    step_axis(below, run.last_step)
    return canvas.finish(answer(run), caption(run))


def table(run: Run) -> pd.DataFrame:
    return run.metrics.reindex(
        columns=["step", "loss", "loss_query", "weights_moved", "kernel_change"]
    )


def lines(axes: Axes, run: Run, columns: dict[str, tuple[str, str]]) -> list[End]:
    """Draw lines over the steps, with markers if there are few points.

    Return the labels for the ends of the lines.
    """
    ends = []
    for column, (name, colour) in columns.items():
        series = run.series(column)
        if len(series):
            style = ".-" if len(series) <= FEW else "-"
            axes.plot(series["step"], series[column], style, color=colour)
            ends.append(End(name, float(series[column].iloc[-1]), colour))
    return ends


def answer(run: Run) -> str:
    broken = run.metrics.loc[~np.isfinite(run.metrics["loss"]), "step"]
    if len(broken):
        return (
            f"Training diverges: the loss is not a number at step {int(broken.iloc[0])}"
        )
    first, last = run.metrics["loss"].iloc[[0, -1]]
    fall = change(float(first), float(last))
    changes = run.series("kernel_change")
    if "phase" in run.metrics:
        if not len(changes):
            return "The loss of one task after another"
        return f"The kernel changes by {percent(changes['kernel_change'].iloc[-1])}"
    if not len(changes):
        return f"The loss {fall}"
    return f"The kernel changes by {percent(changes['kernel_change'].iloc[-1])}; the loss {fall}"


def caption(run: Run) -> str:
    """Name the quantities. If the kernel change is not known at the last step of the
    run, also name the last step where it is known."""
    words = "Relative changes ‖θ_s − θ_0‖/‖θ_0‖ of the weights and ‖K_s − K_0‖/‖K_0‖ of the kernel."
    if "phase" in run.metrics:
        words += " The loss is that of one task after another."
    changes = run.series("kernel_change")
    if len(changes) and changes["step"].iloc[-1] != run.last_step:
        words += f" The kernel is last a number at step {changes['step'].iloc[-1]}."
    return words


def change(first: float, last: float) -> str:
    """Describe how a positive number changed.

    >>> change(2.0, 0.02), change(1.0, 0.9), change(1.0, 3.0)
    ('falls 100-fold', 'falls by 10 %', 'rises 3-fold')
    """
    verb = "falls" if last <= first else "rises"
    low, high = sorted((first, last))
    if high == 0:
        return "stays at zero"
    if last == 0:
        return "falls to zero"
    if first == 0:
        return "rises from zero"
    if high >= 2 * low:
        return f"{verb} {short(high / low)}-fold"
    return f"{verb} by {percent(abs(last - first) / first)}"
