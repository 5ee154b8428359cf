"""Whole commands, as a user waits for them: a small run, a finished sweep asked for again, reports of many runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial

from tests.bench.cell import Cell, Machine, medians
from tests.bench.peers import Race

TITLE = "Whole commands, the start of Python and the import of torch included"
TINY = ("model.width=8", "data.train=16", "data.probe=4", "data.test=4", "steps=2", "data.seed=0", "--quiet")


def cells(_: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for every command; the runs of reports are as small as runs can be."""
    few, many, times = (2, 3, 1) if quick else (30, 200, 5)
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "train steps=20 model.width=32": ["train", "steps=20", "model.width=32", "--quiet", "--force"],
            f"sweep of {few} finished runs": ["sweep", f"seed=0..{few - 1}", *TINY, f"--out={folder}/few"],
            f"report of {few} runs": ["report", f"{folder}/few/runs", f"--out={folder}/few-report"],
            f"report of {many} runs": ["report", f"{folder}/many/runs", f"--out={folder}/many-report"],
        }
        call(["sweep", f"seed=0..{many - 1}", *TINY, f"--out={folder}/many"], folder)
        found = medians({name: partial(call, given, folder) for name, given in words.items()}, times)
    return [Cell(name, found[name]) for name in words]


def call(words: list[str], folder: str) -> None:
    """Run a command to its end."""
    subprocess.run([sys.executable, "-m", "ntkexp", *words], cwd=folder, check=True, capture_output=True)
