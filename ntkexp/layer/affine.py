"""Affine layers, dense or convolutional, and what their weights are drawn from. With n the number of inputs of a unit:

    ntk           z = W_std/√n · W x + b_std · b     W, b ~ N(0, 1)
    standard      z = W x + b                        W ~ N(0, W_std²/n), b ~ N(0, b_std²)
    mean_field    z = W_std/n · W x + b_std · b      W, b ~ N(0, 1)

The factors multiply the inputs or the result, never the weight itself: a scaled weight would be a new tensor made of
parameters, and its tangent kernel would no longer factorise. There is no bias where b_std is zero.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod, sqrt
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.mistake import Mistake

Parametrisation = Literal["ntk", "standard", "mean_field"]
CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


class AbstractAffine(AbstractLayer):
    """A layer with `features` outputs, and the scales of its weights."""

    features: PositiveInt
    W_std: float = Field(1.0, gt=0)
    b_std: float = Field(0.0, ge=0)
    param: Parametrisation = "ntk"

    @abstractmethod
    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[features, …], everything after the first axis being the inputs of a unit."""

    @abstractmethod
    def assembled(self, weight: Tensor, bias: Tensor | None, gain: float, shift: float) -> nn.Module:
        """The module with these weights."""

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        weights = self.weight_shape(shape)
        inputs = prod(weights[1:])
        weight = torch.randn(weights, generator=generator, dtype=torch.float64)
        bias = torch.randn(self.features, generator=generator, dtype=torch.float64) if self.b_std > 0 else None
        if self.param == "standard":
            scaled = None if bias is None else bias * self.b_std
            return self.assembled(weight * (self.W_std / sqrt(inputs)), scaled, 1.0, 1.0)
        gain = self.W_std / (inputs if self.param == "mean_field" else sqrt(inputs))
        return self.assembled(weight, bias, gain, self.b_std)


class Dense(AbstractAffine):
    """A fully connected layer.

    >>> Dense(features=3).shape((5,))
    (3,)
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 1:
            raise Mistake(
                f"Dense takes vectors, and was given examples of shape {list(shape)}; put a Flatten before it"
            )
        return (self.features,)

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.features, *shape)

    def assembled(self, weight: Tensor, bias: Tensor | None, gain: float, shift: float) -> nn.Module:
        return Affine(weight, bias, gain, shift)


class Conv(AbstractAffine):
    """A convolution with an output for every `stride`-th pixel; the image is padded by zeros, or continues around.

    >>> Conv(features=4, stride=2).shape((1, 8, 7))
    (4, 4, 4)
    """

    window: PositiveInt | tuple[PositiveInt, ...] = 3
    stride: PositiveInt = 1
    circular: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) - 1 not in CONVOLUTIONS:
            raise Mistake(f"Conv takes [channels, *pixels] with 1 to 3 axes of pixels, and was given {list(shape)}")
        windows = self.windows(shape)
        if self.circular and any(w > 2 * n + 1 for w, n in zip(windows, shape[1:], strict=True)):
            raise Mistake(f"a circular window {list(windows)} does not fit into {list(shape[1:])} pixels")
        return (self.features, *(-(-n // self.stride) for n in shape[1:]))

    def windows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One window for each axis of pixels."""
        window = (self.window,) * (len(shape) - 1) if isinstance(self.window, int) else self.window
        if len(window) != len(shape) - 1 or any(w % 2 == 0 for w in window):
            raise Mistake(f"Conv: window={list(window)} must be odd, one for each axis of {list(shape[1:])}")
        return window

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.features, shape[0], *self.windows(shape))

    def assembled(self, weight: Tensor, bias: Tensor | None, gain: float, shift: float) -> nn.Module:
        return Convolution(weight, bias, gain, 1.0 if bias is None else shift, self.stride, self.circular)


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
