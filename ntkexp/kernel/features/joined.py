"""Features of examples that were read a few at a time, as those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Rows
from ntkexp.kernel.features.features import Features, Key
from ntkexp.shapes import Weights


def joined(parts: Iterable[Callable[[Weights], Features]], examples: int) -> Features | None:
    """All parts in their order, each copied to its place when it comes; None where they have no common form.

    A part is told where the rows of each parameter belong from its first example on, and may write them there itself.
    """
    room: dict[Key, Block] = {}
    at = outputs = 0
    for read in parts:
        part = read({block.name: block.rows[at:] for block in room.values() if isinstance(block, Rows)})
        room = room or {key: widened(block, examples) for key, block in part.blocks.items()}
        if part.blocks.keys() != room.keys():
            return None
        if not all(put(room[key], block, at) for key, block in part.blocks.items()):
            return None
        at, outputs = at + part.examples, part.outputs
    return Features(room, examples, outputs)


def widened(block: Block, examples: int) -> Block:
    """Room for so many examples."""
    room: dict[str, Any] = {name: value.new_empty(examples, *value.shape[1:]) for name, value in arrays(block).items()}
    return replace(block, **room)


def put(room: Block, block: Block, at: int) -> bool:
    """Copy some examples to their place, from this one on; False where they do not fit."""
    places, given = arrays(room), arrays(block)
    if places.keys() != given.keys() or any(places[name].shape[1:] != given[name].shape[1:] for name in given):
        return False
    for name, value in given.items():
        place = places[name][at : at + len(value)]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
    return True


def arrays(block: Block) -> Mapping[str, Tensor]:
    """The fields of a block that are tensors: all have an example for each element of their first axis."""
    return {name: value for name, value in vars(block).items() if isinstance(value, Tensor)}
