"""The multilayer perceptron.

>>> from ntkexp.init.ntk import NTK
>>> network = MLP(width=4, depth=1).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)
>>> [type(layer).__name__ for layer in network]
['Flatten', 'Dense', 'ReLU', 'Dense']
"""

from __future__ import annotations

from pydantic import Field

from ntkexp.component import DEEPEST
from ntkexp.init.base import AbstractInit
from ntkexp.layer.activation import Activation
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.model.base import AbstractLayered


class MLP(AbstractLayered):
    """`depth` hidden layers of `width` units, then a linear readout."""

    depth: int = Field(2, ge=0, le=DEEPEST)
    activation: Activation = ReLU()

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        hidden = (init.dense(self.width), self.activation) * self.depth
        return (Flatten(), *hidden, init.readout(outputs))
