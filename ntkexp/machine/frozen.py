"""Training with the tangent kernel frozen for the same time: that of the start (K_0), of the end (K_T), or of infinite
width (K_∞).

Under quadratic loss by gradient flow, in closed form; under other losses, or with another optimizer, by the same steps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import final

from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, Prediction, refuse_none
from ntkexp.machine.evidence import Evidence
from ntkexp.machine.frozen_training import descent, flow


class AbstractFrozen(AbstractMachine):
    """One kernel holds throughout, from the network's own outputs at the start."""

    @abstractmethod
    def kernel(self, evidence: Evidence) -> Float[Tensor, "probe out train out_"]:
        """The one that is frozen."""

    @final
    def predict(self, evidence: Evidence) -> Prediction:
        kernel = self.kernel(evidence)
        if evidence.training.is_closed:
            return Prediction(flow(kernel, evidence), f"flow to t={evidence.training.time:.4g}")
        return Prediction(descent(kernel, evidence), evidence.training.manner)


class FrozenStart(AbstractFrozen):
    """The kernel before the first step is K_0."""

    def kernel(self, evidence: Evidence) -> Float[Tensor, "probe out train out_"]:
        return evidence.kernel_start


class FrozenEnd(AbstractFrozen):
    """The kernel after the last step is K_T."""

    def kernel(self, evidence: Evidence) -> Float[Tensor, "probe out train out_"]:
        return evidence.kernel_end


class FrozenLimit(AbstractFrozen):
    """The kernel of infinite width is K_∞."""

    @property
    def needs_limit(self) -> bool:
        return True

    def kernel(self, evidence: Evidence) -> Float[Tensor, "probe out train out_"]:
        refuse_none(evidence.kernel_start)
        return evidence.known_limit.of_all(evidence.start.shape[1])
