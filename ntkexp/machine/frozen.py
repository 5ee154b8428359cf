"""Training with the tangent kernel frozen, at the start (K_0) or at the end (K_T), for the same time.

Under squared loss by gradient flow, in closed form; under other losses, or with another optimizer, by the same steps.
"""

from __future__ import annotations

from typing import Literal

from ntkexp.machine.base import AbstractMachine, Evidence, Prediction
from ntkexp.machine.processes import descent, flow


class Frozen(AbstractMachine):
    """K_0 or K_T."""

    at: Literal["start", "end"]

    @property
    def name(self) -> str:
        return f"frozen_{self.at}"

    def predict(self, evidence: Evidence) -> Prediction:
        kernel = evidence.kernel_start if self.at == "start" else evidence.kernel_end
        if evidence.course.is_flow:
            return Prediction(flow(kernel, evidence), f"flow to t={evidence.course.time:.4g}")
        return Prediction(descent(kernel, evidence), evidence.course.manner)
