"""How far apart are the two losses?"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.plots.style import BLUE, NARROW, heading
from ntkexp.report.run import Run


def draw(run: Run) -> Figure | None:
    gap = table(run)
    figure = Figure(figsize=(NARROW, 2), layout="constrained")
    figure.subplots().plot(gap["step"], gap["gap"], color=BLUE)
    heading(figure, "New points lose as much as old ones")
    return figure


def table(run: Run) -> pd.DataFrame:
    found = run.series("loss", "loss_query")
    return found.assign(gap=found["loss_query"] - found["loss"])
