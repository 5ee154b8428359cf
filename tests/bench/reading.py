"""What it costs to read the path, and how near the sum then is to the network: rules at every step, and snapshots.

All read the same training run, of a smooth network at half of its largest stable step; the seconds of training itself
are taken off.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ntkexp.config.compose import compose
from ntkexp.path.points import NetworkView
from ntkexp.records.data import Trajectory
from ntkexp.report.plots.style import GREY, NARROW, colour, heading, house_style
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState, begin
from tests.bench.cell import Table, seconds

SHARED = ("model.activation=tanh", "path.error_samples=0", "path.probes=[probe]")
QUICK = ("model.width=16", "data.train=16", "data.probe=8", "data.test=8", "steps=20")
LONG = ("model.width=256", "data.train=64", "data.probe=64", "data.test=8", "steps=500")
READINGS = {
    "left": ("path.rule=[left]",),
    "gauss, 1 node": ("path.rule=[gauss]", "path.nodes=1"),
    "gauss, 2 nodes": ("path.rule=[gauss]", "path.nodes=2"),
    "secant": ("path.rule=[secant]",),
    **{f"secant, {n} snapshots": ("path.rule=[secant]", "path.every=snapshots", f"path.count={n}") for n in (4, 8, 16)},
}


@dataclass(frozen=True)
class Cost:
    """One way to read the path."""

    name: str
    seconds: float
    error: float


def report(*, quick: bool, plot: Path | None = None) -> list[Table]:
    """A row for each way."""
    found = costs((*SHARED, *(QUICK if quick else LONG)))
    if plot is not None:
        draw(found, plot)
    rows = [[cost.name, f"{cost.seconds:.3g}", f"{cost.error:.1e}"] for cost in found]
    return [Table("Reading the path of a training run", ("kernel", "seconds", "error"), rows)]


def costs(chosen: tuple[str, ...]) -> list[Cost]:
    """Each way in turn, after training alone, once to warm up and once to be measured."""
    settings = {name: prepare(compose([*chosen, *reading])) for name, reading in READINGS.items()}
    bare = next(iter(settings.values()))
    alone = min(seconds(lambda: list(bare.descent.walk(bare.problem.weights))) for _ in range(2))
    return [cost(name, setting, alone) for name, setting in settings.items()]


def cost(name: str, setting: Setting, alone: float) -> Cost:
    """A run, beside the same without its kernels."""
    state = begin(setting, no_trajectory)
    taken = seconds(lambda: follow(state))
    (integrals,) = state.accumulator.integrals.values()
    change = NetworkView(setting.points, state.weights).outputs - setting.start.outputs
    expected = change[setting.domain.attributed]
    missed = integrals.contributions[setting.domain.rows].sum(2) - expected
    return Cost(name, max(taken - alone, 0.0), float(missed.norm() / expected.norm()))


def follow(state: RunState) -> None:
    """All steps."""
    for step in state.setting.descent.walk(state.weights):
        state.advance(step, due=state.timetable.due(step.index))


def no_trajectory(rows: int, size: int) -> Trajectory:
    """None of these ways goes back."""
    raise NotImplementedError


def draw(found: list[Cost], path: Path) -> None:
    """Error against cost."""
    with house_style(), torch.no_grad():
        figure = Figure(figsize=(NARROW, 2.6), layout="constrained")
        axes = figure.subplots()
        for each in found:
            rule = each.name.partition(",")[0]
            marker = "s" if "snapshots" in each.name else "o"
            axes.plot(each.seconds, each.error, marker, color=colour(rule), markersize=4)
            axes.annotate(each.name, (each.seconds, each.error), xytext=(4, 3), textcoords="offset points", fontsize=6,
                          color=GREY)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="seconds on top of training", ylabel="relative error")
        axes.margins(x=0.3)
        heading(figure, "Snapshots cost little, secants err by nothing")
        figure.savefig(path)
