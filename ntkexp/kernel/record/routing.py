"""Routing: the values on a tape that decide where other values go.

Indices, masks that pick or scatter, orders, the numbers of experts: two tapes of the same structure on which these
differ may have other owners of the same rows. An elementwise operation keeps every element at its place, whatever its
numbers are, and what only picks from weights is where the network is cut: tokens are no matter of routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ntkexp.kernel.record.entry import Entry, Slot
from ntkexp.kernel.record.tape import Tape, is_whole

PICKING = ("embedding", "gather", "index", "index_select", "take")
TOURNAMENTS = (  # their rules ask for no order
    *("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_cholesky_ex", "linalg_inv_ex"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "min"),
)


@dataclass(frozen=True)
class Routes:
    """The slots of a structure whose values decide something: where rows go, which examples' values count."""

    steering: tuple[Slot, ...]
    masks: tuple[Slot, ...]  # that the inputs decide alone


def routes(tape: Tape) -> Routes:
    """Those of all tapes of this structure."""
    read = {slot for entry in tape.entries for slot in entry.slots} | {tape.output}
    alone = tape.from_inputs - tape.from_weights
    return Routes(
        tuple(sorted({slot for entry in tape.entries for slot in steering_slots(tape, entry, read)})),
        tuple(sorted(slot for slot in alone if tape[slot].dtype == torch.bool)),
    )


def steering_slots(tape: Tape, entry: Entry, read: set[Slot]) -> Iterator[Slot]:
    """The whole numbers that steer an operation, as its arguments or as an order that it finds."""
    moved = [slot for slot in entry.slots if not is_whole(tape[slot])]
    only_picks = entry.name in PICKING and tape.from_inputs.isdisjoint(moved)
    if moved and not (keeps_places(tape, entry) or only_picks):
        yield from (slot for slot in entry.slots if is_whole(tape[slot]))
    if entry.name not in TOURNAMENTS and any(slot in read and not is_whole(tape[slot]) for slot in entry.results):
        yield from (slot for slot in entry.results if is_whole(tape[slot]))


def keeps_places(tape: Tape, entry: Entry) -> bool:
    """Whether every element stays where it is; h[h < 0] = 0 is an elementwise choice."""
    if entry.name != "index_put":
        return torch.Tag.pointwise in entry.op.tags or entry.name == "masked_fill"
    _, (*before, last), value, *_ = entry.args
    is_number = tape[value].dim() == 0 and value not in tape.from_weights
    return is_number and before == [None] * len(before) and tape[last].dtype == torch.bool
