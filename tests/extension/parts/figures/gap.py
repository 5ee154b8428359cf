"""The difference between the losses at queries and training examples."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import BLUE, NARROW
from ntkexp.report.run import Run


def draw(run: Run, canvas: Canvas) -> Figure | None:
    gap = table(run)
    canvas.panels((NARROW, 2))[0, 0].plot(gap["step"], gap["gap"], color=BLUE)
    return canvas.finish("New points lose as much as old ones")


def table(run: Run) -> pd.DataFrame:
    found = run.series("loss", "loss_query")
    return found.assign(gap=found["loss_query"] - found["loss"])
