"""Gradient descent on one example after another, without memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkexp.optimizer import AbstractPlain


class InTurn(AbstractPlain):
    """The step s is taken on example s mod M."""

    def batch_indices(self, step: int, examples: int, seed: int) -> Tensor | None:
        return torch.tensor([step % examples])
