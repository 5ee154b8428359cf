"""The convolutional networks of Arora et al. 2019 (arXiv:1904.11955), whose kernel is the CNTK, in the paper's scaling.

`depth` is the paper's: one more than there are convolutions. With windows of 3 × 3, padded by zeros, and no biases,

    W_std² = 9 · channels in the first convolution, 2 in the others, 2/9 in the readout (· pixels without pooling).

The kernel of the paper with `fixed` trains neither the first convolution nor the readout.

>>> from ntkexp.init.ntk import NTK
>>> network = CNTK(depth=3, pooling=True).layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
>>> [type(layer).__name__ for layer in network]
['Conv', 'ReLU', 'Conv', 'ReLU', 'GlobalAvgPool', 'Dense']
"""

from __future__ import annotations

from math import prod, sqrt

from pydantic import Field

from ntkexp.component import DEEPEST, Count
from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import ReLU
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered


class CNTK(AbstractLayered):
    """A network whose scales and parametrisation are the paper's; `init` says how the output is read."""

    width: Count = 64
    depth: int = Field(4, ge=2, le=DEEPEST)
    pooling: bool = False
    fixed: bool = False

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        if len(shape) != 3:
            raise Mistake(
                f"model=cntk takes images, and the data has examples of shape {list(shape)}; choose model=uci_ntk"
            )
        channels, pixels = shape[0], prod(shape[1:])
        first = Conv(features=self.width, W_std=sqrt(9 * channels), frozen=self.fixed)
        other = Conv(features=self.width, W_std=sqrt(2))
        head = GlobalAvgPool() if self.pooling else Flatten()
        scale = sqrt(2 / 9 * (1 if self.pooling else pixels))
        rest = (other, ReLU()) * (self.depth - 2)
        return (first, ReLU(), *rest, head, Dense(features=outputs, W_std=scale, frozen=self.fixed))
