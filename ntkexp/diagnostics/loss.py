"""Diagnostics of the objective L(θ), the loss that training minimises."""

from __future__ import annotations

from torch import Tensor

from ntkexp.diagnostics.base import (
    AbstractDiagnostic,
    Measured,
    TrainingState,
    refuse_missing_derivatives,
)
from ntkexp.effects.trajectory import flat_like
from ntkexp.statistics import largest_eigenvalue
from ntkexp.stream import normal, stream


class GradientNorm(AbstractDiagnostic):
    """The norm ‖∇L(θ)‖ of the gradient of the objective."""

    def measure(self, state: TrainingState) -> Measured:
        return float(flat_like(state.weights).vector(state.gradient).norm())


class Sharpness(AbstractDiagnostic):
    """The largest eigenvalue of the Hessian of the objective, by the Lanczos iteration.

        lambda_max = λ_max(∇²L)
        stability  = η λ_max / 2

    Gradient descent on a quadratic with this Hessian diverges if the stability exceeds
    1. At the edge of stability (Cohen et al. 2021) it stays close to 1."""

    def measure(self, state: TrainingState) -> Measured:
        flat = flat_like(state.weights)
        like = flat.vector(state.weights)

        def times_hessian(vector: Tensor) -> Tensor:
            return flat.vector(state.hessian_product(flat.weights(vector)))

        noise = normal(stream("sharpness", 0), flat.size)
        with refuse_missing_derivatives("sharpness"):
            sharpness = largest_eigenvalue(times_hessian, noise.to(like))
        stability = None if state.step_size is None else state.step_size * sharpness / 2
        return {"lambda_max": sharpness, "stability": stability}
