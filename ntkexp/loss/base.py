"""A loss ℓ(f, y) of one example, its derivative in the outputs, and how class labels become targets.

The training objective is L = Σᵢ wᵢ ℓ(f(xᵢ), yᵢ) with wᵢ = 1/M for a mean over M examples and 1 for a sum. Weights are
the experiment's business; everything here is per example and unweighted.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.component import Component
from ntkexp.mistake import Mistake


class AbstractLoss(Component):
    """value, output gradient and the bound max ℓ″ that sets the largest stable step."""

    curvature: ClassVar[float]
    smooth: ClassVar[bool] = True  # whether ℓ′ has no jumps
    is_quadratic: ClassVar[bool] = False  # ℓ = ½ curvature ‖f − y‖², so that flows have closed forms
    reduction: Literal["mean", "sum"] = "mean"

    @abstractmethod
    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        """Encode class labels as the targets this loss compares outputs with."""

    @final
    def targets(self, target: Tensor, classes: int) -> Float[Tensor, "example out"]:
        """What outputs are compared with: encoded labels, or real values where there are no classes."""
        return self.encode(target, classes) if classes else self.real(target)

    def real(self, values: Float[Tensor, "example value"]) -> Float[Tensor, "example out"]:
        """Take real values as targets."""
        raise Mistake(f"loss={self.option} takes class labels, and the data has real values; choose loss=squared")

    @abstractmethod
    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """ℓ(f, y), summed over outputs."""

    @abstractmethod
    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        """∂ℓ/∂f."""

    def weight(self, examples: int) -> float:
        """wᵢ when a step sums over this many examples."""
        return 1.0 / self.divisor(examples)

    def divisor(self, examples: int) -> int:
        """What a sum over this many examples is divided by."""
        return examples if self.reduction == "mean" else 1


def signs(labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
    """One-vs-rest targets ±1; two classes share a single output, +1 for the second.

    >>> signs(torch.tensor([0, 1]), 2).tolist()
    [[-1.0], [1.0]]
    """
    if classes == 2:
        return (2.0 * labels.double() - 1.0)[:, None]
    return 2.0 * torch.nn.functional.one_hot(labels, classes).double() - 1.0
