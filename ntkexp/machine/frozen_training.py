"""Training with a fixed kernel Θ, in function space.

Under squared loss with weights w, gradient flow has the closed form (λ the eigenvalues of Θ(X, X), t the time)

    f_t(x) = f_0(x) − Θ(x, X) g(Θ(X, X)) (f_0(X) − y),    g(λ) = (1 − e^{−twλ})/λ

and for any loss the steps of an optimizer that scales all weights alike keep them at θ_s = ρ_s θ_0 + J(X)ᵀ a_s, where
ρ and a move as weights do whose gradients are 0 and ℓ′, so that

    f_s(x) = f_0(x) + Θ(x, X) a_s + (ρ_s − 1) J(x)·θ_0,

by gradient descent f_{s+1}(x) = f_s(x) − η_s Θ(x, X) ℓ′(f_s(X)).
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.gain import Flow
from ntkexp.closed_form.modes import modes_of
from ntkexp.machine.base import DoesNotApply, Evidence, applied, square
from ntkexp.optimizer.base import AbstractOptimizer, Memory
from ntkexp.shapes import Weights


def flow(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_t at the time at which training ended."""
    missing = (evidence.targets - evidence.start[: evidence.train]).flatten()[:, None]
    gain = Flow(evidence.course.time * evidence.course.weight)
    coefficients = modes_of(square(kernel)).at(gain)(missing)
    return evidence.start + applied(kernel, coefficients.view(evidence.targets.shape))


def descent(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_T after the steps that training took."""
    course, train = evidence.course, evidence.train
    refuse_unlike_steps(course.optimizer)
    matrix, start, pull = square(kernel), evidence.start[:train], evidence.start_pull[:train]
    coordinates: Weights = {"examples": torch.zeros_like(start), "start": start.new_ones(())}
    memory: Memory = {}

    def gradient(step: int, here: Weights) -> Weights:
        learned = (matrix @ here["examples"].flatten()).view_as(start)
        output_gradient = course.output_gradient(step, start + learned + (here["start"] - 1) * pull)
        return {"examples": output_gradient, "start": start.new_zeros(())}

    for step, step_size in enumerate(course.step_sizes):
        sizes, field = dict.fromkeys(coordinates, step_size), partial(gradient, step)
        move = course.optimizer.move(step, coordinates, field(coordinates), field, sizes, memory)
        coordinates, memory = move.weights, move.memory
    return evidence.start + applied(kernel, coordinates["examples"]) + (coordinates["start"] - 1) * evidence.start_pull


def refuse_unlike_steps(optimizer: AbstractOptimizer) -> None:
    """A kernel knows of steps that scale all weights alike."""
    if optimizer.elementwise:
        raise DoesNotApply(
            f"optimizer={optimizer.option} scales every weight by itself, which no frozen kernel knows of"
        )
    if optimizer.layers:
        raise DoesNotApply("the step size differs between layers, which no frozen kernel knows of")
