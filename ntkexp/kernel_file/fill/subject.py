"""What a kernel file is of: the points, and the kernel between them.

identity = sha256(canonical JSON of the description, the sha256 of the points' numbers among it)

Two commands that would fill a file with the same numbers share it; a file is refused for any other subject.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.data.base import Data, Split
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import digest, files_of
from ntkexp.loss.squared import Squared
from ntkexp.records.version import results_version


@dataclass(frozen=True)
class Subject:
    """Points in the order train, probe, test, and `kernel`, which tells in words of JSON what is between them."""

    experiment: Experiment
    data: Data
    kernel: dict[str, Any]
    outputs: int  # of the kernel

    @property
    def splits(self) -> dict[str, Split]:
        """The splits of the data by name."""
        return {name: getattr(self.data, name) for name in ("train", "probe", "test")}

    @cached_property
    def inputs(self) -> Float[Tensor, "point *shape"]:
        """The inputs of all points."""
        whole = torch.cat([split.inputs for split in self.splits.values()])
        return whole.to(self.experiment.device, getattr(torch, self.experiment.dtype))

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        """What the squared loss compares, whatever the network's loss is: classes as ±1, or one-hot and centred."""
        target, classes = torch.cat([split.target for split in self.splits.values()]), len(self.data.classes)
        if self.outputs == classes == 2:  # a network with two outputs for two classes
            return torch.nn.functional.one_hot(target, classes).double() - 1 / classes
        return Squared().targets(target, classes)

    @property
    def labels(self) -> Int[Tensor, " point"]:
        """The class of each point, −1 in a regression."""
        if not self.data.classes:
            return torch.full((len(self.inputs),), -1)
        return torch.cat([split.target for split in self.splits.values()])

    @property
    def index(self) -> Int[Tensor, " point"]:
        """Which example of the source each point is."""
        return torch.cat([split.index for split in self.splits.values()])

    @cached_property
    def data_digest(self) -> str:
        """The digest of all numbers that make the points."""
        found = sha256()
        for split in self.splits.values():
            for part in (split.inputs, split.target):
                found.update(f"{list(part.shape)}".encode())
                found.update(np.ascontiguousarray(part.numpy()).tobytes())
        return found.hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """Everything that decides a number in the file; the code of networks from elsewhere, where they are."""
        code = [digest(file) for file in files_of((self.experiment.model, self.experiment.init))]
        return {
            **({"code": code} if code else {}),
            "kernel": self.kernel,
            "data": self.experiment.data.option,
            "data_sha256": self.data_digest,
            "dtype": self.experiment.dtype,
            "results_version": results_version,
        }

    @property
    def identity(self) -> str:
        """The digest of the description, 64 hexadecimal digits."""
        return sha256(json.dumps(self.description, sort_keys=True, allow_nan=False).encode()).hexdigest()
