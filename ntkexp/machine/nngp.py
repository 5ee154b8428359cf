"""The Gaussian process that a network of infinite width is before training, given the training targets: the mean of its
posterior, f̂(x) = 𝒢(x, X) 𝒢(X, X)⁻¹ y.

Bayesian networks are it, and networks of which only the readout is trained; not those that train every layer.
"""

from __future__ import annotations

from ntkexp.closed_form.ensemble import Kernels
from ntkexp.closed_form.posterior import condition
from ntkexp.machine.base import AbstractMachine, Prediction
from ntkexp.machine.evidence import DoesNotApply, Evidence
from ntkexp.mistake import Mistake


class NNGP(AbstractMachine):
    """The posterior mean of the NNGP, without noise."""

    @property
    def needs_limit(self) -> bool:
        return True

    def predict(self, evidence: Evidence) -> Prediction:
        prior = evidence.known_limit.start
        if not evidence.training.is_quadratic:
            raise DoesNotApply("its posterior is that of squared loss")
        try:
            posterior = condition(Kernels(prior[: evidence.train], prior))
        except Mistake as mistake:
            raise DoesNotApply(str(mistake)) from None
        return Prediction(posterior.mean(evidence.targets), "posterior mean")
