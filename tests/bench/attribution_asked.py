"""What is asked of a network at points that are read, and the margin by which TRAK goes, of a loss ℓ:

    asked         F           margin m                     −∂ℓ/∂m
    OneOutput     f           yf, of ½(f − y)² with y²=1   1 − yf
    OwnLoss       ℓ(f, y)     log p/(1 − p) of class y     1 − p

Other programs read this file in environments of their own, so it needs nothing but torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class AbstractAsked(ABC):
    """Numbers of points, made of the outputs there."""

    margin_raises: ClassVar[float]  # 1, if F grows with the margin of its point; −1, if it falls

    @abstractmethod
    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """F of every point."""

    @abstractmethod
    def targets(self, targets: Tensor) -> Tensor:
        """The targets by which margins of points that are read are formed."""

    @abstractmethod
    def margin(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The margin of every example."""

    @abstractmethod
    def pull(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The −∂ℓ/∂m of every example."""


@dataclass(frozen=True)
class OneOutput(AbstractAsked):
    """The one output, trained by a squared loss on targets of ±1."""

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
