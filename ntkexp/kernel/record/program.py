"""A program: a computation that was written down once, and runs again on new values.

What was written down is a sequence of operations that overwrite nothing. Of these a program keeps the ones that its
results need, with all that does not depend on the values fed to it worked out beforehand, and forgets each tensor after
its last use. Numbers that the computation read from tensors (is this mask the same as that one?) may have decided how
it went on: if one of them is another than when it was written down, the program does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.record.entry import Entry, Slot, reached
from ntkexp.kernel.record.recorder import Recorder, writes
from ntkexp.kernel.record.reuse import overwritten
from ntkexp.kernel.record.simplify import Simplification
from ntkexp.kernel.record.source import Function, Source
from ntkexp.kernel.record.straight import NotStraight
from ntkexp.kernel.record.tape import Tape


class DoesNotHold(Exception):
    """Something went another way than when the program was written down."""


@dataclass(frozen=True, eq=False)
class Program:
    """Operations from what is fed to results, compiled to a Python function of a line for each."""

    function: Function
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
    moving = reached(entries, fed)
    wanted, kept = set(results), []
    for entry in reversed(entries):
        if not moving.isdisjoint(entry.slots) and (entry.reads or not wanted.isdisjoint(entry.results)):
            wanted.update(entry.slots)
            kept.append(entry)
    made = {slot for entry in kept for slot in entry.results}
    constants = sorted(wanted - made - set(fed))
    over = overwritten(kept[::-1], values, {*fed, *constants, *results})
    source = Source(kept[::-1], [*fed, *constants], results, over)
    shapes = [values[slot].shape for slot in results]
    held = tuple(values[slot].detach() for slot in constants)
    return Program(source.function(), held, list(source.read.values()), shapes)


def trace(act: Callable[[], list[Tensor]], fed: Sequence[Tensor], tapes: Sequence[Tape] = ()) -> Program:
    """What an act does with tensors, as a program of those that are fed, among them all values on the tapes; an act
    that writes into a tensor it was given has none."""
    with Recorder() as recorder:
        slots = [recorder.slot(value) for value in fed]
        known = [told(entry, tape, recorder) for tape in tapes for entry in tape.entries]
        results = [recorder.slot(result) for result in act()]
    if any(writes(entry.op) for entry in recorder.entries):
        raise NotStraight
    return program(recorder.entries, recorder.values, slots, results, known)


def told(entry: Entry, tape: Tape, recorder: Recorder) -> Entry:
    """An operation on a tape, in the slots that a recorder has for its values."""

    def slot(leaf: Any) -> Any:
        return recorder.slot(tape[leaf]) if isinstance(leaf, Slot) else leaf

    return entry.of(slot, tuple(map(slot, entry.results)))
