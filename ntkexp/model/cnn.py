"""Convolutional networks on images of one to three dimensions.

>>> from ntkexp.init.ntk import NTK
>>> network = CNN(width=4, depth=1, pooling="max").layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
>>> [type(layer).__name__ for layer in network]
['Conv', 'ReLU', 'MaxPool', 'Flatten', 'Dense']
"""

from __future__ import annotations

from typing import Literal

from ntkexp.component import Count, Depth
from ntkexp.init.base import AbstractInit
from ntkexp.layer.activation import Activation
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.pooling import Pooling
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered


class CNN(AbstractLayered):
    """`depth` convolutions of `width` channels, each followed by its activation and, after the first, pooling."""

    width: Count = 64
    depth: Depth = 2
    kernel: Depth = 3
    stride: Depth = 1
    padding: Literal["zero", "circular"] = "zero"
    activation: Activation = ReLU()
    pooling: Pooling = None
    head: Literal["flatten", "average"] = "flatten"

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        if len(shape) < 2:
            raise Mistake(f"model=cnn takes images, and the data has examples of shape {list(shape)}; choose model=mlp")
        convolution = init.conv(self.width, self.kernel, self.stride, self.padding == "circular")
        pooling = () if self.pooling is None else (self.pooling,)
        rest = (convolution, self.activation) * (self.depth - 1)
        head = (Flatten(),) if self.head == "flatten" else (GlobalAvgPool(),)
        return (convolution, self.activation, *pooling, *rest, *head, init.readout(outputs))
