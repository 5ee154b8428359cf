"""The tables of a sweep, written beside its file as soon as there is a run to put into them."""

from __future__ import annotations

from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.sweep import read_sweep
from ntkexp.report.analysis.tables import analyse, save
from ntkexp.report.run import load_tables


def write_tables(path: Path) -> tuple[Path, ...]:
    """Read `<name>.json` and its runs, and write the tables beside it; the files written."""
    sweep, runs = read_sweep(path), {}
    for place in sweep.places:
        try:
            runs[place.folder] = load_tables(place.folder)
        except Mistake:
            continue  # the run's own row says what became of it
    return save(analyse(sweep, runs), path.parent)
