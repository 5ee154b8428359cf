"""The mass of contributions, Σ|Δ𝒮|, and of the kernel, η‖K‖, in each tenth of the path
time.

Path time is Σ η_s. A step that crosses the border between two tenths is divided between
these tenths in proportion. The picture also shows the net change Σ|Σᵢ Δ𝒮ᵢ|. It is
smaller because contributions of different examples cancel."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import BLACK, BLUE, GREY, NARROW, End, name_ends
from ntkexp.report.run import Run
from ntkexp.text import percent

TENTHS = np.linspace(0, 1, 11)
Array = NDArray[np.float64]
SHOWN = {
    "contribution_mass": ("parts", BLUE),
    "contribution_sum": ("net", BLACK),
    "kernel_mass": ("kernel", GREY),
}


def draw(run: Run, canvas: Canvas) -> Figure | None:
    steps = run.series("step_size", *SHOWN)
    times = steps["step_size"].to_numpy()
    if len(steps) < len(run.metrics) - 1:
        return None  # contributions were not measured at every step
    if not times.sum() > 0 or not steps["contribution_mass"].sum() > 0:
        return None
    if not np.isfinite(run.metrics["loss"]).all():
        return None  # in a diverging run, the last steps would dominate
    axes = canvas.panels((NARROW, 2.3))[0, 0]
    shares = {}
    ends = []
    for column, (name, colour) in SHOWN.items():
        if steps[column].sum() > 0:
            share = profile(times, steps[column].to_numpy())
            shares[column] = share
            axes.stairs(100 * share, TENTHS, color=colour, baseline=None, linewidth=1.2)
            ends.append(End(name, 100 * share[-1], colour))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 110 * max(share.max() for share in shares.values()))
    axes.set_xlabel("path time, as a share of the whole")
    axes.set_ylabel("share in each tenth (%)")
    name_ends(axes, ends)
    return canvas.finish(answer(shares), caption(shares))


def table(run: Run) -> pd.DataFrame:
    return run.series("step_size", *SHOWN)


def profile(length: Array, mass: Array) -> Array:
    """Return the share of the mass in each tenth of the path time.

    `length` and `mass` have an entry per step.
    """
    elapsed = np.concatenate([[0.0], np.cumsum(length)])
    gathered = np.concatenate([[0.0], np.cumsum(mass)])
    at_tenths = np.interp(TENTHS * elapsed[-1], elapsed, gathered)
    return np.asarray(np.diff(at_tenths) / gathered[-1])


def answer(shares: dict[str, Array]) -> str:
    parts = percent(shares["contribution_mass"][0])
    return f"The first tenth makes {parts} of the contributions"


def caption(shares: dict[str, Array]) -> str:
    words = "Tenths of path time Σ η_s. Parts: sum of |contributions|. Net: their sum."
    if "kernel_mass" not in shares:
        return words
    return f"{words} Kernel: η‖K‖, of which the first tenth makes {percent(shares['kernel_mass'][0])}."
