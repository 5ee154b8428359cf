"""Source: operations as a function of Python, a line for each, that forgets every value after its last use.

What Python does not read as it is written, such as a kind of numbers, is a name that the function knows. Tracebacks
show the line that failed.

>>> import torch
>>> add, cat = torch.ops.aten.add.Tensor, torch.ops.aten.cat.default
>>> entries = [Entry(add, (Slot(0), 2), {}, (Slot(1),), ()), Entry(cat, ([Slot(1), Slot(0)],), {}, (Slot(2),), ())]
>>> source = Source(entries, [Slot(0)], [Slot(2)])
>>> print(source.text)
def program(v0):
    v1 = add(v0, 2)
    v2 = cat([v1, v0]); v1 = v0 = None
    return [v2], []
>>> source.function()(torch.ones(1))
([tensor([3., 1.])], [])
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import isfinite
from typing import Any, TypeAlias
from weakref import finalize

from torch import Tensor

from ntkexp.kernel.record.bindings import FUNCTIONS, METHODS
from ntkexp.kernel.record.entry import Entry, Slot
from ntkexp.kernel.record.reuse import IN_PLACE, in_place

FILES = (f"<program {k}>" for k in count())

Function: TypeAlias = Callable[..., tuple[list[Tensor], list[Any]]]
"""From tensors to results, and to the numbers that are read on the way."""


@dataclass(frozen=True)
class Source:
    """Operations from what is fed to results; that of a result may write `over` one of its arguments."""

    entries: Sequence[Entry]
    fed: Sequence[Slot]
    results: Sequence[Slot]
    over: Mapping[Slot, Slot] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)  # by name

    def function(self) -> Function:
        """The function; its lines are kept as long."""
        file = next(FILES)
        exec(compile(self.text, file, "exec"), self.known)
        made: Function = self.known.pop("program")
        linecache.cache[file] = len(self.text), None, self.text.splitlines(keepends=True), file
        finalize(made, linecache.cache.pop, file, None)
        return made

    @cached_property
    def text(self) -> str:
        """What Python reads."""
        last = {slot: k for k, slot in enumerate(self.fed)}  # what is fed twice goes by its last name
        fed = ", ".join(f"v{slot:d}" if last[slot] == k else f"_{k}" for k, slot in enumerate(self.fed))
        rows = zip(self.entries, self.outcomes, self.forgotten(), strict=True)
        lines = [f"{names(outcome, entry)} = {self.call(entry)}{gone}" for entry, outcome, gone in rows]
        end = f"return {self.written(list(self.results))}, [{', '.join(self.read)}]"
        return f"def program({fed}):\n    " + "\n    ".join([*lines, end])

    @cached_property
    def outcomes(self) -> list[dict[str, Any]]:
        """What each operation gives, by name: the numbers, or None for a tensor."""
        return [outcome(k, entry) for k, entry in enumerate(self.entries)]

    @cached_property
    def read(self) -> dict[str, Any]:
        """The numbers that were read, by name."""
        return {name: value for each in self.outcomes for name, value in each.items() if value is not None}

    def call(self, entry: Entry) -> str:
        """What runs an operation."""
        over = self.over.get(entry.results[0]) if entry.results else None
        first = None if over is None else in_place(entry, over)
        args = [self.written(value) for value in (first or entry).args]
        args += [f"{name}={self.written(value)}" for name, value in entry.kwargs.items()]
        method = METHODS.get(entry.op) if first is None else IN_PLACE[entry.op]
        if method is not None:
            return f"{args[0]}.{method}({', '.join(args[1:])})"
        if over is not None:
            args.append(f"out={self.written(over)}")
        return f"{self.operation(entry)}({', '.join(args)})"

    def operation(self, entry: Entry) -> str:
        """The name of an operation."""
        if entry.op in FUNCTIONS:
            return self.name(FUNCTIONS[entry.op], entry.name)
        return self.name(entry.op, f"{entry.name}_{entry.op._overloadname}".replace("::", "_"))

    def written(self, value: Any) -> str:
        """An argument; a list and a tuple are one to torch."""
        if isinstance(value, Slot):
            return f"v{value:d}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.written, value))}]"
        if type(value) in (int, bool, str, type(None)) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self.name(value, f"c{len(self.known)}")

    def name(self, value: Any, name: str) -> str:
        """A name for this value and no other."""
        if self.known.setdefault(name, value) is value:
            return name
        return self.name(value, f"{name}_")

    def forgotten(self) -> Iterator[str]:
        """What is forgotten after each operation: what none asks for later on."""
        wanted, found = set(self.results), []
        for entry in reversed(self.entries):
            gone = dict.fromkeys(slot for slot in (*entry.slots, *entry.results) if slot not in wanted)
            wanted.update(gone)
            found.append("".join(f"{self.written(slot)} = " for slot in gone))
        return (f"; {gone}None" if gone else "" for gone in reversed(found))


def outcome(place: int, entry: Entry) -> dict[str, Any]:
    """What an operation gives, in its order: a name for each tensor, and for each number, which is said."""
    slots, numbers = iter(entry.results), iter(entry.scalars)
    places = range(len(entry.results)) if entry.places is None else entry.places
    count = len(entry.results) + len(entry.scalars)
    return dict((f"v{next(slots):d}", None) if k in places else (f"n{place}_{k}", next(numbers)) for k in range(count))


def names(outcome: Mapping[str, Any], entry: Entry) -> str:
    """Where it goes: the only one, or each of several."""
    return ", ".join(outcome) if entry.places is None else "".join(f"{name}, " for name in outcome).rstrip()
