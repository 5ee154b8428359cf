"""A true kernel machine: the path kernel with coefficients that do not depend on the query,

f̂(x) = f_0(x) + Σᵢ 𝒦(x, xᵢ) āᵢ,    āᵢ = −Σ_s η_s ℓ′ᵢ(s) / Σ_s η_s.
"""

from __future__ import annotations

from ntkexp.machine.base import AbstractMachine, Evidence, Prediction, applied


class FixedCoefficients(AbstractMachine):
    """The coefficients are means over the path."""

    @property
    def name(self) -> str:
        return "fixed_coefficients"

    def predict(self, evidence: Evidence) -> Prediction:
        coefficients = -evidence.course.summed_gradient / evidence.course.time
        return Prediction(evidence.start + applied(evidence.path.kernel, coefficients), f"𝒦 by {evidence.rule}")
