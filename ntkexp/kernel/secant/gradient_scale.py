"""Gradients are scaled: what is pulled back through hundreds of layers of random coefficients outgrows numbers.

Whoever asks only what reaches what may scale a gradient on its way, if it is scaled alike each time that it comes by:

>>> import torch
>>> x = torch.ones(1, dtype=torch.float64, requires_grad=True)
>>> y = 3 * x
>>> _ = y.register_hook(GradientScale())
>>> [float(torch.autograd.grad(y, x, torch.full_like(y, size), retain_graph=True)[0]) for size in (2.0**900, 2.0**901)]
[3.0, 6.0]
"""

from __future__ import annotations

from math import frexp, isfinite

from torch import Tensor

REACH = 300  # powers of two: a gradient in between is left as it is, bit for bit


class GradientScale:
    """A hook of a tensor: the first gradient that passes decides by which power of two it and all later ones shrink."""

    def __init__(self) -> None:
        self.scale: float | None = None

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.numel() == 0:  # nothing depends on the tensor
            return gradient
        if self.scale is None:
            self.scale = scale_for(float(gradient.abs().amax()))
        return gradient if self.scale == 1.0 else gradient * self.scale


def scale_for(largest: float) -> float:
    """The power of two that brings a number back to about one from far away.

    >>> scale_for(5.0), scale_for(2.0**600) == 2.0**-600, scale_for(2.0**-600) == 2.0**600
    (1.0, True, True)
    """
    if largest == 0 or not isfinite(largest):
        return 1.0
    power = frexp(largest)[1] - 1
    return 1.0 if abs(power) <= REACH else 2.0**-power
