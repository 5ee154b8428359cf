"""A free list of layers, as `ntkexp.infinite_kernel` takes it.

>>> from ntkexp.init.ntk import NTK
>>> network = Layers(width=8).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)
>>> network[-1]
Dense(features=2, W_std=1.0, b_std=0.0, param='ntk', frozen=False)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ntkexp.component import Count
from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import AbstractAffine, Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.residual import Residual
from ntkexp.layer.spec import parse
from ntkexp.layer.width import at_width
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered

USUAL = (
    Flatten(),
    Dense(features=64, W_std=1.5),
    Residual(branch=(ReLU(), Dense(features=64, W_std=1.5))),
    ReLU(),
    Dense(features=1),
)


class Layers(AbstractLayered):
    """`spec` up to the readout, which has as many features as there are outputs; the widest of the others has `width`.

    Scales and parametrisation are those of the layers; `init` says how the output is read.
    """

    width: Count = 64
    spec: Annotated[tuple[AbstractLayer, ...], BeforeValidator(parse)] = USUAL

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        if not self.spec or not isinstance(self.spec[-1], AbstractAffine):
            raise Mistake("model.spec ends without a readout; let its last layer be Dense")
        *hidden, readout = at_width(self.spec, self.width)
        return (*hidden, readout.model_copy(update={"features": outputs}))
