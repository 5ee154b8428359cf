"""checkpoint.pt: where an unfinished run stands, and the seals of all files that the rest of it relies on.

What it holds of the run is said in `run.state`, and when one is written in `run.folder_listener`.

It is sealed for its run. Nothing is made of it before its own seal and theirs have been looked at: a run goes on to the
same bytes, or begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ntkexp.model.functional import load_tensors
from ntkexp.records.folder import BEGUN, CHECKPOINT, CONFIG, OVERRIDES, RunFolder
from ntkexp.records.seal import Damaged, Seals, being_sealed, broken, sealed_for
from ntkexp.run.kept_sums import drop_sums, found_sums, keep_sums
from ntkexp.text import several

TRAJECTORY, METRICS = "trajectory.bin", "metrics.csv"

BEGINNING = (CONFIG, OVERRIDES, "data.npz")
"""What is written before the first step."""

Checkpoint: TypeAlias = Mapping[str, Any]
"""A state in plain tensors and numbers, with the seals."""


def save(folder: RunFolder, state: Checkpoint, step: int, of: str) -> None:
    """Keep a state after so many steps; `seals` is part of it."""
    run, sums = keep_sums(folder.path, step, state["run"])
    with being_sealed(folder.path / CHECKPOINT, of) as file:
        torch.save({**state, "run": run, "sums": sums}, file)
    drop_sums(folder.path, sums)


def load(folder: RunFolder, of: str) -> Checkpoint | None:
    """The state that was kept, if one was, with the folder taken back to it; or `Damaged`."""
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None
    refuse(folder, folder.broken(*BEGINNING) if sealed_for(path, of) else [CHECKPOINT])
    state: Checkpoint = load_tensors(path, mmap=True)
    refuse(folder, [CHECKPOINT] if {"run", "threads", "snapshots", "seals", "sums"} - state.keys() else [])
    seals: Seals = {**state["seals"], **state["sums"]}
    cut(folder, seals[METRICS][0])
    refuse(folder, broken(folder.path, seals))
    folder.forget([CHECKPOINT, TRAJECTORY, BEGUN, *BEGINNING, *seals])
    return {**state, "run": found_sums(folder.path, state["run"])}


def refuse(folder: RunFolder, wrong: list[str]) -> None:
    """Refuse a folder whose files are not as they were written."""
    if wrong:
        raise Damaged(f"{folder.path} is damaged: {several(wrong)} not as it was written")


def cut(folder: RunFolder, size: int) -> None:
    """Forget the lines of metrics.csv that are behind this position: they are written again."""
    path = folder.path / METRICS
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
