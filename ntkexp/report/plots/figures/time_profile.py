"""When did the contributions come in? Their mass Σ|Δ𝒮| in each tenth of path time, beside the kernel's mass η‖K‖.

Path time is Σ η_s; a step that crosses the border between two tenths is shared out in proportion. The net change
Σ|Σᵢ Δ𝒮ᵢ| is what is left once examples have cancelled each other.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.plots.style import BLACK, BLUE, GREY, NARROW, End, heading, name_ends
from ntkexp.report.run import Run
from ntkexp.text import percent

TENTHS = np.linspace(0, 1, 11)
SHOWN = {
    "contribution_mass": ("parts", BLUE),
    "contribution_sum": ("net", BLACK),
    "kernel_mass": ("kernel", GREY),
}


def draw(run: Run) -> Figure | None:
    steps = run.series("step_size", *SHOWN)
    times = steps["step_size"].to_numpy()
    if len(steps) < len(run.metrics) - 1:
        return None  # contributions were not measured at every step
    if not times.sum() > 0 or not steps["contribution_mass"].sum() > 0:
        return None
    if not np.isfinite(run.metrics["loss"]).all():
        return None  # what a diverging run does, it does in its last steps
    shares = {
        name: profile(times, steps[name].to_numpy()) for name in SHOWN if steps[name].sum() > 0
    }
    figure = Figure(figsize=(NARROW, 2.3), layout="constrained")
    axes = figure.subplots()
    for name, share in shares.items():
        axes.stairs(100 * share, TENTHS, color=SHOWN[name][1], baseline=None, linewidth=1.2)
    axes.set(
        xlim=(0, 1), xlabel="path time, as a share of the whole", ylabel="share in each tenth (%)"
    )
    axes.set_ylim(0, 110 * max(share.max() for share in shares.values()))
    name_ends(
        axes,
        [End(SHOWN[name][0], 100 * share[-1], SHOWN[name][1]) for name, share in shares.items()],
    )
    heading(figure, answer(shares))
    return figure


def table(run: Run) -> pd.DataFrame:
    return run.series("step_size", *SHOWN)


def profile(length: NDArray[np.float64], mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find the share of the mass of steps that falls in each tenth of the time they take."""
    elapsed = np.concatenate([[0.0], np.cumsum(length)])
    gathered = np.concatenate([[0.0], np.cumsum(mass)])
    return np.asarray(np.diff(np.interp(TENTHS * elapsed[-1], elapsed, gathered)) / gathered[-1])


def answer(shares: dict[str, NDArray[np.float64]]) -> str:
    parts = percent(shares["contribution_mass"][0])
    kernel = (
        f" and {percent(shares['kernel_mass'][0])} of the kernel" if "kernel_mass" in shares else ""
    )
    return f"The first tenth of the path makes {parts} of the contributions{kernel}"
