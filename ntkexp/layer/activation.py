"""Activations by their names: every pointwise layer that is known without a number.

>>> activation("leaky_relu")
LeakyReLU(slope=0.1)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ntkexp.layer.by_name import named
from ntkexp.layer.kinds import kinds
from ntkexp.layer.pointwise import AbstractPointwise


def activations() -> dict[str, AbstractPointwise]:
    """Find the layers by the words of their classes."""
    pointwise = [kind for kind in kinds().values() if issubclass(kind, AbstractPointwise)]
    usual = [kind() for kind in pointwise if not any(field.is_required() for field in kind.model_fields.values())]
    return {layer.option: layer for layer in sorted(usual, key=lambda layer: layer.option)}


def activation(name: object) -> object:
    """Put a layer in place of its name; a layer stays as it is."""
    return named("activation", activations())(name)


Activation = Annotated[AbstractPointwise, BeforeValidator(activation)]
"""A pointwise layer, or its name."""
