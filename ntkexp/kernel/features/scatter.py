"""Scattering: the gradients of a weight that an elementwise operation used, added up over all its copies.

A weight that was copied along the axis of the examples, as gains and biases are, takes one sum; any other takes its
gradients element by element to where they belong.
"""

from __future__ import annotations

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.ownership import shown_once
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Element, View

BY_COMPARISON = "a value reaches the outputs through a comparison alone, which changes between the ends of a step"


def scatter(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """The gradient of each example with respect to the elements that a weight was expanded from."""
    cotangent = with_gain(use, cotangent)
    if not (shown_once(owner) >= 0).all():
        refuse_unowned(cotangent.masked_fill(owner >= 0, 0.0))
    positions = use.positions
    size = prod(use.source.shape) if isinstance(use.source, View) else use.source.delta.numel()
    axis = axis_of_examples(positions, owner, examples)
    if axis is not None:
        return add_copies(positions.movedim(axis, 0), cotangent.movedim(axis + 1, 1), size)
    reached = owner >= 0
    target = (owner * size + positions.to(owner.device))[reached]
    flat = torch.zeros(len(cotangent), examples * size, dtype=cotangent.dtype, device=cotangent.device)
    return flat.index_add(1, target, cotangent[:, reached]).view(-1, examples, size).transpose(0, 1)


def with_gain(use: Element, cotangent: Float[Tensor, "out ..."]) -> Float[Tensor, "out ..."]:
    """The gradient of the expanded weight, where the tap is a result that it was multiplied into."""
    return cotangent if isinstance(use.gain, float) and use.gain == 1 else cotangent * use.gain


def axis_of_examples(positions: Int[Tensor, "..."], owner: Int[Tensor, "..."], examples: int) -> int | None:
    """The axis that counts examples, if a weight was copied along it, as gains and biases are."""
    shown = shown_once(owner)
    for axis in range(owner.dim()):
        if owner.shape[axis] == examples and (positions.stride(axis) == 0 or examples == 1):
            index = torch.arange(examples, device=owner.device).view(-1, *[1] * (owner.dim() - axis - 1))
            if bool(((shown == index) | (shown < 0)).all()):
                return axis
    return None


def add_copies(
    positions: Int[Tensor, "example ..."], cotangent: Float[Tensor, "out example ..."], size: int
) -> Float[Tensor, "example out size"]:
    """The sum over the axes that the weight was copied along, and what is left by its place in the weight."""
    copied = [d for d in range(1, positions.dim()) if positions.stride(d) == 0]
    rows = cotangent.sum([d + 1 for d in copied]) if copied else cotangent
    rows = rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    once = positions[tuple(0 if d in (0, *copied) else slice(None) for d in range(positions.dim()))]
    places = once.reshape(-1).to(rows.device)
    if not torch.equal(places, torch.arange(size, device=rows.device)):
        rows = rows.new_zeros(*rows.shape[:2], size).index_add(2, places, rows)
    return rows.transpose(0, 1)


def refuse_unowned(cotangent: Float[Tensor, "out ..."]) -> None:
    """What no example owned when it was asked must not matter now (only a mask that changed could make it)."""
    if cotangent.any():
        raise NoRule(BY_COMPARISON)
