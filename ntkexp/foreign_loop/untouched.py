"""Whether anything else than the optimizers moved the weights.

PyTorch counts the writes to a tensor, and the count is asked at every call. It does not know of writes to
`weight.data`, so once a step the sum of the numbers is held against what it was. A change that leaves the sum fails the
proof of the step that comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights


@dataclass
class Untouched:
    """`weights` are as the optimizers left them, with `counts` of the writes until then, and `sums` of elements."""

    weights: Weights = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    def keep(self, name: str, weight: Tensor) -> None:
        """Keep a weight as it is now."""
        self.weights[name] = weight.detach().clone()
        self.counts[name] = weight._version
        self.sums[name] = float(weight.detach().sum())

    def refuse_writes(self, step: int, members: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse weights that were written to, and are not what they were."""
        self.refuse_changes(step, [(name, weight) for name, weight in members if self.is_written(name, weight)])

    def is_written(self, name: str, weight: Tensor) -> bool:
        """Whether PyTorch has counted a write to it."""
        return self.counts.get(name) != weight._version

    def refuse_changes(self, step: int, members: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse weights that are not what the optimizers left."""
        for name, weight in members:
            if name not in self.weights:
                raise Mistake(f"step {step}: '{name}' was given to the optimizer during training")
            if float(weight.detach().sum()) != self.sums[name] and not torch.equal(weight.detach(), self.weights[name]):
                raise Mistake(
                    f"step {step}: '{name}' was changed by something else than the optimizer since the last step (a "
                    "clamp, an average that was copied back, a load?); what changed it is not followed"
                )
            self.counts[name] = weight._version
