"""All pictures of a sweep, each with the numbers that it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.chapter import files
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots import together
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run


@dataclass(frozen=True)
class Picture:
    """A figure is called so, and these are the numbers in it."""

    name: str
    figure: Figure
    table: pd.DataFrame


def exhibition(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[Picture]:
    """Draw what the files in `together` make of it, those with laws first."""
    with house_style():
        for name in sorted(files(together), key=lambda name: name != "laws"):
            for suffix, figure, table in import_module(f"{together.__name__}.{name}").draw(analysis, runs):
                yield Picture(f"{name}{suffix}", figure, table)
