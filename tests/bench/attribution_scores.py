"""Scores of training examples from the weights of a training. Each score predicts the change of F without an example.

B_s is the batch of step s, η_s its step size, t_is the number of times that it contains example i. F is an output or
the loss at a point:

    TracIn at every step     Σ_s η_s t_is/|B_s| ∇F(θ_s)·∇ℓᵢ(θ_s)
    last gradient product    ∇F(θ_T)·∇ℓᵢ(θ_T)
    influence function       ∇F(θ_T)·(G + λ)⁻¹ ∇ℓᵢ(θ_T)/N,    G = Σᵢ Jᵢᵀ ℓ″ᵢ Jᵢ/N

TracIn: G. Pruthi et al. (2020), arXiv:2002.08484. Influence functions: P. W. Koh and P. Liang (2017), arXiv:1703.04730.
G is the Gauss–Newton matrix; conjugate gradients apply its inverse.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jacrev, jvp, vjp

from ntkexp.effects.curvature import batched_map, load_forward_mode, scores as taken_back
from ntkexp.effects.plan import SWEEP_CACHE_NUMBERS
from ntkexp.effects.sweep import MEANS, sweep_from
from ntkexp.effects.trajectory import TakenBatch
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.path.points import Points
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.path.step import Descent
from ntkexp.removal.rerun import TRAININGS_AT_ONCE, Rerun, losses, retrain, trained
from ntkexp.run.loop import SilentListener

Asked: TypeAlias = Callable[[Float[Tensor, " weight"]], Float[Tensor, " point"]]
"""F of every point, as a function of weights."""

ITERATIONS, RESIDUAL = 30, 1e-3  # of conjugate gradients: the maximum, and the relative residual at which they stop
PROBES = 32  # random vectors of the trace estimate


def tracin(rerun: Rerun, asked: Asked) -> Float[Tensor, "point train"]:
    """Return TracIn at every step."""
    score = None
    for taken in retrain(rerun, rerun.unit_weights[None]):
        drawn = rerun.batch(taken.step)
        share = rerun.step_size_at(taken.step) * rerun.mean_factor(drawn, drawn.times) * drawn.times
        weights = taken.recorded["weights"][0]
        directions = slopes(asked, weights)
        score = directions.new_zeros(len(directions), rerun.examples) if score is None else score
        score[:, drawn.rows] += share * scores(rerun, weights, drawn.rows, directions)
    if score is None:
        return rerun.targets.new_zeros(len(asked(rerun.flat.vector(rerun.start))), rerun.examples)
    return score


def last_product(rerun: Rerun, asked: Asked) -> Float[Tensor, "point train"]:
    """Return the last gradient products."""
    end = end_of(rerun)
    return scores(rerun, end, torch.arange(rerun.examples), slopes(asked, end))


def influence(rerun: Rerun, asked: Asked, share: float) -> Float[Tensor, "point train"]:
    """Return the change of the optimum, for a quadratic loss with its minimum here."""
    end = end_of(rerun)
    damping = damping_of(rerun, end, share)

    def damped(vectors: Tensor) -> Tensor:
        return gauss_newton(rerun, end, vectors) + damping * vectors

    solved = conjugate_gradients(damped, slopes(asked, end))
    return scores(rerun, end, torch.arange(rerun.examples), solved) / rerun.examples


def damping_of(rerun: Rerun, weights: Float[Tensor, " weight"], share: float) -> float:
    """Return λ, a share of tr G/(N C). The trace is the mean of zᵀGz over random signs z."""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (PROBES, len(weights)), generator=generator).to(weights) - 1
    trace = float((signs * gauss_newton(rerun, weights, signs)).sum()) / PROBES
    return share * trace / rerun.targets.numel()


def gauss_newton(
    rerun: Rerun, weights: Float[Tensor, " weight"], vectors: Float[Tensor, "vector weight"]
) -> Float[Tensor, "vector weight"]:
    """Return G v = Σᵢ Jᵢᵀ ℓ″ᵢ Jᵢ v/N for each vector v."""

    def outputs(vector: Tensor) -> Tensor:
        return rerun.outputs(vector, rerun.inputs)

    load_forward_mode()
    with torch.no_grad():
        at_weights, transposed_jacobian = vjp(outputs, weights)[:2]

        def product(vector: Tensor) -> Tensor:
            output_change = jvp(outputs, (weights,), (vector,))[1]  # J v
            bent = jvp(lambda f: rerun.loss.output_gradient(f, rerun.targets), (at_weights,), (output_change,))[1]
            found: Tensor = transposed_jacobian(bent / rerun.examples)[0]
            return found

        return batched_map(product, vectors, chunk_size=TRAININGS_AT_ONCE)


def conjugate_gradients(
    matrix: Callable[[Tensor], Tensor], right: Float[Tensor, "vector weight"]
) -> Float[Tensor, "vector weight"]:
    """Solve A x = b for each row b, in one batch.

    With α = ‖r‖²/(p·A p), x ← x + α p, r ← r − α A p, and p ← r + (‖r‖²/‖r before‖²) p.
    """
    solution, residual = torch.zeros_like(right), right.clone()
    direction, square = residual.clone(), residual.square().sum(1, keepdim=True)
    enough = RESIDUAL**2 * square
    for _ in range(ITERATIONS):
        if bool((square <= enough).all()):
            break
        image = matrix(direction)
        step = torch.where(square > enough, square / (direction * image).sum(1, keepdim=True), 0.0)
        solution, residual = solution + step * direction, residual - step * image
        before, square = square, residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(before > 0, square / before, 0.0) * direction
    return solution


def slopes(asked: Asked, weights: Float[Tensor, " weight"]) -> Float[Tensor, "point weight"]:
    """Return ∇F of every point."""
    found: Tensor = jacrev(asked)(weights)
    return found.detach()


def end_of(rerun: Rerun) -> Float[Tensor, " weight"]:
    """Return the final weights of the original training."""
    return trained(rerun, rerun.unit_weights[None])[0]


def scores(
    rerun: Rerun,
    weights: Float[Tensor, " weight"],
    rows: Int[Tensor, " row"],
    directions: Float[Tensor, "direction weight"],
) -> Float[Tensor, "direction row"]:
    """Return γ·∇ℓᵢ for several directions γ and the examples in these rows."""
    of = partial(losses, rerun, rerun.inputs[rows], rerun.targets[rows])
    batch = TakenBatch(examples=rows, shares=rerun.unit_weights[rows], losses=of)
    return taken_back([batch], weights, directions, TRAININGS_AT_ONCE)


# Effects: the training is recorded, and the sweep back computes the effects on F. `ntkexp train path.effects=true` does
# the same for outputs.


def effects(rerun: Rerun, asked: Asked, *, one_step: bool) -> Float[Tensor, "point train"]:
    """Return the effects on F."""
    with tempfile.TemporaryDirectory() as folder:
        training = recorded(rerun, folder)
        vectors, together = slopes(asked, training.end), max(1, SWEEP_CACHE_NUMBERS // rerun.flat.size)
        sweep = sweep_from(training, vectors, MEANS["renormalised"], together, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(rerun: Rerun, folder: str) -> RecordedTraining:
    """Train, and record every step in a folder."""
    optimizer, start, pull = rerun.optimizer, rerun.start, torch.zeros_like(rerun.targets)
    records = tuple(dict.fromkeys((*optimizer.records, *optimizer.differentiated)))
    rows = SilentListener(Path(folder)).trajectory(rerun.length + 1, row_length(start, records, pull))
    recording = Recording(rows=rows, like=start, records=records, output_gradient_like=pull)
    descent, end = descent_of(rerun), start
    for step in descent.steps_from(start):
        recording.write(step)
        end = step.end
    recording.close(rerun.length, end)
    sizes = [rerun.step_size_at(step) for step in range(rerun.length)]
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)


def descent_of(rerun: Rerun) -> Descent:
    """Return the original training, step by step."""
    reader = Reader(rerun.function, frozenset(rerun.start), programs=ProgramCache())
    count = rerun.examples
    return Descent(
        points=Points(reader=reader, inputs=rerun.inputs, train=count, block=count, keeps_tapes=False),
        targets=rerun.targets,
        loss=rerun.loss,
        scale=rerun.scale,
        optimizer=rerun.optimizer,
        factors=rerun.factors,
        schedule=rerun.schedule,
        step_size=rerun.step_size,
        steps=rerun.length,
        seed=rerun.seed,
    )
