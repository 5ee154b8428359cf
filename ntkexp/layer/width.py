"""A list of layers is made wider or narrower, each in proportion.

>>> from ntkexp.layer.affine import Dense
>>> [layer.features for layer in at_width((Dense(features=2), Dense(features=4), Dense(features=1)), 8)]
[4, 8, 1]
"""

from __future__ import annotations

from collections.abc import Iterator

from ntkexp.layer.affine import AbstractAffine
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.concatenation import Concatenation
from ntkexp.layer.residual import Residual

Layers = tuple[AbstractLayer, ...]


def at_width(layers: Layers, width: int) -> Layers:
    """The widest hidden layer has `width` features, the others in proportion; the last layer keeps its own."""
    *hidden, last = layers
    widest = max((layer.features for layer in affine(tuple(hidden))), default=width)
    return (*(scaled(layer, width / widest) for layer in hidden), last)


def scaled(layer: AbstractLayer, factor: float) -> AbstractLayer:
    """Give a layer so many times the features."""
    if isinstance(layer, AbstractAffine):
        return layer.model_copy(update={"features": max(1, round(layer.features * factor))})
    if isinstance(layer, Residual):
        branch, shortcut = (tuple(scaled(one, factor) for one in side) for side in (layer.branch, layer.shortcut))
        return layer.model_copy(update={"branch": branch, "shortcut": shortcut})
    if isinstance(layer, Concatenation):
        branches = tuple(tuple(scaled(one, factor) for one in branch) for branch in layer.branches)
        return layer.model_copy(update={"branches": branches})
    return layer


def affine(layers: Layers) -> Iterator[AbstractAffine]:
    """Find the layers with weights, those of branches included."""
    for layer in layers:
        if isinstance(layer, AbstractAffine):
            yield layer
        if isinstance(layer, Residual):
            yield from affine(layer.branch + layer.shortcut)
        if isinstance(layer, Concatenation):
            yield from affine(tuple(one for branch in layer.branches for one in branch))
