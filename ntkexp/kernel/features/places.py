"""Places: which rows of a product, or elements, belong to which example."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


def in_rounds(owner: Int[Tensor, " row"], examples: int) -> bool:
    """Whether rows of matrices follow each other in rounds, one row of each example, as where time comes first.

    >>> in_rounds(torch.tensor([0, 1, 0, 1]), 2), in_rounds(torch.tensor([0, 0, 1, 1]), 2)
    (True, False)
    """
    rounds, rest = divmod(len(owner), examples)
    return not rest and torch.equal(owner, torch.arange(examples, device=owner.device).repeat(rounds))


def in_turn(owner: Int[Tensor, " row"], examples: int) -> Int[Tensor, "example use"] | None:
    """The rows that each example uses; None where they follow each other example by example, as many of each.

    Of an example with fewer than others, rows that are not there: those after the last.

    >>> in_turn(torch.tensor([0, 0, 1, 1]), 2), in_turn(torch.tensor([1, 0, -1, 1]), 2)
    (None, tensor([[1, 4],
            [0, 3]]))
    """
    uses, rest = divmod(len(owner), examples)
    if not rest and torch.equal(owner, torch.arange(examples, device=owner.device).repeat_interleave(uses)):
        return None
    times = torch.bincount(owner + 1, minlength=examples + 1)
    order = owner.argsort(stable=True)[int(times[0]) :]
    whose, before = owner[order], times[1:].cumsum(0) - times[1:]
    nobody = owner.new_full((examples, int(times[1:].max())), len(owner))
    return nobody.index_put((whose, torch.arange(len(order), device=owner.device) - before[whose]), order)


def at_places(
    rows: Float[Tensor, "..."], axis: int, places: Int[Tensor, "example use"]
) -> Float[Tensor, "... example use _"]:
    """The rows of each example, zeros where it has none; a view, where all uses follow each other use by use."""
    examples, uses = places.shape
    count = rows.shape[axis]
    if torch.equal(places.t().reshape(-1), torch.arange(count, device=places.device)):
        return rows.reshape(*rows.shape[:axis], uses, examples, *rows.shape[axis + 1 :]).transpose(axis, axis + 1)
    known = with_zeros(rows, axis) if (places == count).any() else rows
    return known[places] if axis == 0 else known[:, places]


def with_zeros(rows: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """The rows, and one of zeros after the last."""
    shape = [1 if d == axis else n for d, n in enumerate(rows.shape)]
    return torch.cat([rows, rows.new_zeros(shape)], axis)
