"""Scales of weights: numbers, or tensors of one number where a kernel is to be differentiated by them.

>>> import torch
>>> positive(single(torch.tensor([2.0])))
tensor(2.)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from torch import Tensor

from ntkexp.mistake import Mistake

LARGEST = 1e150


def single(value: Tensor | float) -> Tensor | float:
    """A tensor without axes, if it is one."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or not value.is_floating_point():
        raise Mistake(f"a scale is one number, not a tensor of shape {list(value.shape)} and {value.dtype}")
    return value.reshape(())


def number(value: Tensor | float) -> float:
    """The number itself, without what it takes for derivatives."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def representable(value: Tensor | float) -> Tensor | float:
    """The value, whose square has to be a number as well."""
    if number(value) > LARGEST:
        raise Mistake(f"it takes a number ≤ {LARGEST:g}, whose square is one as well, not {number(value):g}")
    return value


def positive(value: Tensor | float) -> Tensor | float:
    """The value, which has to be more than zero."""
    if not number(value) > 0:
        raise Mistake(f"it takes a number > 0, not {number(value):g}")
    return value


def not_negative(value: Tensor | float) -> Tensor | float:
    """The value, which has to be zero or more."""
    if not number(value) >= 0:
        raise Mistake(f"it takes a number ≥ 0, not {number(value):g}")
    return value


Scale = Annotated[Tensor | float, AfterValidator(single)]
Positive = Annotated[Scale, AfterValidator(positive), AfterValidator(representable)]
NotNegative = Annotated[Scale, AfterValidator(not_negative), AfterValidator(representable)]
