"""The final losses of the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import NARROW
from ntkexp.report.run import Run


def pictures(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[SweepPicture]:
    yield SweepPicture("", analysis.runs[["run", "loss"]], partial(draw_losses, analysis))


def draw_losses(analysis: Analysis, canvas: Canvas) -> Figure:
    canvas.panels((NARROW, 2))[0, 0].hist(analysis.runs["loss"])
    return canvas.finish("Runs end alike")
