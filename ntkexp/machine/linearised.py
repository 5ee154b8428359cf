"""The network linearised at its start, f_0(x) + J(θ_0; x)(θ − θ_0), trained with the same steps (Lee et al. 2019).
Where gradients are clipped, each of its steps is by the factor that was recorded of the network.

In function space these are steps of gradient descent with the kernel K_0.
"""

from __future__ import annotations

from ntkexp.machine.base import AbstractMachine, Prediction
from ntkexp.machine.evidence import Evidence
from ntkexp.machine.frozen_training import descent


class Linearised(AbstractMachine):
    """The linear model is trained by the same optimizer."""

    def predict(self, evidence: Evidence) -> Prediction:
        return Prediction(descent(evidence.kernel_start, evidence), evidence.training.manner)
