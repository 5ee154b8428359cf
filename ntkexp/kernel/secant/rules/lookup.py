"""Rows of a table, picked by whole numbers: one by one, or in bags whose rows become one."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule
from ntkexp.kernel.secant.rules.bilinear import multiply
from ntkexp.kernel.secant.rules.linear import constant

SUM, MEAN = 0, 1


def embedding(call: AbstractCall) -> Result:
    """One by one. The row of padding has no gradient here; one that a tied weight moves is refused, since what it adds
    to outputs is no work of the gradients that training takes.
    """
    table, index = call.args[:2]
    indices, padding = constant(index), call.given["padding_idx"]
    delta = rows(call, table, indices)
    if padding < 0:
        return delta
    if not call.is_point:
        if not torch.equal(table.start[padding], table.end[padding]) and bool((indices == padding).any()):
            raise NoRule(
                "the row of padding of an embedding moves with a weight that is tied to it, and its gradients leave "
                "that row out; leave padding_idx out, or untie them"
            )
        return delta
    shown = Ends(call.start, call.start, None)
    trained = call.slope(shown, lambda z0, z1: (indices != padding)[..., None].expand_as(z0).to(z0.dtype))
    return trained * delta


def rows(call: AbstractCall, table: Ends, indices: Tensor) -> Tensor:
    """The differences of the rows that are picked."""
    return call.picked(table, lambda source: source[indices]) if call.is_cut(table) else call.delta(table)[indices]


def bags(call: AbstractCall) -> Result:
    """Sums or means of rows, each times a number of its own if there are any; padding does not count."""
    given = call.given
    mode, padding = given["mode"], given["padding_idx"]
    if mode not in (SUM, MEAN):
        raise NoRule("the largest of a bag of rows")
    table, indices, offsets = given["weight"], constant(given["indices"]), constant(given["offsets"])
    counted = (indices != padding).to(call.start.dtype)
    bag = torch.searchsorted(offsets, torch.arange(len(indices), device=offsets.device), right=True) - 1
    terms = weighted(call, table, indices, given["per_sample_weights"]) * counted[:, None]
    if mode == MEAN:
        size = counted.new_zeros(len(call.start)).index_add(0, bag, counted)
        terms = terms / size[bag][:, None].clamp(min=1)
    summed: Tensor = terms.new_zeros(call.start.shape).index_add(0, bag, terms)
    return summed


def weighted(call: AbstractCall, table: Ends, indices: Tensor, gains: Ends | None) -> Tensor:
    """The differences of the rows, each times its number."""
    delta = None if table.delta is None else rows(call, table, indices)
    if gains is None:
        assert delta is not None
        return delta
    picked = Ends(table.start[indices], table.end[indices], delta)
    return multiply(call, gains.view(lambda v: v[:, None]), picked, picked.start.shape)


RULES: dict[str, Rule] = {
    "embedding": embedding,
    "_embedding_bag": bags,
}
