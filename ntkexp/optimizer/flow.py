"""Gradient flow, θ′ = −∇L(θ) − λθ, by an adaptive Runge–Kutta method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import ClassVar

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractPlain, Arc, Memory, Move, Sizes, VectorField
from ntkexp.shapes import Weights

# --- One step of Dormand & Prince's embedded Runge–Kutta method
# of order 5 (1980), for θ′ = F(θ).
#
#     k_i = F(θ + h Σ_j a_ij k_j),    θ₁ = θ + h Σ_j a_7j k_j,    error = h Σ_i e_i k_i,
#
# The error is the difference from the embedded method of order 4. k_7 is the slope at
# the end, and therefore k_1 of the next step.


STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
DENSE = (
    *(
        -12715105075 / 11282082432,
        0.0,
        87487479700 / 32700410799,
        -10690763975 / 1880347072,
    ),
    *(701980252875 / 199316789632, -1453857185 / 822651844, 69997945 / 29380423),
)


@dataclass(frozen=True)
class Attempt:
    """A tentative step from θ to θ₁: its arc, the weights and the slope at θ₁, the
    distance ‖θ₁ − θ‖, and the error."""

    arc: Arc
    end: Weights
    slope: Weights
    distance: float
    error: float


def try_step(
    weights: Weights, slope: Weights, field: VectorField, length: float
) -> Attempt:
    """Compute a step of the given length, from weights at which the slope is known."""
    # k_i and θ₁
    slopes = [slope]
    end = weights
    for row in STAGES:
        displacement = displacement_of(row, slopes, length)
        end = {name: weight + displacement[name] for name, weight in weights.items()}
        slopes.append(field(end))

    # the coefficients c₁ to c₄ of the arc
    second = {name: length * slope[name] - displacement[name] for name in displacement}
    third = {
        name: displacement[name] - length * slopes[-1][name] - second[name]
        for name in displacement
    }
    fourth = displacement_of(DENSE, slopes, length)
    arc = Arc(weights, (displacement, second, third, fourth), length)

    error = displacement_of(ERROR, slopes, length)
    return Attempt(arc, end, slopes[-1], size(displacement), size(error))


def displacement_of(
    row: Sequence[float], slopes: Sequence[Weights], length: float
) -> Weights:
    """Return the displacement h Σ_j row_j k_j, with the length h and the slopes k_j."""
    total = {name: torch.zeros_like(part) for name, part in slopes[0].items()}
    for coefficient, slope in zip(row, slopes, strict=True):
        for name, part in total.items() if coefficient else ():
            part.add_(slope[name], alpha=length * coefficient)
    return total


def size(weights: Weights) -> float:
    """Return the norm of all weights together."""
    return sqrt(sum(float(part.square().sum()) for part in weights.values()))


MIN_LENGTH = 1e-10  # shortest arc, in training steps
SAFETY = 0.9
MIN_STRETCH = 0.2  # minimum length of the next arc, relative to this one
MAX_STRETCH = 5.0
# length in training steps; a shorter remainder becomes part of the last arc
MIN_REST = 1e-9


class Flow(AbstractPlain):
    """Gradient flow, θ′ = −∇L(θ) − λθ, integrated by an adaptive Runge–Kutta method.

    Gradient descent approaches it if the step size becomes small and Σ η stays
    constant.

    A training step of size η follows the flow for a time η. The method of Dormand &
    Prince gives the path of the step as a sequence of arcs (`Arc`). An arc is accepted
    if its error is at most `tolerance` times the distance covered so far, including
    this arc. The length h of the next arc is predicted from the error:

        h ← 0.9 h (allowed/error)^{1/5},  at most 5 times longer, at least 5 times shorter.
    """

    tolerance: float = Field(1e-5, gt=0, lt=1)

    flows: ClassVar[bool] = True
    copies: ClassVar[int] = 16

    @model_validator(mode="after")
    def refuse_clipping(self) -> Flow:
        """Raise if `clip_norm` is set: a flow has no steps whose gradient could be
        clipped."""
        if self.clip_norm is not None:
            raise Mistake(
                f"optimizer.clip_norm={self.clip_norm:g}: a flow has no steps whose gradient "
                "could be clipped; leave it out, or use optimizer=gd"
            )
        return self

    def batch_indices(
        self, step: int, examples: int, seed: int
    ) -> Int[Tensor, " batch"] | None:
        return None

    def move(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        field: VectorField,
        sizes: Sizes,
        memory: Memory,
    ) -> Move:
        def descent_direction(gradient: Weights, current: Weights) -> Weights:
            # −η ⊙ (g + λθ), the slope in units of training steps
            return {
                name: part * -sizes[name]
                for name, part in self.with_decay(gradient, current).items()
            }

        def slope(current: Weights) -> Weights:
            return descent_direction(field(current), current)

        controller = Controller(self.tolerance, memory, max(sizes.values()))
        direction = descent_direction(gradient, weights)
        arcs = list[Arc]()
        while (length := controller.next(step)) > 0:
            attempt = try_step(weights, direction, slope, length)
            if controller.accepts(attempt, size(weights)):
                weights = attempt.end
                direction = attempt.slope
                arcs.append(attempt.arc)
        return Move(weights, controller.memory, tuple(arcs))


class Controller:
    """The step-size control of a gradient flow, which chooses the lengths of the arcs.

    A length is a fraction of a training step, which takes the time `scale`. The memory
    holds times instead of lengths, because `scale` may differ in the next training
    step.
    """

    def __init__(self, tolerance: float, memory: Memory, scale: float) -> None:
        saved = memory.get("controller")
        last_time, distance, error = (
            float(saved[name]) if saved else 0.0 for name in KNOWN
        )
        self.tolerance = tolerance
        self.scale = scale
        self.done = 0.0  # the completed part of the training step
        self.last_time = last_time
        self.distance = distance
        self.error = error
        self.length = self.last_time / scale if self.last_time and scale else 1.0

    def next(self, step: int) -> float:
        """Return the length of the next arc, or 0 at the end of the training step."""
        rest = 1 - self.done
        if rest > 0 and self.length < MIN_LENGTH:
            raise Mistake(
                f"optimizer.tolerance={self.tolerance:g}: at step {step} the flow would need arcs "
                f"shorter than {MIN_LENGTH:g} of a step, because it is stiff or strongly curved "
                "there; raise optimizer.tolerance, or lower optimizer.step_size"
            )
        return rest if self.length > rest - MIN_REST else self.length

    def accepts(self, attempt: Attempt, weights: float) -> bool:
        """Return True if the error of the arc is small enough,
        and choose the length of the next arc."""
        # the allowed error, and the predicted ratio of the next length to this one
        allowed = (
            self.tolerance * (self.distance + attempt.distance) + 10 * EPS * weights
        )
        relative_error = attempt.error / allowed if allowed else 0.0
        ratio = MIN_STRETCH
        if isfinite(relative_error):
            ratio = SAFETY * max(relative_error, EPS) ** -0.2
            ratio = min(max(ratio, MIN_STRETCH), MAX_STRETCH)

        # reject the arc, and try a shorter one
        length = attempt.arc.length
        if not relative_error <= 1:
            self.length = length * min(ratio, SAFETY)
            return False

        # accept the arc; the end of the training step may have shortened it
        was_shortened = length < self.length
        next_length = ratio * length
        self.length = max(self.length, next_length) if was_shortened else next_length
        self.done += length
        if self.done > 1 - MIN_REST:
            self.done = 1.0
        self.distance += attempt.distance
        self.error += attempt.error
        return True

    @property
    def memory(self) -> Memory:
        """The controller's state for a checkpoint: the length of the next arc, the
        distance covered so far, and the sum of all errors."""
        values = (self.length * self.scale or self.last_time, self.distance, self.error)
        named = zip(KNOWN, values, strict=True)
        return {
            "controller": {
                name: torch.tensor(value, dtype=torch.float64) for name, value in named
            }
        }


KNOWN = ("length", "way", "error")
EPS = torch.finfo(torch.float64).eps
