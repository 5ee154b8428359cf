"""The path kernel machine of Domingos: f̂(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ), coefficients that depend on the query x.

With 𝒮 by secants it is the trained network, to rounding; from left ends it is the published sum.
"""

from __future__ import annotations

from ntkexp.machine.base import AbstractMachine, DoesNotApply, Evidence, Prediction


class PathSum(AbstractMachine):
    """The sum by one rule."""

    rule: str

    @property
    def name(self) -> str:
        return self.rule

    def predict(self, evidence: Evidence) -> Prediction:
        if self.rule not in evidence.paths:
            raise DoesNotApply(f"not accumulated: add {self.rule} to path.rule")
        path = evidence.paths[self.rule]
        return Prediction(evidence.start + path.contributions.sum(2), path.detail)
