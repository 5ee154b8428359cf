"""Stochastic gradient descent: θ ← θ − η ∇L_B on a mini-batch B.

>>> SGD(batch=2).batch_indices(step=0, examples=4, seed=0).shape
torch.Size([2])
"""

from __future__ import annotations

from ntkexp.component import Count
from ntkexp.optimizer.batches import AbstractBatched
from ntkexp.optimizer.plain import AbstractPlain


class SGD(AbstractBatched, AbstractPlain):
    """Mini-batches of 32."""

    batch: Count | None = 32
