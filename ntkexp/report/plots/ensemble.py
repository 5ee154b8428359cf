"""Do trained networks follow the process of their kernel? One panel per kind of networks: faint lines are networks, the
band is the process's mean ± 2 deviations, dashes are the same of the networks, dots are what was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.plots.style import BLACK, GREY, WIDE, colour, heading

Curve = NDArray[np.float64]
LINES = 25  # networks that are drawn
PROCESSES = {"ntk": ("NTK process", "frozen_limit"), "nngp": ("NNGP process", "nngp")}


@dataclass(frozen=True)
class Panel:
    """Networks and their process are drawn along the places."""

    title: str
    process: str
    networks: NDArray[np.float64]  # [network, place]
    mean: Curve
    deviation: Curve


def draw(places: Curve, panels: Sequence[Panel], learned: tuple[Curve, Curve], axis: str, answer: str) -> Figure:
    """Draw panels side by side, on one scale."""
    figure = Figure(figsize=(WIDE, 2.9), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        band(axes, places, panel)
        axes.plot(*learned, "o", color=BLACK, markersize=4, zorder=5)
        axes.set(xlabel=axis, xlim=(places.min(), places.max()))
        axes.set_title(panel.title)
    figure.axes[0].set_ylabel("output")
    heading(figure, answer)
    return figure


def band(axes: Axes, places: Curve, panel: Panel) -> None:
    """Draw one kind of networks."""
    name, machine = PROCESSES[panel.process]
    ink = colour(machine)
    for network in panel.networks[:LINES]:
        axes.plot(places, network, color=GREY, linewidth=0.4, alpha=0.35, zorder=1)
    low, high = panel.mean - 2 * panel.deviation, panel.mean + 2 * panel.deviation
    axes.fill_between(places, low, high, color=ink, alpha=0.35, linewidth=0, zorder=2)
    axes.plot(places, panel.mean, color=ink, linewidth=1.6, zorder=3, label=f"{name}, mean ± 2 sd")
    mean, deviation = panel.networks.mean(axis=0), panel.networks.std(axis=0, ddof=1)
    for curve in (mean - 2 * deviation, mean, mean + 2 * deviation):
        label = f"{len(panel.networks)} networks, mean ± 2 sd" if curve is mean else None
        axes.plot(places, curve, color=BLACK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=4, label=label)
    axes.legend(loc="best", fontsize=6.5, handlelength=1.8)
