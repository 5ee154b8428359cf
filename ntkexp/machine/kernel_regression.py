"""Kernel regression with the path kernel 𝒦 on what the network learned at the training examples."""

from __future__ import annotations

from ntkexp.machine.base import AbstractMachine, Prediction, refuse_none
from ntkexp.machine.evidence import DoesNotApply, Evidence
from ntkexp.machine.regression import regression


class KernelRegression(AbstractMachine):
    """𝒦 as the kernel."""

    def predict(self, evidence: Evidence) -> Prediction:
        refuse_none(evidence.path.kernel)
        if evidence.read.start:
            raise DoesNotApply("the path was not read at the training examples: add train to path.probes")
        prediction = regression(evidence.path.kernel, evidence)
        return Prediction(prediction.outputs, f"𝒦 by {evidence.rule}, {prediction.detail}", partial=True)
