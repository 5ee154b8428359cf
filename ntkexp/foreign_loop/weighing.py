"""What examples weigh in a loop that is carried out again, by what comes back to the outputs of its calls.

    ∂L/∂fᵢ ← cwᵢ ∂L/∂fᵢ        c = 1 (fixed), or n/Σw over the n rows of the call (renormalised)

Where a loss is a mean of one loss for each example, this trains as the loop would without those whose weight is zero,
and the loop need not know of it. A call of which nothing is left adds nothing to the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.mean import MeanName


@dataclass(frozen=True)
class Weighing:
    """The weights of some examples, by their names; all others weigh 1.

    >>> Weighing({"a": 0.0}).factors(["a", "b", "c", "b"]).tolist()
    [0.0, 1.3333333333333333, 1.3333333333333333, 1.3333333333333333]
    >>> Weighing({"a": 0.0}, "fixed").factors(["a", "b"]).tolist()
    [0.0, 1.0]
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    mean: MeanName = "renormalised"

    def left(self, names: Sequence[str]) -> Float[Tensor, " row"]:
        """The weight of every row."""
        return torch.tensor([self.weights.get(name, 1.0) for name in names], dtype=torch.float64)

    def factors(self, names: Sequence[str]) -> Float[Tensor, " row"]:
        """What comes back to every row is multiplied with this."""
        return self.left(names) * self.shared(names)

    def shared(self, names: Sequence[str]) -> float:
        """The c of a call; 1 where nothing is left that could share anything."""
        whole = float(self.left(names).sum())
        return len(names) / whole if self.mean == "renormalised" and whole else 1.0

    def silences(self, names: Sequence[str]) -> bool:
        """Whether nothing is left of a call."""
        return not self.left(names).any()
