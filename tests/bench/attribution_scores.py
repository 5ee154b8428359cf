"""Scores of training examples that read single weights of a training, each as the output's change when one is left out.

With ∇ℓᵢ = Jᵢᵀ ℓ′ᵢ, the batch B_s of step s and its step size η_s, of one output f:

    TracIn at every step     Σ_s η_s t_is/|B_s| ∇f(θ_s)·∇ℓᵢ(θ_s)
    last gradient product    ∇f(θ_T)·∇ℓᵢ(θ_T)
    influence function       ∇f(θ_T)·(G + λ)⁻¹ ∇ℓᵢ(θ_T)/N,    G = JᵀJ/N,    λ = damping × tr G/N

TracIn is of G. Pruthi et al. (2020), arXiv:2002.08484, influence functions are of P. W. Koh and P. Liang (2017),
arXiv:1703.04730, G is the Gauss–Newton matrix of ℓ = ½(f − y)². Its inverse is taken where examples are, not weights.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jacrev

from ntkexp.mistake import Mistake
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import retrain, trained


def tracin(rerun: Rerun, read: Tensor) -> Float[Tensor, "point train"]:
    """Sum the products of gradients over the steps that each example took part in."""
    score = rerun.targets.new_zeros(len(read), rerun.examples)
    for taken in retrain(rerun, rerun.everyone[None]):
        drawn = rerun.batch(taken.step)
        share = rerun.size(taken.step) * rerun.divided(drawn, drawn.times) * drawn.times
        weights = taken.found["weights"][0]
        score[:, drawn.rows] += share * (
            features(rerun, weights, read) @ loss_gradients(rerun, weights, drawn.rows).t()
        )
    return score


def last_product(rerun: Rerun, read: Tensor) -> Float[Tensor, "point train"]:
    """The products of gradients at the end."""
    end = trained(rerun, rerun.everyone[None])[0]
    return features(rerun, end, read) @ loss_gradients(rerun, end, torch.arange(rerun.examples)).t()


def influence(rerun: Rerun, read: Tensor, damping: float) -> Float[Tensor, "point train"]:
    """What an optimum would change by, if the loss were a parabola and this its lowest point.

    (JᵀJ/N + λ)⁻¹Jᵀ = Jᵀ(JJᵀ/N + λ)⁻¹, of which the right side solves for N numbers.
    """
    if not rerun.loss.is_quadratic:
        raise Mistake("influence: the matrix here is that of a quadratic loss; choose loss=squared")
    end, count = trained(rerun, rerun.everyone[None])[0], rerun.examples
    jacobian = features(rerun, end, rerun.inputs)
    kernel = rerun.loss.curvature * jacobian @ jacobian.t() / count
    damped = kernel + damping_of(rerun, end, damping) * torch.eye(count).to(kernel)
    reached: Tensor = torch.linalg.solve(damped, jacobian @ features(rerun, end, read).t())
    return reached.t() * slopes(rerun, end) / count


def damping_of(rerun: Rerun, weights: Float[Tensor, " weight"], share: float) -> float:
    """The λ that is so many mean eigenvalues of JJᵀ/N."""
    jacobian = features(rerun, weights, rerun.inputs)
    return share * rerun.loss.curvature * float(jacobian.square().sum()) / rerun.examples**2


def features(rerun: Rerun, weights: Float[Tensor, " weight"], inputs: Tensor) -> Float[Tensor, "example weight"]:
    """∇f at each input."""
    found: Tensor = jacrev(lambda vector: rerun.outputs(vector, inputs)[:, 0])(weights)
    return found.detach()


def loss_gradients(
    rerun: Rerun, weights: Float[Tensor, " weight"], rows: Int[Tensor, " row"]
) -> Float[Tensor, "row weight"]:
    """∇ℓ of these examples."""
    return slopes(rerun, weights)[rows, None] * features(rerun, weights, rerun.inputs[rows])


def slopes(rerun: Rerun, weights: Float[Tensor, " weight"]) -> Float[Tensor, " train"]:
    """ℓ′ of each example."""
    with torch.no_grad():
        outputs = rerun.outputs(weights, rerun.inputs)
        return rerun.loss.output_gradient(outputs, rerun.targets)[:, 0]
