"""What Adam remembered at every step of a loop, found by walking it forwards: m, v, and the largest v with AMSGrad.

A row for each step lies in a file without a name, which is gone when nobody looks at it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights
from ntkexp.effects.trajectory import Denominator
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.mistake import NoPlace

PARTS = ("mean", "latest", "largest")


@dataclass(frozen=True)
class Remembered:
    """The rows [step, part, weight], and how often each parameter had moved after each step."""

    rows: NDArray[Any]
    moved: list[dict[str, int]]
    flat: FlatWeights
    device: torch.device

    def denominator(self, step: FollowedStep, name: str) -> Denominator | None:
        """What the step of a parameter was divided by, if it was Adam's."""
        settings, place = step.settings[name], self.flat.places[name]
        if "betas" not in settings:
            return None
        second, largest = float(settings["betas"][1]), bool(settings["amsgrad"])
        now, before = self.row(step.index, place), self.row(step.index - 1, place)
        return Denominator(
            second=second,
            root=sqrt(1 - second ** self.moved[step.index][name]),
            eps=float(settings["eps"]),
            mean=now[0],
            latest=now[1],
            latest_before=before[1],
            largest=now[2] if largest else None,
            largest_before=before[2] if largest else None,
        )

    def row(self, index: int, place: slice) -> Tensor:
        """What was remembered after a step: nothing before the first."""
        if index < 0:
            return torch.zeros_like(self.row(0, place))
        return torch.from_numpy(np.array(self.rows[index, :, place])).to(self.device)


def remembered(steps: AbstractSteps, flat: FlatWeights) -> Remembered | None:
    """Walk forwards and remember, if any optimizer was an Adam."""
    memory: dict[str, Tensor] = {}
    times: dict[str, int] = dict.fromkeys(flat.shapes, 0)
    rows: NDArray[Any] | None = None
    moved = []
    for step, _ in steps.forwards():
        for name in step.heard:
            times[name] += 1
            if "betas" in step.settings[name]:
                memory[name] = after(step, name, memory.get(name))
        moved.append(dict(times))
        if memory and rows is None:
            rows = room(len(steps), flat, next(iter(memory.values())))
        if rows is not None:
            for name, part in memory.items():
                rows[step.index, :, flat.places[name]] = part.cpu().numpy()
    return None if rows is None else Remembered(rows, moved, flat, next(iter(steps.end.values())).device)


def after(step: FollowedStep, name: str, before: Tensor | None) -> Tensor:
    """The parts of a parameter after a step, [part, weight]."""
    p = step.linear[name].pulled(step.gradient[name], step.start[name]).reshape(-1)
    mean, latest, largest = p.new_zeros(3, len(p)) if before is None else before
    first, second = step.settings[name]["betas"]
    latest = second * latest + (1 - second) * p * p
    return torch.stack([first * mean + (1 - first) * p, latest, torch.maximum(largest, latest)])


def room(steps: int, flat: FlatWeights, like: Tensor) -> NDArray[Any]:
    """An empty file of rows."""
    folder, kind = Path(gettempdir()), like.cpu().numpy().dtype
    needed, free = steps * len(PARTS) * flat.size * kind.itemsize, disk_usage(folder).free
    if free < needed:
        raise NoPlace(
            f"what Adam remembered takes {needed / 1e9:.2g} GB and {folder} has {free / 1e9:.2g} GB free; set TMPDIR "
            "to another place"
        )
    with TemporaryFile(dir=folder) as file:
        return np.memmap(file, kind, "w+", shape=(steps, len(PARTS), flat.size))
