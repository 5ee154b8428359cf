"""What the sum backwards needs of a run: the weights at every step, and the recorded part of the optimizer's memory.

Row s of the trajectory is [θ_s, memory after step s], parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ntkexp.optimizer.base import Memory
from ntkexp.records.trajectory import Trajectory
from ntkexp.shapes import Weights


def length(weights: Weights, records: tuple[str, ...]) -> int:
    """How many numbers a row has."""
    return (1 + len(records)) * sum(weight.numel() for weight in weights.values())


@dataclass(frozen=True)
class Recording:
    """Weights and memories as rows; `like` gives names and shapes."""

    rows: Trajectory
    like: Weights
    records: tuple[str, ...]

    def write(self, step: int, weights: Weights, memory: Memory) -> None:
        """θ_s, and what the optimizer remembers after the step."""
        groups = [weights, *(memory[part] for part in self.records if part in memory)]
        numbers = [group[name].detach().cpu().reshape(-1).numpy() for group in groups for name in self.like]
        missing = self.rows.size - sum(map(len, numbers))  # the last row has no step after it
        self.rows.write(step, np.concatenate([*numbers, np.zeros(missing, self.rows.kind)]))

    def read(self, step: int) -> tuple[Weights, Memory]:
        """θ_s, and what was recorded of the memory after the step."""
        parts = self.cut(torch.from_numpy(self.rows.read(step)))
        return next(parts), dict(zip(self.records, parts, strict=True))

    def cut(self, row: Tensor) -> Iterator[Weights]:
        """A row, as groups of named tensors."""
        at = 0
        for _ in range(1 + len(self.records)):
            group = {}
            for name, weight in self.like.items():
                numbers = row[at : at + weight.numel()].clone()  # of its own storage, as a parameter has one
                group[name] = numbers.view(weight.shape).to(weight.device)
                at += weight.numel()
            yield group
