"""Parts: tapes and features taken apart into tensors, and put together again from others.

A program takes tensors and gives tensors. What it is fed are the values that weights and inputs decide; what it gives
are the values on a tape, or the factors of features. All the rest is the same whenever it runs, and is kept as a mould.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ntkexp.kernel.features.blocks import Block
from ntkexp.kernel.features.features import Features, Key
from ntkexp.kernel.features.joined import arrays
from ntkexp.kernel.record.entry import Slot
from ntkexp.kernel.record.tape import Tape


def fed_slots(tape: Tape) -> list[Slot]:
    """The slots of weights and inputs."""
    return [*tape.weights, *tape.inputs]


def varying(tape: Tape) -> list[Tensor]:
    """The values that weights or inputs decide; all others are the same on every tape of a program."""
    return [tape[slot] for slot in (*fed_slots(tape), *tape.made)]


def parts(made: Tape | Features) -> list[Tensor]:
    """What is compared: all tensors of features; the outputs of a tape, to which all else on it leads.

    On the way to them there may be memory that nobody has written to yet.
    """
    if isinstance(made, Tape):
        return [made.outputs]
    return [value for block in made.blocks.values() for value in arrays(block).values()]


def tape_mould(tape: Tape) -> Tape:
    """A tape without the values that vary."""
    gone, nothing = {*fed_slots(tape), *tape.made}, tape.outputs.new_empty(0)
    return tape.refilled(tuple(nothing if Slot(k) in gone else value for k, value in enumerate(tape.values)))


def fill_tape(mould: Tape, fed: Sequence[Tensor], found: Sequence[Tensor]) -> Tape:
    """Another tape of the same program."""
    values = list(mould.values)
    for slot, value in zip((*fed_slots(mould), *mould.made), (*fed, *found), strict=True):
        values[slot] = value
    return mould.refilled(tuple(values))


def features_mould(features: Features) -> Features:
    """Features without their numbers."""
    return fill_features(features, (), [value.new_empty([0] * value.dim()) for value in parts(features)])


def fill_features(mould: Features, fed: Sequence[Tensor], found: Sequence[Tensor]) -> Features:
    """Other features of the same function."""
    left = iter(found)
    blocks: dict[Key, Block] = {}
    for key, block in mould.blocks.items():
        kept: dict[str, Any] = vars(block) | {name: next(left) for name in arrays(block)}
        blocks[key] = type(block)(**kept)
    return Features(blocks, mould.examples, mould.outputs)
