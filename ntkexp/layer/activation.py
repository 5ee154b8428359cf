"""Activations by their names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ntkexp.layer.by_name import named
from ntkexp.layer.entire import GELU, Erf, Sin
from ntkexp.layer.pointwise import AbstractPointwise, LeakyReLU, Linear, ReLU
from ntkexp.layer.smooth import SiLU, Tanh

ACTIVATIONS: dict[str, AbstractPointwise] = {
    "erf": Erf(),
    "gelu": GELU(),
    "leaky_relu": LeakyReLU(),
    "linear": Linear(),
    "relu": ReLU(),
    "silu": SiLU(),
    "sin": Sin(),
    "tanh": Tanh(),
}


Activation = Annotated[AbstractPointwise, BeforeValidator(named("activation", ACTIVATIONS))]
"""A pointwise layer, or its name."""
