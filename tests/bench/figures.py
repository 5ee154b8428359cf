"""Figures that were kept under a name, as times of a plain product of matrices in the run that measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.stopwatch import table

FILE = Path(__file__).with_name("figures.json")
HEADER = ("cell", "tagged", "now", "ratio")


def kept() -> dict[str, Any]:
    """By number of threads, the name and the figures."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    return found


def keep(cells: Sequence[Mapping[str, Any]], threads: int, name: str) -> None:
    """Keep the figures of these cells beside those of others."""
    known = kept()
    before = known.get(str(threads), {}).get("products", {})
    now = {cell["name"]: float(f"{cell['products']:.4g}") for cell in cells}
    known[str(threads)] = {"tag": name, "products": before | now}
    FILE.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def compared(cells: Sequence[Mapping[str, Any]], threads: int) -> str:
    """A row for each cell of which there is an older figure, in products of matrices."""
    tagged = kept().get(str(threads))
    if tagged is None:
        return f"No figures of {threads} threads are tagged\n"
    rows = [
        [cell["name"], f"{before:.3g}", f"{cell['products']:.3g}", f"{cell['products'] / before:.2f}"]
        for cell in cells
        if (before := tagged["products"].get(cell["name"]))
    ]
    if not rows:
        return f"None of these cells is among the figures tagged {tagged['tag']}\n"
    return table(f"In products of matrices, beside the figures tagged {tagged['tag']}", HEADER, rows)
