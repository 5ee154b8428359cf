"""The kernel of a function of one number with one observation x′, drawn over x, and what a step of descent does:

    share        k(x, x′)/k(x′, x′); `least` and `largest` are its extremes over x, `least_at` and `largest_at` their x
    finite       the same of the kernel k̃ of a finite step, η = `ascent`; `finite_largest_at` is where that is largest
    spread       largest − least
    before       f(x) at the start                        after    f(x) after a step of η on (f(x′) − value)²
    moved        after − before                           wrong_way    1 where f(x) really moved against f(x′), else 0
    error        |k(x, x′) − (delta·[x = x′] + product·x x′ + constant)|, as a share of k(x′, x′)

Rows are told apart by `x`, which is the observation's `place` or elsewhere, on one `side` of the boundary; by the
number of steps `ascended` that raise f(x′) before all this; and by the `start`: `given`, which is the model's own, or
`drawn`, which has scatter·N(0, 1) added to every parameter (Huszár 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import CountOrNone
from ntkexp.library import ascend, finite_step_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.scalar import AbstractScalar
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream

ROUNDING = 1e-9
"""A value that moves by a smaller share of f(x′)'s movement does not move."""

Whole = Annotated[int, Field(ge=-(10**4), le=10**4)]


class ScalarCurve(AbstractTrial):
    """A scalar function is looked at between `first` and `last`, with an observation (observed, value)."""

    model: AbstractScalar
    first: Whole = -10
    last: Whole = 20
    observed: Whole = 10
    value: float = 50.0
    step_size: float = Field(0.1, gt=0)
    scatter: float = Field(1.0, gt=0)
    boundary: float = -0.1
    delta: float = 0.0
    product: float = 0.0
    constant: float = 0.0
    ascended: tuple[CountOrNone, ...] = (0,)
    ascent: float = Field(1.0, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        if not self.first <= self.observed <= self.last:
            raise Mistake(f"trial.observed={self.observed} is not in {self.first} … {self.last}")
        module = self.model.function()
        own, generator = weights_of(module), stream("weights", seed)
        drawn = {name: weight + self.scatter * noise_like(weight, generator) for name, weight in own.items()}
        starts = {"given": own, "drawn": drawn}
        return [row for start, weights in starts.items() for row in self.curves(module, start, weights)]

    def curves(self, module: nn.Module, start: str, weights: Weights) -> Iterator[dict[str, Level]]:
        """The rows of one start."""
        x = torch.arange(self.first, self.last + 1, dtype=torch.float64)[:, None]
        here = self.observed - self.first
        for steps in self.ascended:
            reached = ascend(module, x[here : here + 1], steps, self.ascent, weights=weights)
            for row in self.curve(module, reached, x, here):
                yield {"start": start, "ascended": steps, **row}

    def curve(self, module: nn.Module, weights: Weights, x: Tensor, here: int) -> Iterator[dict[str, Level]]:
        """The rows at one place of the weights."""
        point = x[here : here + 1]
        kernel = tangent_kernel(module, x, point, weights=weights)[:, 0, 0, 0]
        share = kernel / kernel[here]
        finite = finite_step_kernel(module, x, point, self.ascent, weights=weights)[:, 0, 0, 0] / kernel[here]
        before, after = self.step(module, weights, x, here)
        moved = after - before
        formula = self.product * x[:, 0] * self.observed + self.constant
        formula[here] += self.delta
        whole: dict[str, Level] = {
            "least": share.min().item(),
            "least_at": x[share.argmin()].item(),
            "largest": share.max().item(),
            "largest_at": x[share.argmax()].item(),
            "finite_largest_at": x[finite.argmax()].item(),
            "spread": (share.max() - share.min()).item(),
        }
        for k, place in enumerate(x[:, 0].tolist()):
            yield {
                "x": int(place),
                "place": "observed" if k == here else "elsewhere",
                "side": "left" if place < self.boundary else "right",
                "kernel": kernel[k].item(),
                "share": share[k].item(),
                "finite": finite[k].item(),
                **whole,
                "before": before[k].item(),
                "after": after[k].item(),
                "moved": moved[k].item(),
                "wrong_way": float((moved[k] / moved[here]).item() < -ROUNDING),
                "error": ((kernel[k] - formula[k]).abs() / kernel[here]).item(),
            }

    def step(self, module: nn.Module, weights: Weights, x: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """All values before and after a step of descent on the squared error: an ascent by −2η (f(x′) − value)."""
        function = function_of(module)
        before = function(weights, x)[:, 0]
        size = 2 * self.step_size * (self.value - before[here]).item()
        after = function(ascend(module, x[here : here + 1], 1, size, weights=weights), x)[:, 0]
        return before, after


def noise_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw N(0, 1) in the shape of a weight."""
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
