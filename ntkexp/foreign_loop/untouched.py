"""Whether anything else than the optimizers moved the weights.

PyTorch counts the writes to a tensor, and the count is asked at every call and before every step. It does not know of
writes to `weight.data`; these fail the proof of the step that comes, which begins at the weights that are kept here.
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
    """`weights` are those that the optimizers left, `counts` the writes to them until then. `spare` is memory that
    nobody looks at any more: to fill fresh memory takes several times as long."""

    weights: Weights = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    spare: Weights = field(default_factory=dict)

    def keep(self, name: str, weight: Tensor) -> None:
        """Keep a weight as it is now."""
        place, now = self.spare.pop(name, None), weight.detach()
        self.weights[name] = place.copy_(now) if place is not None and alike(place, now) else now.clone()
        self.counts[name] = weight._version

    def forget(self, before: Weights) -> None:
        """Nobody looks any more at weights that were kept before the latest."""
        self.spare |= {name: weight for name, weight in before.items() if weight is not self.weights[name]}

    def refuse_writes(self, step: int, members: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse weights that were written to, and are not what they were."""
        for name, weight in members:
            if name not in self.weights:
                raise Mistake(f"step {step}: '{name}' was given to the optimizer during training")
            if weight._version == self.counts[name]:
                continue
            if not torch.equal(weight.detach(), self.weights[name]):
                raise Mistake(
                    f"step {step}: '{name}' was changed by something else than the optimizer since the last step (a "
                    "clamp, an average that was copied back, a load?); what changed it is not followed"
                )
            self.counts[name] = weight._version


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor holds just what another can."""
    kinds = ((each.dtype, each.device, each.shape, each.stride()) for each in (one, other))
    return len(set(kinds)) == 1
