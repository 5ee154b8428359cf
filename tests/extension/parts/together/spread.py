"""How different do the runs of a sweep end?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.style import NARROW, heading
from ntkexp.report.run import Run


def draw(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    figure = Figure(figsize=(NARROW, 2), layout="constrained")
    figure.subplots().hist(analysis.runs["loss"])
    heading(figure, "Runs end alike")
    yield "", figure, analysis.runs[["run", "loss"]]
