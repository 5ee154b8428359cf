"""Deep linear networks: linear in the inputs, not in the weights, so their kernel moves.

>>> from ntkexp.init.ntk import NTK
>>> network = DeepLinear(width=4, depth=2).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=1)
>>> [type(layer).__name__ for layer in network]
['Flatten', 'Dense', 'Dense', 'Dense']
"""

from __future__ import annotations

from pydantic import Field

from ntkexp.component import DEEPEST
from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.model.base import AbstractLayered


class DeepLinear(AbstractLayered):
    """`depth` hidden layers of `width` units without activations."""

    depth: int = Field(2, ge=0, le=DEEPEST)

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        return (Flatten(), *(init.dense(self.width),) * self.depth, init.readout(outputs))
