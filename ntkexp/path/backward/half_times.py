"""When each example acted on each point, where that is known step by step: the time by which half of it was done.

    m_i(r) = |contribution of example i at step r|,        Σ_{r before h} m_i(r) = ½ Σ_r m_i(r)

A gradient that is remembered acts at the step it is taken, by all that the steps after it make of it; no kernel of a
moment knows of that. The masses are kept for at most `STRETCHES` stretches of the path, and spread evenly inside them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

STRETCHES = 20


@dataclass(frozen=True)
class Halves:
    """Masses by stretch; `edges` are the steps at which stretches begin, and the one after the last."""

    edges: tuple[int, ...]
    mass: Float[Tensor, "stretch probe out train"]

    def add(self, step: int, place: slice, parts: Float[Tensor, "chosen out train"]) -> None:
        """Take in what a step contributed at some of the points."""
        self.mass[bisect_right(self.edges, step) - 1, place] += parts.abs()

    def add_rows(self, step: int, rows: Int[Tensor, " row"], parts: Float[Tensor, "probe out row"]) -> None:
        """Take in what the rows of a step contributed to all points, each of the example that is named for it.

        >>> halves = Halves((0, 1), torch.zeros(1, 1, 1, 2))
        >>> halves.add_rows(0, torch.tensor([1, 1]), torch.tensor([[[3.0, -1.0]]]))
        >>> halves.mass.flatten().tolist()
        [0.0, 2.0]
        """
        examples, places = torch.unique(rows, return_inverse=True)
        summed = parts.new_zeros(*parts.shape[:2], len(examples)).index_add_(2, places, parts)
        self.mass[bisect_right(self.edges, step) - 1].index_add_(2, examples, summed.abs())

    def by(self, step_sizes: Sequence[float]) -> Float[Tensor, "probe out train"]:
        """The share of the path's time by which half was done; NaN where nothing was.

        >>> halves = Halves((0, 1, 2), torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
        >>> halves.by([1.0, 1.0]).item()  # a third of the second step, which makes three quarters
        0.6666666865348816
        """
        if not step_sizes:
            return torch.full_like(self.mass[0], torch.nan)
        elapsed = torch.tensor([0.0, *step_sizes]).to(self.mass).cumsum(0)[list(self.edges)]
        before = torch.cat([torch.zeros_like(self.mass[:1]), self.mass.cumsum(0)])
        half = before[-1:] / 2
        stretch = (before[1:] < half).sum(0, keepdim=True).clamp(max=len(self.mass) - 1)
        start, made = before.gather(0, stretch), self.mass.gather(0, stretch)
        begun = elapsed[stretch]
        time = begun + (half - start) / made * (elapsed[stretch + 1] - begun)
        return (time / elapsed[-1])[0]

    @property
    def state(self) -> dict[str, Tensor]:
        """The masses, for a checkpoint."""
        return {"mass": self.mass}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the masses of a checkpoint."""
        self.mass.copy_(state["mass"])


def halves_at_zero(steps: int, like: Float[Tensor, "probe out train"]) -> Halves:
    """Nothing done yet, on a path of so many steps."""
    count = min(steps, STRETCHES)
    edges = tuple(round(k * steps / count) for k in range(count + 1)) if count else (0,)
    return Halves(edges, torch.zeros_like(like).expand(max(count, 1), *like.shape).clone())
