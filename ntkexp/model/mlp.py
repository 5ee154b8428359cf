"""The multilayer perceptron.

>>> from ntkexp.init.ntk import NTK
>>> network = MLP(width=4, depth=1).layers(NTK(W_std=1, b_std=0), outputs=2)
>>> [type(layer).__name__ for layer in network]
['Flatten', 'Dense', 'ReLU', 'Dense']
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import AbstractPointwise, ReLU, named
from ntkexp.model.base import AbstractArchitecture


class MLP(AbstractArchitecture):
    """`depth` hidden layers of `width` units, then a linear readout."""

    depth: int = Field(2, ge=0)
    activation: Annotated[AbstractPointwise, BeforeValidator(named)] = ReLU()

    def layers(self, init: AbstractInit, outputs: int) -> tuple[AbstractLayer, ...]:
        hidden = (init.dense(self.width), self.activation) * self.depth
        return (Flatten(), *hidden, init.readout(outputs))
