"""Training with the tangent kernel frozen for the same time: that of the start (K_0), of the end (K_T), or of infinite
width (K_∞).

Under squared loss by gradient flow, in closed form; under other losses, or with another optimizer, by the same steps.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, Evidence, Prediction
from ntkexp.machine.frozen_training import descent, flow


class Frozen(AbstractMachine):
    """K_0, K_T or K_∞, from the network's own outputs at the start."""

    at: Literal["start", "end", "limit"]

    @property
    def name(self) -> str:
        return f"frozen_{self.at}"

    @property
    def needs_limit(self) -> bool:
        return self.at == "limit"

    def predict(self, evidence: Evidence) -> Prediction:
        kernel = self.kernel(evidence)
        if evidence.course.is_flow:
            return Prediction(flow(kernel, evidence), f"flow to t={evidence.course.time:.4g}")
        return Prediction(descent(kernel, evidence), evidence.course.manner)

    def kernel(self, evidence: Evidence) -> Float[Tensor, "probe out train out_"]:
        """The one that is frozen."""
        if self.at == "limit":
            return evidence.known_limit.of_all(evidence.start.shape[1])
        return evidence.kernel_start if self.at == "start" else evidence.kernel_end
