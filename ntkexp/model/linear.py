"""The linear model f = W x + b: its tangent kernel never moves.

>>> from ntkexp.init.ntk import NTK
>>> [type(layer).__name__ for layer in Linear().layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)]
['Flatten', 'Dense']
"""

from __future__ import annotations

from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.model.base import AbstractLayered


class Linear(AbstractLayered):
    """It has one affine layer; `width` plays no part."""

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        return (Flatten(), init.readout(outputs))
