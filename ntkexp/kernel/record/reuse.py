"""Reuse: what a program needs no more is written over.

To fill fresh memory takes several times as long as the arithmetic that fills it. A sum, difference, product, quotient,
mean or bound may go where one of its arguments is, if the program itself made that argument, nothing that comes later
looks at its memory, and what is written has the same shape, layout and kind. Bits stay the same: these operations round
each element by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ntkexp.kernel.record.entry import Entry, Slot
from ntkexp.kernel.record.tape import storage

aten = torch.ops.aten

IN_PLACE = {
    aten.add.Tensor: "add_",
    aten.addcmul.default: "addcmul_",
    aten.clamp_min.default: "clamp_min_",
    aten.div.Tensor: "div_",
    aten.lerp.Scalar: "lerp_",
    aten.mul.Tensor: "mul_",
    aten.neg.default: "neg_",
    aten.sub.Tensor: "sub_",
}
EITHER_WAY = (aten.add.Tensor, aten.mul.Tensor)  # whose arguments may be exchanged, if they have no factor
PERHAPS_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")  # which do not say that they are


def overwritten(entries: Sequence[Entry], values: Sequence[Tensor], others: Iterable[Slot]) -> dict[Slot, Slot]:
    """The argument of an operation, by its result, that it may write over; `others` are not the program's own, or are
    asked for.
    """
    homes = homes_of(entries, values)
    needed = {homes.get(slot, slot) for slot in others}
    found = {}
    for entry in reversed(entries):
        used = [homes.get(slot, slot) for slot in entry.slots]
        for slot in candidates(entry):
            home = homes.get(slot, slot)
            if home not in needed and used.count(home) == 1 and fits(values[entry.results[0]], values[slot]):
                found[entry.results[0]] = slot
        needed.update(used)
    return found


def homes_of(entries: Iterable[Entry], values: Sequence[Tensor]) -> dict[Slot, Slot]:
    """Each slot is given the one that lies, or may lie, in the same memory and was there first."""
    homes: dict[Slot, Slot] = {}
    for entry in entries:
        shared = is_view(entry)
        places = {storage(values[slot]): slot for slot in entry.slots}
        for result in entry.results:
            base = entry.slots[0] if shared else places.get(storage(values[result]))
            if base is not None:
                homes[result] = homes.get(base, base)
    return homes


def is_view(entry: Entry) -> bool:
    """Whether the results may lie in the memory of the first argument."""
    told = any(result.alias_info is not None for result in entry.op._schema.returns)
    return bool(entry.slots) and (told or entry.name in PERHAPS_VIEWS)


def candidates(entry: Entry) -> list[Slot]:
    """The arguments that may be written over, the one in whose place it is quickest last."""
    return [slot for slot in entry.args[1::-1] if isinstance(slot, Slot)] if entry.op in IN_PLACE else []


def in_place(entry: Entry, over: Slot) -> Entry | None:
    """The operation with what it writes over as its first argument, where that is the same."""
    if entry.args[0] == over:
        return entry
    return replace(entry, args=entry.args[::-1]) if entry.op in EITHER_WAY and not entry.kwargs else None


def fits(result: Tensor, argument: Tensor) -> bool:
    """Whether the result can be where the argument is, which fills its memory in order."""
    alike = result.shape == argument.shape and result.stride() == argument.stride() and result.dtype == argument.dtype
    return alike and argument.is_contiguous() and argument.untyped_storage().nbytes() == argument.nbytes > 0
