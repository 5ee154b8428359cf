"""Gradient flow, θ′ = −∇L(θ) − λθ, integrated with steps as long as its accuracy allows.

A training step of size η follows the flow for the time η, in arcs by Dormand & Prince. An arc is accepted if its error
is at most `tolerance` times the way gone so far, and its end; the next is as long as the error foretells:

    h ← 0.9 h (allowed/error)^{1/5},  at most 5 times longer, at least 5 times shorter.
"""

from __future__ import annotations

from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.optimizer.arc import Arc, VectorField
from ntkexp.optimizer.base import Memory, Move, Sizes
from ntkexp.optimizer.dormand_prince import Attempt, attempt, size
from ntkexp.optimizer.plain import AbstractPlain
from ntkexp.shapes import Weights

SMALLEST = 1e-10  # of a training step
SAFETY, SHORTER, LONGER = 0.9, 0.2, 5.0
NEARLY = 1e-9  # of a training step: too short a rest to be worth an arc of its own


class Flow(AbstractPlain):
    """The limit of gradient descent as its step size goes to zero, at the same times."""

    tolerance: float = Field(1e-5, gt=0, lt=1)

    flows: ClassVar[bool] = True
    copies: ClassVar[int] = 16

    @model_validator(mode="after")
    def refuse_clipping(self) -> Flow:
        """A flow has no steps, so no gradient of a step can be clipped."""
        if self.clip_norm is not None:
            raise Mistake(
                f"optimizer.clip_norm={self.clip_norm:g}: a flow has no steps whose gradient could be clipped; "
                "leave it out, or use optimizer=gd"
            )
        return self

    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        return None

    def move(
        self, step: int, weights: Weights, gradient: Weights, field: VectorField, sizes: Sizes, memory: Memory
    ) -> Move:
        def slope(here: Weights) -> Weights:
            return self.downhill(field(here), here, sizes)

        controller = Controller(self.tolerance, memory, max(sizes.values()))
        direction, arcs = self.downhill(gradient, weights, sizes), list[Arc]()
        while (length := controller.next(step)) > 0:
            tried = attempt(weights, direction, slope, length)
            if controller.accepts(tried, size(weights)):
                weights, direction = tried.end, tried.slope
                arcs.append(tried.arc)
        return Move(weights, controller.memory, tuple(arcs))

    def downhill(self, gradient: Weights, weights: Weights, sizes: Sizes) -> Weights:
        """−η ⊙ (g + λθ): the way of a whole training step, at this slope."""
        return {name: part * -sizes[name] for name, part in self.with_decay(gradient, weights).items()}


class Controller:
    """Decides how long arcs are. Lengths are kept in units of time, of which a training step takes `scale`."""

    def __init__(self, tolerance: float, memory: Memory, scale: float) -> None:
        known = memory.get("controller", {})
        self.tolerance, self.scale, self.done = tolerance, scale, 0.0
        self.before, self.way, self.error = (float(known[name]) if known else 0.0 for name in KNOWN)
        self.length = self.before / scale if self.before and scale else 1.0

    def next(self, step: int) -> float:
        """The length of the next arc, or zero at the end of the training step."""
        rest = 1 - self.done
        if rest > 0 and self.length < SMALLEST:
            raise Mistake(
                f"optimizer.tolerance={self.tolerance:g}: at step {step} the flow would need arcs shorter than "
                f"{SMALLEST:g} of a step, because it is stiff there or bends; raise optimizer.tolerance, or lower "
                "optimizer.step_size"
            )
        return rest if self.length > rest - NEARLY else self.length

    def accepts(self, tried: Attempt, weights: float) -> bool:
        """Whether the arc is good enough; the next length follows from how good it is."""
        allowed = self.tolerance * (self.way + tried.distance) + 10 * EPS * weights
        good = tried.error / allowed if allowed else 0.0
        stretch = SHORTER if not isfinite(good) else min(max(SAFETY * max(good, EPS) ** -0.2, SHORTER), LONGER)
        if not good <= 1:
            self.length = tried.arc.length * min(stretch, SAFETY)
            return False
        cut_off = tried.arc.length < self.length  # by the end of the training step
        self.length = max(self.length, stretch * tried.arc.length) if cut_off else stretch * tried.arc.length
        self.done = 1.0 if self.done + tried.arc.length > 1 - NEARLY else self.done + tried.arc.length
        self.way += tried.distance
        self.error += tried.error
        return True

    @property
    def memory(self) -> Memory:
        """The next length, the way gone, and the sum of all errors on it are kept in the memory."""
        values = (self.length * self.scale or self.before, self.way, self.error)
        named = zip(KNOWN, values, strict=True)
        return {"controller": {name: torch.tensor(value, dtype=torch.float64) for name, value in named}}


KNOWN = ("length", "way", "error")
EPS = torch.finfo(torch.float64).eps
