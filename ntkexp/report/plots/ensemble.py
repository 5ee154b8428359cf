"""Which process do trained networks follow? One panel per kind of networks: faint lines are networks, the band is the
mean ± 2 deviations of their own process and thin lines are those of the other, dashes are the same of the networks,
dots are what was learned.
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
class Theory:
    """A process has this mean and this deviation along the places."""

    process: str
    mean: Curve
    deviation: Curve

    @property
    def curves(self) -> tuple[Curve, Curve, Curve]:
        """The mean, and two deviations below and above it."""
        return self.mean, self.mean - 2 * self.deviation, self.mean + 2 * self.deviation


@dataclass(frozen=True)
class Panel:
    """Networks, their process and the others are drawn along the places."""

    title: str
    networks: NDArray[np.float64]  # [network, place]
    own: Theory
    others: Sequence[Theory]


def draw(places: Curve, panels: Sequence[Panel], learned: tuple[Curve, Curve], axis: str, answer: str) -> Figure:
    """Draw panels side by side, on one scale."""
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        band(axes, places, panel)
        axes.plot(*learned, "o", color=BLACK, markersize=4, zorder=5)
        axes.set(xlabel=axis, xlim=(places.min(), places.max()))
        axes.set_title(panel.title)
    figure.axes[0].set_ylabel("output")
    first, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(first, labels, loc="outside lower center", ncols=len(labels), fontsize=6.5, handlelength=1.8)
    heading(figure, answer)
    return figure


def band(axes: Axes, places: Curve, panel: Panel) -> None:
    """Draw one kind of networks."""
    for network in panel.networks[:LINES]:
        axes.plot(places, network, color=GREY, linewidth=0.4, alpha=0.35, zorder=1)
    name, machine = PROCESSES[panel.own.process]
    mean, low, high = panel.own.curves
    axes.fill_between(places, low, high, color=colour(machine), alpha=0.35, linewidth=0, zorder=2)
    axes.plot(places, mean, color=colour(machine), linewidth=1.6, zorder=3, label=f"{name}, mean ± 2 sd")
    for other in panel.others:
        name, machine = PROCESSES[other.process]
        lines(axes, places, other.curves, f"{name}, mean ± 2 sd", color=colour(machine), linewidth=0.9, zorder=3.5)
    mean, deviation = panel.networks.mean(axis=0), panel.networks.std(axis=0, ddof=1)
    label, dashed = f"{len(panel.networks)} networks, mean ± 2 sd", (0, (4, 2))
    curves = (mean, mean - 2 * deviation, mean + 2 * deviation)
    lines(axes, places, curves, label, color=BLACK, linewidth=0.8, linestyle=dashed, zorder=4)


def lines(axes: Axes, places: Curve, curves: Sequence[Curve], label: str, **style: object) -> None:
    """Draw curves alike, with one label."""
    for curve in curves:
        axes.plot(places, curve, label=label if curve is curves[0] else None, **style)  # type: ignore[arg-type]
