"""The exact moments of the loss between two snapshots of the kernel, gathered before the second one is known.

Between snapshots at times t_k < t the kernel is interpolated linearly, K(t_s) = (1 − u_s) K_k + u_s K with
u_s = (t_s − t_k)/(t − t_k). What each of the two is multiplied with follows from four sums over the steps in between,

    Σ_s η_s,   Σ_s (t_s − t_k) η_s,   Σ_s η_s ℓ′(s),   Σ_s (t_s − t_k) η_s ℓ′(s).

A step at which a snapshot is taken belongs to the interval that ends there, so that u = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.step import Step


class Weight(NamedTuple):
    """What the kernel of a snapshot is multiplied with: Σ φη for 𝒦, Σ φηℓ′ for 𝒮, φ the hat function around it."""

    size: float
    pull: Float[Tensor, "train out_"]


@dataclass(kw_only=True)
class Moments:
    """Sums over the steps since the latest snapshot, which lies `elapsed` behind."""

    pull: Float[Tensor, "train out_"]
    late_pull: Float[Tensor, "train out_"]
    size: float = 0.0
    late_size: float = 0.0
    elapsed: float = 0.0

    def add(self, step: Step) -> None:
        """Take in one step."""
        late = self.elapsed * step.step_size
        self.size += step.step_size
        self.pull += step.step_size * step.output_gradient
        self.late_size += late
        self.late_pull += late * step.output_gradient
        self.elapsed += step.step_size

    def share_out(self, span: float) -> tuple[Weight, Weight]:
        """The weights of the two snapshots, so far apart; all of it is the second one's where they coincide."""
        right = Weight(self.size, self.pull)
        if span:
            right = Weight(self.late_size / span, self.late_pull / span)
        return Weight(self.size - right.size, self.pull - right.pull), right

    def begin(self, elapsed: float) -> None:
        """Start anew, so long after a snapshot."""
        self.size, self.late_size, self.elapsed = 0.0, 0.0, elapsed
        self.pull.zero_()
        self.late_pull.zero_()

    @property
    def state(self) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        numbers = {"size": self.size, "late_size": self.late_size, "elapsed": self.elapsed}
        return numbers | {"pull": self.pull, "late_pull": self.late_pull}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the sums of a checkpoint."""
        self.size, self.late_size, self.elapsed = state["size"], state["late_size"], state["elapsed"]
        self.pull.copy_(state["pull"])
        self.late_pull.copy_(state["late_pull"])
