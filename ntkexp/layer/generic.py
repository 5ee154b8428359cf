"""Smooth activations by the names of their functions.

>>> Generic(fn="tanh").apply(torch.zeros(1))
tensor([0.])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from ntkexp.component import CountOrNone
from ntkexp.layer.smooth import AbstractSmooth
from ntkexp.mistake import Mistake, nearest

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "arctan": torch.arctan,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": torch.nn.functional.gelu,
    "mish": torch.nn.functional.mish,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "sin": torch.sin,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
}
KINKED = {"abs": "Abs", "leaky_relu": "LeakyReLU", "relu": "ReLU"}
"""The layers of functions with a kink."""


def smooth(name: str) -> str:
    """The name of a function that has a series."""
    if name in KINKED:
        raise Mistake(f"fn={name} has a kink, which Mehler's series never meets; choose the layer {KINKED[name]}")
    if name not in FUNCTIONS:
        raise Mistake(f"fn={name} is none of {', '.join(FUNCTIONS)}{nearest(name, [*FUNCTIONS, *KINKED])}")
    return name


class Generic(AbstractSmooth):
    """σ by its name; `deg` is read by others, and plays no part here."""

    fn: Annotated[str, AfterValidator(smooth)]
    deg: CountOrNone = 0

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return FUNCTIONS[self.fn](z)
