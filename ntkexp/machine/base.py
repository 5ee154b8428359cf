"""A kernel machine: a prediction of the trained network from matrices alone.

A machine sees the evidence of a run and never a network, so it can be tried on matrices made by hand.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ntkexp.component import Component
from ntkexp.machine.evidence import DoesNotApply, Evidence


@dataclass(frozen=True)
class Prediction:
    """f̂ at every point (`partial`: where there are 𝒦 and 𝒮), the numbers that the machine chose, what else to know."""

    outputs: Float[Tensor, "probe out"]
    detail: str = ""
    note: str = ""
    partial: bool = False


class AbstractMachine(Component):
    """A machine is one rung of the ladder; a control knows nothing of the network, and is not near it, whatever its
    error.
    """

    control: ClassVar[bool] = False

    @property
    def needs_limit(self) -> bool:
        """Whether it asks for the kernels at infinite width, which are computed for it alone."""
        return False

    @abstractmethod
    def predict(self, evidence: Evidence) -> Prediction:
        """f̂, or `DoesNotApply`."""


def apply_kernel(
    kernel: Float[Tensor, "probe out train out_"], coefficients: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out"]:
    """Σᵢ K(x, xᵢ) aᵢ."""
    return (kernel.flatten(2).flatten(0, 1) @ coefficients.flatten()).view(kernel.shape[:2])


def square(kernel: Float[Tensor, "probe out train out_"]) -> Float[Tensor, "row column"]:
    """Put the kernel among training examples as a matrix."""
    refuse_none(kernel)
    return kernel[: kernel.shape[2]].flatten(2).flatten(0, 1)


def refuse_none(kernel: Float[Tensor, "probe out train out_"]) -> None:
    """A kernel that was not kept has no training examples."""
    if not kernel.shape[2]:
        raise DoesNotApply("no kernel for every pair of outputs was kept: needs path.kernels=all")
