"""Layers one after the other, each asked with the shape that reaches it."""

from __future__ import annotations

from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import NoFusedForm, Operations
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer.base import AbstractLayer

Layers = tuple[AbstractLayer, ...]
FORMULA = frozenset({"need", "push", "mix", "between", "dual", "alone"})
"""The methods of layers that say what a fused form is the form of."""


def shapes(layers: Layers, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Find the shape before each layer, and after the last.

    >>> from ntkexp.layer.linear import Flatten
    >>> shapes((Flatten(),), (3, 4))
    [(3, 4), (12,)]
    """
    found = [shape]
    for layer in layers:
        found.append(layer.shape(found[-1]))
    return found


def carry(layers: Layers, signal: Signal) -> Signal:
    """What is known of the signal after all layers."""
    for layer in layers:
        signal = layer.carry(signal)
    return signal


def need(layers: Layers, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
    """Find the pairs before the layers, of those wanted after them."""
    for layer, before in zip(reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True):
        wanted = layer.need(wanted, before)
    return wanted


def need_own(layers: Layers, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
    """Find the pairs of examples with themselves before the layers, of those wanted after them."""
    for layer, before in zip(reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True):
        wanted = layer.need_own(wanted, before)
    return wanted


def push(layers: Layers, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
    """Take the covariances through all layers."""
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        covariance = layer.push(covariance, before)
    return covariance


def fused(layers: Layers, shape: tuple[int, ...], register: int, free: int) -> Operations:
    """The operations on a tile that the layers say they are; a tile keeps its pixels."""
    found: Operations = ()
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        if not says_itself(layer, "fused") or layer.shape(before)[1:] != before[1:]:
            raise NoFusedForm(type(layer).__name__)
        found = (*found, *layer.fused(before, register, free))
    return found


def says_itself(layer: AbstractLayer, form: str) -> bool:
    """Whether this form is that of the layer's formula, and not of one that its class inherited and replaced."""
    found = next(kind for kind in type(layer).__mro__ if not {form, *FORMULA}.isdisjoint(vars(kind)))
    return form in vars(found)
