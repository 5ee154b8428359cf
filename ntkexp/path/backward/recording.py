"""What a way back needs of a path: the weights at every step, ℓ′, and the recorded part of the optimizer's memory.

Row s of the trajectory is [θ_s, memory after step s, ℓ′(s)], the weights parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.base import Memory
from ntkexp.path.step import Step
from ntkexp.records.trajectory import Trajectory
from ntkexp.shapes import Weights


class Recorded(NamedTuple):
    """A row: θ_s, the memory after the step, and ℓ′(s)."""

    weights: Weights
    memory: Memory
    output_gradient: Float[Tensor, "train out"]


def row_length(weights: Weights, records: tuple[str, ...], pull: Float[Tensor, "train out"]) -> int:
    """How many numbers a row has."""
    return (1 + len(records)) * sum(weight.numel() for weight in weights.values()) + pull.numel()


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps as rows; `like` gives names and shapes of weights, `pull` the shape of ℓ′."""

    rows: Trajectory
    like: Weights
    records: tuple[str, ...]
    pull: Float[Tensor, "train out"]

    def write(self, step: Step) -> None:
        """Keep a step."""
        groups = [step.view.weights, *(step.memory[part] for part in self.records)]
        self.put(step.index, [group[name] for group in groups for name in self.like] + [step.output_gradient])

    def close(self, steps: int, end: Weights) -> None:
        """Keep the weights after so many steps; there is no step after them."""
        self.put(steps, [end[name] for name in self.like])

    def put(self, row: int, tensors: list[Tensor]) -> None:
        """Write tensors one after another, and zeros behind the last."""
        numbers = [tensor.detach().cpu().reshape(-1).numpy() for tensor in tensors]
        missing = self.rows.size - sum(map(len, numbers))
        self.rows.write(row, np.concatenate([*numbers, np.zeros(missing, self.rows.kind)]))

    def read(self, step: int) -> Recorded:
        """What was kept of a step."""
        row = torch.from_numpy(self.rows.read(step))
        groups = list(self.groups(row))
        pull = row[len(row) - self.pull.numel() :].clone().view(self.pull.shape).to(self.pull.device)
        return Recorded(groups[0], dict(zip(self.records, groups[1:], strict=True)), pull)

    def groups(self, row: Tensor) -> Iterator[Weights]:
        """The named tensors of a row: the weights, and each part of the memory."""
        at = 0
        for _ in range(1 + len(self.records)):
            group = {}
            for name, weight in self.like.items():
                numbers = row[at : at + weight.numel()].clone()  # of its own storage, as a parameter has one
                group[name] = numbers.view(weight.shape).to(weight.device)
                at += weight.numel()
            yield group
