"""The modules of affine layers: weights as they are drawn, and factors that multiply the inputs or the result."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


class Affine(nn.Module):
    """z = gain · x Wᵀ + shift · b."""

    def __init__(
        self,
        weight: Float[Tensor, "features inputs"],
        bias: Float[Tensor, " features"] | None,
        gain: float = 1.0,
        shift: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.gain, self.shift = gain, shift

    def forward(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row features"]:
        if self.bias is None:
            return torch.mm(self.gain * x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t(), beta=self.shift, alpha=self.gain)


class Convolution(nn.Module):
    """z = gain · W ∗ x + shift · b, on channels and up to three axes of pixels.

    Computed as shift · (W ∗ (gain/shift · x) + b), so that weight and bias are used by the same operation.
    """

    def __init__(
        self,
        weight: Float[Tensor, "features channels *window"],
        bias: Float[Tensor, " features"] | None,
        gain: float = 1.0,
        shift: float = 1.0,
        stride: int = 1,
        circular: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.gain, self.shift, self.stride = gain, shift, stride
        self.mode = "circular" if circular else "constant"
        self.borders = [w // 2 for w in reversed(weight.shape[2:]) for _ in range(2)]

    def forward(self, x: Float[Tensor, "example channels *pixels"]) -> Float[Tensor, "example features *pixels_"]:
        convolve = CONVOLUTIONS[x.dim() - 2]
        padded = nn.functional.pad(self.gain / self.shift * x, self.borders, self.mode)
        z: Tensor = convolve(padded, self.weight, self.bias, stride=self.stride)
        return z if self.shift == 1 else self.shift * z
