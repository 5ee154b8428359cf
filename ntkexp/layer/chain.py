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
    """The operations on a tile that the layers say they are; they leave as many pixels as the layers do."""
    found: Operations = ()
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        if not says_itself(layer, "fused"):
            raise NoFusedForm(type(layer).__name__)
        said = layer.fused(before, register, free)
        if layer.shape(before)[1:] != pixels_after(said, register, before[1:]):
            raise NoFusedForm(type(layer).__name__)
        found = (*found, *said)
    return found


def pixels_after(operations: Operations, register: int, pixels: tuple[int, ...]) -> tuple[int, ...]:
    """Find the pixels along each axis that operations leave in a register."""
    for operation in operations:
        if operation.register == register and operation.coarse:
            pixels = tuple(len(one.members) for one in operation.coarse[-len(pixels) :])
    return pixels


def says_itself(layer: AbstractLayer, form: str) -> bool:
    """Whether this form is that of the layer's formula, and not of one that its class inherited and replaced."""
    found = next(kind for kind in type(layer).__mro__ if not {form, *FORMULA}.isdisjoint(vars(kind)))
    return form in vars(found)
