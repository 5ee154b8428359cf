"""An entry of a tape: one operation, with the places of its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch._ops import OpOverload

from ntkexp.kernel.record.arguments import leaves, replace


class Slot(int):
    """The place of a tensor on a tape, which is not written like a number.

    >>> [Slot(2), 2]
    [@2, 2]
    """

    def __repr__(self) -> str:
        return f"@{int(self)}"


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation: its arguments with slots for tensors, the slots of its results, what it gave to Python."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]
    scalars: tuple[Any, ...]
    places: tuple[int, ...] | None = None  # of the results among what the operation returned; None: it returned one

    @property
    def name(self) -> str:
        """The operation without its overload: `aten::add.Tensor` is `add`."""
        return self.op._schema.name.removeprefix("aten::")

    @property
    def reads(self) -> bool:
        """Whether it gave a number to Python."""
        return any(scalar is not None for scalar in self.scalars)

    def of(self, slot: Callable[[Any], Any], results: tuple[Slot, ...]) -> Entry:
        """The same operation on other slots, which a function gives for these."""
        kwargs = {name: replace(value, slot) for name, value in self.kwargs.items()}
        return Entry(self.op, replace(self.args, slot), kwargs, results, self.scalars, self.places)

    @cached_property
    def makes(self) -> frozenset[Slot]:
        """The slots of results that were not there before; a constant that is taken up as it is was."""
        return frozenset(self.results) - frozenset(self.slots)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slots among the arguments."""
        return tuple([leaf for leaf in leaves((self.args, *self.kwargs.values())) if isinstance(leaf, Slot)])


def reached(entries: Iterable[Entry], start: Iterable[Slot]) -> frozenset[Slot]:
    """The given slots, and all that is computed from them."""
    found = set(start)
    for entry in entries:
        if not found.isdisjoint(entry.slots):
            found.update(entry.results)
    return frozenset(found)
