"""docs/guide.md explains every column of metrics.csv, and every explained column exists."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import ntkexp
from ntkexp.report.run import read_metrics
from tests.docs.readme import ROOT
from tests.run.small import execute_in, small

GUIDE = ROOT / "docs" / "guide.md"
ROW = re.compile(r"\| (`[^|]*`) \| (?:[^|\\]|\\\|)+ \|(?: ([^|]+) \|)?")
NAMES = {"PARAMETER": r"[\w.]+", "NAME": r"[\w.]+", "K": r"\d+"}
"""The placeholders in names of the table, and their patterns."""
DIAGNOSTICS = "diagnostics=[taylor,sharpness,kernel_velocity]"
RUNS = {
    "one task": (DIAGNOSTICS,),
    "regression": ("data=teacher",),
    "traces": ("path.kernels=trace",),
    "memory and clipping": ("optimizer=momentum", "optimizer.clip_norm=0.1"),
    "snapshots": ("path.every=snapshots",),
    "no kernels": ("path.kernels=none", DIAGNOSTICS.replace(",kernel_velocity", "")),
    "tasks": ("data=sequence",),
}
SHORT = ("steps=5", "path.count=3", "model.width=6", "data.train=8", "data.query=4", "data.test=4", "ladder.machine=[]")


def explained(head: str) -> dict[str, str]:
    """Return the columns of the table with this head, as regular expressions, and when they are filled."""
    lines = GUIDE.read_text(encoding="utf-8").partition(f"| {head} |")[2].partition("\n\n")[0]
    return {
        re.sub("|".join(NAMES), lambda part: NAMES[part[0]], re.escape(name)): filled
        for names, filled in ROW.findall(lines)
        for name in re.findall("`([^`]+)`", names)
    }


def unexplained(table: dict[str, str], metrics: pd.DataFrame) -> list[str]:
    return [column for column in map(str, metrics) if not any(re.fullmatch(name, column) for name in table)]


def test_the_guide_explains_every_column_of_a_run(tmp_path: Path) -> None:
    """No column is missing in the table or invented, and cells are filled when the table says so."""
    table = explained("column")
    columns = set[str]()
    for case, words in RUNS.items():
        found = read_metrics(execute_in(tmp_path, small(*SHORT, *words), words) / "metrics.csv")
        assert unexplained(table, found) == [], case
        columns |= set(map(str, found))
        for name, filled in table.items():
            cells = found.filter(regex=f"^{name}$")
            assert was_filled_as_told(cells, filled, found), (case, name)
        assert found["kernel_mass"].notna().any() == (case not in {"traces", "no kernels"}), case
    assert [name for name in table if not any(re.fullmatch(name, column) for column in columns)] == []


def was_filled_as_told(cells: pd.DataFrame, filled: str, metrics: pd.DataFrame) -> bool:
    has_kernel = metrics["trace"].notna()
    if filled == "always":
        return bool(cells.notna().all(axis=None))
    if filled.startswith("kernel, below"):
        return bool(cells[~has_kernel].isna().all(axis=None))
    return "except in the last row" not in filled or bool(cells.iloc[-1:].isna().all(axis=None))


def test_the_guide_explains_every_column_of_a_followed_loop(tmp_path: Path) -> None:
    """Autocast adds a column."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=x[:2], to=tmp_path / "run", quiet=True) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(x)
            outputs.float().square().mean().backward()
            optimizer.step()
    trace.attribute(quiet=True)
    found = read_metrics(tmp_path / "run" / "metrics.csv")
    table = explained("column of a followed loop")
    assert unexplained(table, found) == []
    assert len(table) == len(found.columns)
    assert found.notna().all(axis=None)
