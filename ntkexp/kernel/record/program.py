"""A program: a computation that was written down once, and runs again on new values.

What was written down is a sequence of operations that overwrite nothing. Of these a program keeps the ones that its
results need, with all that does not depend on the values fed to it worked out beforehand, and forgets each tensor after
its last use. Numbers that the computation read from tensors (is this mask the same as that one?) may have decided how
it went on: if one of them is another than when it was written down, the program does not hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from ntkexp.kernel.record.bindings import FUNCTIONS, METHODS
from ntkexp.kernel.record.entry import Entry, Slot
from ntkexp.kernel.record.recorder import Recorder, writes
from ntkexp.kernel.record.reuse import IN_PLACE, in_place, overwritten
from ntkexp.kernel.record.simplify import Simplification
from ntkexp.kernel.record.straight import NotStraight
from ntkexp.kernel.record.tape import Tape


class DoesNotHold(Exception):
    """Something went another way than when the program was written down."""


@dataclass(frozen=True, eq=False)
class Program:
    """Operations from what is fed to results, compiled to a Python function of a line for each."""

    function: Callable[..., tuple[list[Tensor], list[Any]]]
    constants: tuple[Tensor, ...]
    read: list[Any]  # numbers that the computation read
    shapes: list[torch.Size]

    def run(self, fed: Sequence[Tensor]) -> list[Tensor]:
        """The results for new values."""
        results, read = self.function(*fed, *self.constants)
        if read != self.read or [result.shape for result in results] != self.shapes:
            raise DoesNotHold
        return results


def program(
    entries: Sequence[Entry],
    values: Sequence[Tensor],
    fed: Sequence[Slot],
    results: Sequence[Slot],
    known: Sequence[Entry] = (),
) -> Program:
    """The program that leads from the fed slots to the results; `known` are operations whose results are fed."""
    simple = Simplification(values)
    simple.rest(known)
    entries = simple.rest(entries)
    results = [simple.slot(slot) for slot in results]
    moving = reach(entries, set(fed))
    wanted, kept = set(results), []
    for entry in reversed(entries):
        if not moving.isdisjoint(entry.slots) and (entry.reads or not wanted.isdisjoint(entry.results)):
            wanted.update(entry.slots)
            kept.append(entry)
    made = {slot for entry in kept for slot in entry.results}
    constants = sorted(wanted - made - set(fed))
    over = overwritten(kept[::-1], values, {*fed, *constants, *results})
    function, read = compile_entries(kept[::-1], fed, constants, results, over)
    shapes = [values[slot].shape for slot in results]
    return Program(function, tuple(values[slot].detach() for slot in constants), read, shapes)


def reach(entries: Sequence[Entry], start: set[Slot]) -> set[Slot]:
    """The given slots, and all that is computed from them."""
    for entry in entries:
        if not start.isdisjoint(entry.slots):
            start.update(entry.results)
    return start


def compile_entries(
    entries: Sequence[Entry],
    fed: Sequence[Slot],
    constants: Sequence[Slot],
    results: Sequence[Slot],
    over: Mapping[Slot, Slot],
) -> tuple[Callable[..., tuple[list[Tensor], list[Any]]], list[Any]]:
    """The operations as a function of what is fed and of constants; and what it reads. Some write over an argument."""
    graph = fx.Graph()
    nodes: dict[Slot, fx.Node] = {}

    def node(leaf: Any) -> Any:
        return nodes[leaf] if isinstance(leaf, Slot) else leaf

    for k, slot in enumerate((*fed, *constants)):
        nodes[slot] = graph.placeholder(f"v{k}")
    read: list[tuple[fx.Node, Any]] = []
    for entry in entries:
        args, kwargs = tree_map(node, (entry.args, entry.kwargs))
        target = over.get(entry.results[0]) if entry.results else None
        whole = call(graph, entry.op, args, kwargs) if target is None else call_over(graph, entry, target, node)
        if entry.places is None:
            nodes |= dict.fromkeys(entry.results, whole)
            read += [(whole, scalar) for scalar in entry.scalars if scalar is not None]
        else:
            for slot, place in zip(entry.results, entry.places, strict=True):
                nodes[slot] = graph.call_function(operator.getitem, (whole, place))
    graph.output(([nodes[slot] for slot in results], [node for node, _ in read]))
    return fx.GraphModule({}, graph).forward, [scalar for _, scalar in read]


def call(graph: fx.Graph, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The line that runs an operation."""
    if op in METHODS:
        return graph.call_method(METHODS[op], args, kwargs)
    return graph.call_function(FUNCTIONS.get(op, op), args, kwargs)


def call_over(graph: fx.Graph, entry: Entry, target: Slot, node: Callable[[Any], Any]) -> fx.Node:
    """The line that runs an operation and writes over one of its arguments."""
    first = in_place(entry, target)
    args, kwargs = tree_map(node, ((first or entry).args, entry.kwargs))
    if first is not None:
        return graph.call_method(IN_PLACE[entry.op], args, kwargs)
    return graph.call_function(FUNCTIONS[entry.op], args, kwargs | {"out": node(target)})


def trace(
    act: Callable[[], list[Tensor]], fed: Sequence[Tensor], tapes: Sequence[Tape] = (), *, whole: bool = False
) -> Program:
    """What an act does with tensors, as a program of those that are fed; an act that writes where it is told has none.

    Either all values on tapes are fed, or the `whole` begins with the operations on them.
    """
    with Recorder(rewrites=not whole) as recorder:
        slots = [recorder.slot(value) for value in fed]
        before = [told(entry, tape, recorder) for tape in tapes for entry in tape.entries]
        results = [recorder.slot(result) for result in act()]
    entries, known = ([*before, *recorder.entries], []) if whole else (recorder.entries, before)
    if any(writes(entry.op) for entry in entries):
        raise NotStraight
    return program(entries, recorder.values, slots, results, known)


def told(entry: Entry, tape: Tape, recorder: Recorder) -> Entry:
    """An operation on a tape, in the slots that a recorder has for its values."""

    def slot(leaf: Any) -> Any:
        return recorder.slot(tape[leaf]) if isinstance(leaf, Slot) else leaf

    args, kwargs = tree_map(slot, (entry.args, entry.kwargs))
    return replace(entry, args=args, kwargs=kwargs, results=tuple(map(slot, entry.results)))
