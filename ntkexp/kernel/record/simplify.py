"""Simplification: a program says nothing twice, and works out nothing that it is fed.

Where nothing is overwritten, the same operation on the same values gives the same. What is fed may be results already,
those on a tape (the operations that gave them are asked first). A view of the same shape is the value itself, and a
view of a view is one of what the first was taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from ntkexp.kernel.record.entry import Entry, Slot

aten = torch.ops.aten

SAME = ("detach", "alias", "lift_fresh")  # operations that return what they are given, where nothing is overwritten
RESHAPED = (aten.view.default, aten._unsafe_view.default)
OF_ONE_SHAPE = (*RESHAPED, aten.reshape.default, aten.expand.default, aten.slice.Tensor)  # whose elements are the same

Saying: TypeAlias = tuple[OpOverload, str]
"""An operation and its arguments."""


@dataclass
class Simplification:
    """What was said so far: which slots are another one, which operation gave what, and views of what."""

    values: Sequence[Tensor]
    same: dict[Slot, Slot] = field(default_factory=dict)
    said: dict[Saying, tuple[Slot, ...]] = field(default_factory=dict)
    shown: dict[Slot, Slot] = field(default_factory=dict)

    def rest(self, entries: Iterable[Entry]) -> list[Entry]:
        """The operations that still have to run, in their order."""
        return [entry for each in entries if not self.is_known(entry := self.rewritten(each))]

    def slot(self, leaf: Any) -> Any:
        """The slot that stands for another one; anything else is left as it is."""
        return self.same.get(leaf, leaf) if isinstance(leaf, Slot) else leaf

    def rewritten(self, entry: Entry) -> Entry:
        """The operation on slots that stand for others, and on what a view was taken from."""
        if not self.same.keys().isdisjoint(entry.slots):
            entry = entry.of(self.slot, entry.results)
        if entry.op in RESHAPED:
            value, *shape = entry.args
            base = self.shown[entry.results[0]] = self.shown.get(value, value)
            return replace(entry, args=(base, *shape))
        return entry

    def is_known(self, entry: Entry) -> bool:
        """Whether its results stand somewhere else; taken note of, if not."""
        earlier = entry.slots[:1] if self.is_itself(entry) else self.said.get(saying(entry))
        if earlier is None:
            self.said[saying(entry)] = entry.results
            return False
        self.same.update(zip(entry.results, earlier, strict=True))
        return True

    def is_itself(self, entry: Entry) -> bool:
        """Whether the result is the argument."""
        if entry.name in SAME:
            return True
        return entry.op in OF_ONE_SHAPE and self.values[entry.results[0]].shape == self.values[entry.slots[0]].shape


def saying(entry: Entry) -> Saying:
    """What makes two operations one; a slot does not look like a number."""
    return entry.op, repr((entry.args, entry.kwargs))
