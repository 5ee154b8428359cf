"""Sheets: gradients multiplied out, those of small parameters side by side, so that few products take them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block

COLUMNS = 2**11  # no product of matrices is faster for more; to bring more together takes longer than it saves

Pair: TypeAlias = tuple[Block, Block]


def sheets(pairs: Sequence[Pair]) -> Iterator[tuple[Float[Tensor, "row size"], Float[Tensor, "row_ size"]]]:
    """The sheets of both sides, one object where both sides are one."""
    for group in groups([piece for pair in pairs for piece in pieces(*pair)]):
        ones, others = zip(*group, strict=True)
        sheet = side_by_side(ones)
        same = all(one is other for one, other in group)
        yield sheet, sheet if same else side_by_side(others)


def pieces(left: Block, right: Block) -> Iterator[Pair]:
    """Weights and biases as pairs of their own."""
    ones = left.pieces()
    yield from zip(ones, ones if right is left else right.pieces(), strict=True)


def groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs that have a sheet in common, small ones first."""
    group: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].size):
        if group and sum(one.size for one, _ in [*group, pair]) > COLUMNS:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group


def side_by_side(blocks: Sequence[Block]) -> Float[Tensor, "row size"]:
    """Gradients of all blocks, a row for each output of each example."""
    rows = [block.multiplied_out() for block in blocks]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, 2)).flatten(0, 1)
