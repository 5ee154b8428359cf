"""The networks of Arora et al. 2020 (arXiv:1910.01663), whose kernel does well on small tables, in the paper's scaling.

`depth` hidden layers of ReLU without biases, of which the first `fixed` are not trained; W_std² is the number of inputs
in the first layer, so that these are not scaled, and 1 in the others.

>>> from ntkexp.init.ntk import NTK
>>> network = UCINtk(depth=2, fixed=1).layers(NTK(W_std=1, b_std=0), shape=(4,), outputs=2)
>>> [(layer.W_std, layer.frozen) for layer in network if isinstance(layer, Dense)]
[(2.0, True), (1.0, False), (1.0, False)]
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Self

from pydantic import model_validator

from ntkexp.component import CountOrNone, Depth
from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered


class UCINtk(AbstractLayered):
    """A network whose scales and parametrisation are the paper's; `init` says how the output is read."""

    depth: Depth = 3
    fixed: CountOrNone = 0

    @model_validator(mode="after")
    def refuse_untrained(self) -> Self:
        """The readout is always trained."""
        if self.fixed > self.depth:
            raise Mistake(f"model.fixed={self.fixed}: there are {self.depth} hidden layers; it takes at most that many")
        return self

    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        scales = [sqrt(prod(shape)), *[1.0] * (self.depth - 1)]
        hidden = [
            layer
            for k, scale in enumerate(scales)
            for layer in (Dense(features=self.width, W_std=scale, frozen=k < self.fixed), ReLU())
        ]
        return (Flatten(), *hidden, Dense(features=outputs))
