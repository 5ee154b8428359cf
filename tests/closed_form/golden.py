"""Kernels and predictions made with an independent library (neural-tangents 0.6.5, float64); see `spec` and `stax`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkexp.closed_form import Kernels

FOLDER = Path(__file__).parents[1] / "limit" / "golden"
CASES = ("predict_fc_relu", "predict_cnn_gap")
RIDGES = ("ridge0", "ridge1")


@dataclass(frozen=True)
class Golden:
    """One problem with its answers."""

    arrays: dict[str, Tensor]

    def kernels(self, kind: str) -> Kernels:
        """`ntk` or `nngp`, at the test inputs."""
        return Kernels(self.arrays[f"{kind}_11"], self.arrays[f"{kind}_12"].mH)

    def ridge(self, name: str) -> float:
        """`ridge0` or `ridge1`."""
        return float(self.arrays["ridge"][int(name[-1])])

    @property
    def times(self) -> list[float]:
        """s = ηt/N of each t, N the number of targets."""
        scale = float(self.arrays["learning_rate"]) / self.arrays["y"].numel()
        return [scale * float(t) for t in self.arrays["t"]]


def golden(case: str) -> Golden:
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as file:
        return Golden({name: torch.as_tensor(file[name]) for name in file.files if file[name].dtype.kind == "f"})
