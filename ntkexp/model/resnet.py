"""Residual networks for small images (He, Zhang, Ren & Sun 2016), with activations before weights.

    x + conv(σ(norm(conv(σ(norm(x))))))

>>> from ntkexp.init.ntk import NTK
>>> network = Resnet(width=4, stages=2).layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
>>> [type(layer).__name__ for layer in network]
['Conv', 'Residual', 'Residual', 'ReLU', 'GlobalAvgPool', 'Dense']
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ntkexp.component import LARGEST, Count, Depth
from ntkexp.init.base import AbstractInit
from ntkexp.layer.activation import Activation
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import GlobalAvgPool
from ntkexp.layer.norm import Norm
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.residual import Residual
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered


class Resnet(AbstractLayered):
    """`stages` of `blocks` residual blocks; each stage but the first halves the pixels and doubles the channels."""

    width: Count = 32
    stages: int = Field(3, ge=1, le=16)
    blocks: Depth = 1
    norm: Norm = None
    activation: Activation = ReLU()

    @model_validator(mode="after")
    def refuse_too_wide(self) -> Self:
        """Channels double from stage to stage."""
        if self.width * 2 ** (self.stages - 1) > LARGEST:
            raise Mistake(
                f"model.stages={self.stages}: from model.width={self.width} channels double at every stage, to more "
                f"than {LARGEST}; lower one of the two"
            )
        return self

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        if len(shape) < 2:
            raise Mistake(
                f"model=resnet takes images, and the data has examples of shape {list(shape)}; choose model=mlp"
            )
        blocks = (
            self.block(init, self.width * 2**stage, stride=2 if stage > 0 and block == 0 else 1)
            for stage in range(self.stages)
            for block in range(self.blocks)
        )
        return (init.conv(self.width, 3), *blocks, *self.before(), GlobalAvgPool(), init.readout(outputs))

    def block(self, init: AbstractInit, channels: int, stride: int) -> Residual:
        """Two convolutions beside a shortcut, which is a convolution where the shape changes."""
        branch = (*self.before(), init.conv(channels, 3, stride), *self.before(), init.conv(channels, 3))
        return Residual(branch=branch, shortcut=() if stride == 1 else (init.conv(channels, 1, stride),))

    def before(self) -> tuple[AbstractLayer, ...]:
        """The layers that come before weights."""
        return (self.activation,) if self.norm is None else (self.norm, self.activation)
