"""What scores of training examples say that an output changes by when one of them is left out:

    effect           each mean that it took part in is taken without it, and what comes of that is linear
    one_step         the same, with each step of the optimizer taken without it
    contributions    −𝒮(x, xᵢ) by secants: what it added is taken off
    tracin           Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), the first order of that
    last_gradient    K_T(x, xᵢ) ℓ′ᵢ(T)
    influence        K_T(x, X)(ℓ″K_T/N + λ)⁻¹ ℓ′(T)/N, of the example; λ a tenth of the kernel's mean eigenvalue
    trak             φ(x)·(ΦᵀΦ)⁻¹φ(xᵢ) ℓ′ᵢ(T), φ the gradient projected at random to N/4 dimensions
    shuffled         the effect of another example

Influence functions are of P. W. Koh and P. Liang (2017), arXiv:1703.04730, TRAK is of S. M. Park et al. (2023),
arXiv:2303.14186, here of one model; for the others see `DatamodelScore` and `ntkexp.effects`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial.datamodel_score import attributions
from ntkexp.claim.trial.retraining import Retraining
from ntkexp.claim.trial.would_change import would_change
from ntkexp.mistake import Mistake
from ntkexp.stream import stream

DAMPING = 0.1
COARSER = 4
"""TRAK projects to one dimension for so many examples."""


def told_changes(found: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What every score says, at the points that are no training examples."""
    summed = attributions(found)
    effect = would_change(found)
    return {
        "effect": effect,
        "one_step": would_change(found, one_step=True),
        **{name: -summed[name] for name in ("contributions", "tracin", "last_gradient")},
        "influence": influence(found),
        "trak": trak(found),
        "shuffled": effect.roll(1, 1),
    }


def influence(found: Retraining) -> Float[Tensor, "point train"]:
    """What an optimum would change by, if the loss were a parabola and this its lowest point.

    (JᵀJ/N + λ)⁻¹Jᵀ = Jᵀ(JJᵀ/N + λ)⁻¹, of which the right side solves for N numbers.
    """
    loss, train = found.setting.experiment.loss, found.train
    if not loss.is_quadratic:
        raise Mistake("trial.base: influence functions are here those of a quadratic loss; choose loss=squared")
    kernel = found.outcome.evidence.kernel_end[:, 0, :, 0]
    curved = loss.curvature * kernel[:train] / train
    damped = curved + DAMPING * curved.trace() / train * torch.eye(train).to(kernel)
    reached: Tensor = torch.linalg.solve(damped, kernel[train:].t())
    return reached.t() * slopes(found) / train


def trak(found: Retraining) -> Float[Tensor, "point train"]:
    """Regression with the gradients at the end, of fewer dimensions than there are examples."""
    rerun, end = found.rerun, found.rerun.flat.vector(found.outcome.weights)

    def outputs(vector: Tensor) -> Float[Tensor, " point"]:
        return rerun.outputs(vector, found.setting.problem.inputs)[:, 0]

    dimensions, generator = max(1, found.train // COARSER), stream("sketch", rerun.seed)
    drawn = torch.randn(len(end), dimensions, generator=generator, dtype=torch.float64).to(end)
    features: Tensor = jacrev(outputs)(end).detach() @ drawn
    solved: Tensor = torch.linalg.pinv(features[: found.train])
    return features[found.train :] @ solved * slopes(found)


def slopes(found: Retraining) -> Float[Tensor, " train"]:
    """ℓ′ of each example at the end."""
    problem, end = found.setting.problem, found.outcome.evidence.end
    return found.setting.experiment.loss.output_gradient(end[: found.train], problem.targets[: found.train])[:, 0]
