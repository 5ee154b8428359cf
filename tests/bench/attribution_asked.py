"""The quantity F at the read points, and the margin of TRAK for a loss ℓ:

    asked         F           margin m                     −∂ℓ/∂m
    OneOutput     f           yf, of ½(f − y)² with y²=1   1 − yf
    OwnLoss       ℓ(f, y)     log p/(1 − p) of class y     1 − p

Other programs import this file in their environments, so it imports only torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class AbstractAsked(ABC):
    """A number F for each point, computed from the outputs there."""

    margin_raises: ClassVar[float]  # 1 if F increases with the margin, −1 if it decreases

    @abstractmethod
    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return F of every point."""

    @abstractmethod
    def targets(self, targets: Tensor) -> Tensor:
        """Return the targets of the margins of read points."""

    @abstractmethod
    def margin(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the margin of every example."""

    @abstractmethod
    def pull(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return −∂ℓ/∂m of every example."""


@dataclass(frozen=True)
class OneOutput(AbstractAsked):
    """A single output, trained by a squared loss on targets ±1."""

    margin_raises: ClassVar[float] = 1.0

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]

    def targets(self, targets: Tensor) -> Tensor:
        return torch.ones_like(targets)

    def margin(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets)[:, 0]

    def pull(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 1 - self.margin(outputs, targets)


@dataclass(frozen=True)
class OwnLoss(AbstractAsked):
    """The cross-entropy of several outputs; targets are 1 for the class, 0 for others."""

    margin_raises: ClassVar[float] = -1.0

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(targets * outputs.log_softmax(1)).sum(1)

    def targets(self, targets: Tensor) -> Tensor:
        return targets

    def margin(self, outputs: Tensor, targets: Tensor) -> Tensor:
        others = outputs.masked_fill(targets > 0, -torch.inf)
        return (outputs * targets).sum(1) - others.logsumexp(1)

    def pull(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 1 - (targets * outputs.softmax(1)).sum(1)
