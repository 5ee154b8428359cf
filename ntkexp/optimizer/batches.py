"""Mini-batches: which training examples a step is taken on, a function of (seed, step) alone, so that a run that is
resumed draws the same ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from ntkexp.component import Count
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.stream import stream


class AbstractBatched(AbstractOptimizer):
    """Mini-batches, or all examples if `batch` is null.

    Without replacement, each epoch passes over a new permutation and its last batch may be short.
    """

    batch: Count | None = None
    replacement: bool = False

    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        if self.batch is None:
            return None
        if self.replacement:
            return torch.randint(examples, (self.batch,), generator=stream("batches", seed, step))
        epoch, turn = divmod(step, -(-examples // self.batch))
        order = torch.randperm(examples, generator=stream("batches", seed, epoch))
        return order[turn * self.batch : (turn + 1) * self.batch]
