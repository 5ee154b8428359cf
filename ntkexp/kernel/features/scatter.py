"""Scattering: the gradients of a weight that an elementwise operation used, added up over all its copies.

A weight that was copied along the axis of the examples, as gains and biases are, takes one sum; any other takes its
gradients element by element to where they belong.
"""

from __future__ import annotations

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.linear_map import inner_products
from ntkexp.kernel.secant.ownership import shown_once
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Element, View

BY_COMPARISON = "a value reaches the outputs through a comparison alone, which changes between the ends of a step"


def scatter(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """The gradient of each example with respect to the elements that a weight was expanded from."""
    if not (shown_once(owner) >= 0).all():
        refuse_unowned(with_gain(use, cotangent).masked_fill(owner >= 0, 0.0))
    positions = use.positions
    size = prod(use.source.shape) if isinstance(use.source, View) else use.source.delta.numel()
    axis = axis_of_examples(positions, owner, examples)
    if axis is not None:
        return add_copies(use, cotangent, axis, size)
    cotangent, reached = with_gain(use, cotangent), owner >= 0
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
    use: Element, cotangent: Float[Tensor, "out ..."], axis: int, size: int
) -> Float[Tensor, "example out size"]:
    """The sum over the axes that the weight was copied along, and what is left by its place in the weight."""
    positions = use.positions
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0 and d != axis]
    rows = sum_over(use, cotangent, copied).movedim(axis + 1 - sum(d < axis for d in copied), 1)
    rows = rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    once = positions[tuple(0 if d in (axis, *copied) else slice(None) for d in range(positions.dim()))]
    places = once.reshape(-1).to(rows.device)
    if not torch.equal(places, torch.arange(size, device=rows.device)):
        rows = rows.new_zeros(*rows.shape[:2], size).index_add(2, places, rows)
    return rows.transpose(0, 1)


def sum_over(use: Element, cotangent: Float[Tensor, "out ..."], axes: list[int]) -> Float[Tensor, "out ..."]:
    """The gradient of the expanded weight, added up; of many outputs by products, where pixels are the last axes."""
    last = len(axes) > 0 and axes[0] == use.tap.dim() - len(axes)
    if last and isinstance(use.gain, Tensor) and len(cotangent) > 1:
        kind = torch.promote_types(cotangent.dtype, use.gain.dtype)  # casts may have left the gain a shorter one
        gain = use.gain.expand(use.tap.shape).flatten(axes[0]).to(kind)
        return inner_products(cotangent.flatten(axes[0] + 1).to(kind), gain[None])[0, ..., 0]
    whole = with_gain(use, cotangent)
    return whole.sum([d + 1 for d in axes]) if axes else whole


def refuse_unowned(cotangent: Float[Tensor, "out ..."]) -> None:
    """What no example owned when it was asked must not matter now (only a mask that changed could make it)."""
    if cotangent.any():
        raise NoRule(BY_COMPARISON)
