"""The tables of a sweep."""

from __future__ import annotations

from pathlib import Path


def write_tables(record: Path) -> None:
    """<name>.runs.csv and <name>.points.csv beside the record of a sweep."""
