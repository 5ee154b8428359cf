"""Training with a fixed kernel Θ, in function space.

Under ½c‖f − y‖² with weights w/c, gradient flow has the closed form (λ the eigenvalues of Θ(X, X), t the time)

    f_t(x) = f_0(x) − Θ(x, X) g(Θ(X, X)) (f_0(X) − y),    g(λ) = (1 − e^{−twλ})/λ

and for any loss the steps of an optimizer that scales all weights alike lead to

    f_s(x) = f_0(x) + Θ(x, X) a_s + (ρ_s − 1) J(x)·θ_0,

by gradient descent f_{s+1}(x) = f_s(x) − η_s Θ(x, X) ℓ′(f_s(X)).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.gain import FlowGain
from ntkexp.closed_form.modes import modes_of
from ntkexp.machine.base import apply_kernel, square
from ntkexp.machine.evidence import Evidence


def flow(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_t at the time at which training ended."""
    missing = (evidence.targets - evidence.start[: evidence.train]).flatten()[:, None]
    gain = FlowGain(evidence.training.time * evidence.training.weight)
    coefficients = modes_of(square(kernel)).at(gain)(missing)
    return evidence.start + apply_kernel(kernel, coefficients.view(evidence.targets.shape))


def descent(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_T after the steps that training took."""
    train = evidence.train
    coefficients, remaining = evidence.training.repeat(
        square(kernel), evidence.start[:train], evidence.start_pull[:train]
    )
    return evidence.start + apply_kernel(kernel, coefficients) + (remaining - 1) * evidence.start_pull
