"""Initialisation: scales of weights, and the form of the output.

With h the network that the layers make, W_std and b_std their scales (see `layer.affine`):

    plain           f = α h
    antisymmetric   f = α (h(θ_a) − h(θ_b))/√2 with θ_a = θ_b at the start, so that f_0 = 0 and K_0 is that of h
    centred         f = α (h(θ) − h(θ_0)), with the loss divided by α² (Chizat, Oyallon & Bach 2019): α → ∞ is lazy
"""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from ntkexp.component import Component
from ntkexp.layer.affine import Conv, Dense, Parametrisation

LARGEST = 1e20
"""A scale, beyond which kernels of deep networks are not numbers."""


class AbstractInit(Component):
    """A parametrisation has its scales; each subclass says what a dense layer looks like under it."""

    W_std: float = Field(gt=0, le=LARGEST)
    b_std: float = Field(ge=0, le=LARGEST)
    alpha: float = Field(1.0, gt=0)
    antisymmetric: bool = False
    centred: bool = False

    @property
    @abstractmethod
    def param(self) -> Parametrisation:
        """The parametrisation of hidden layers."""

    @property
    def param_readout(self) -> Parametrisation:
        """The parametrisation of the last layer."""
        return self.param

    def dense(self, features: int) -> Dense:
        """Make a hidden dense layer."""
        return Dense(features=features, W_std=self.W_std, b_std=self.b_std, param=self.param)

    def conv(self, features: int, window: int, stride: int = 1, circular: bool = False) -> Conv:
        """Make a convolution."""
        return Conv(
            features=features,
            W_std=self.W_std,
            b_std=self.b_std,
            param=self.param,
            window=window,
            stride=stride,
            circular=circular,
        )

    def readout(self, features: int) -> Dense:
        """Make the last layer."""
        return Dense(
            features=features, W_std=self.W_std, b_std=self.b_std, param=self.param_readout
        )


class Standard(AbstractInit):
    """Standard parametrisation: what deep learning libraries do.

    Weights of variance W_std²/fan_in, used as they are: the kernel grows with the width.
    """

    @property
    def param(self) -> Parametrisation:
        return "standard"


class NTK(AbstractInit):
    """NTK parametrisation (Jacot, Gabriel & Hongler 2018).

    Unit weights, scaled by 1/√fan_in in the forward pass: the kernel has a limit as the width grows.
    """

    @property
    def param(self) -> Parametrisation:
        return "ntk"


class MeanField(AbstractInit):
    """Mean-field parametrisation (Mei, Montanari & Nguyen 2018): the readout is an average over neurons.

    Hidden layers as under NTK parametrisation, the readout scaled by 1/width instead of 1/√width.

    Features then move at any width, once the step size is measured against the largest stable one.
    """

    @property
    def param(self) -> Parametrisation:
        return "ntk"

    @property
    def param_readout(self) -> Parametrisation:
        return "mean_field"
