"""A tape: what a function of weights did on one batch of inputs, operation by operation.

The function runs as it is, on ordinary tensors, while every ATen operation is written down. `functionalize` turns its
in-place operations and writes through views into operations that return new tensors, so that a tape is a pure program;
what operations of torch overwrite inside themselves stays visible by the operation's schema.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ntkexp.kernel.record.digest import digest
from ntkexp.kernel.record.entry import Entry, Slot, reached
from ntkexp.kernel.record.inputs import examples
from ntkexp.shapes import Inputs


@dataclass(frozen=True, eq=False)
class Tape:
    """Operations in order, the value of every slot, and which slots came from outside."""

    entries: tuple[Entry, ...]
    values: tuple[Tensor, ...]
    weights: dict[Slot, str]
    arguments: Any  # the inputs as they were given, with slots for tensors
    output: Slot
    overwrites: bool  # torch wrote in place where it ran, so that autograd cannot be asked at every slot
    drawn: tuple[Slot, ...] = ()  # at random, as a whole batch

    def __getitem__(self, slot: Slot) -> Tensor:
        return self.values[slot]

    @cached_property
    def inputs(self) -> tuple[Slot, ...]:
        """The slots of the tensors among the inputs, and of what was drawn beside them."""
        return (*(leaf for leaf in tree_flatten(self.arguments)[0] if isinstance(leaf, Slot)), *self.drawn)

    @property
    def given(self) -> Inputs:
        """The inputs."""
        found: Inputs = tree_map(lambda leaf: self[leaf] if isinstance(leaf, Slot) else leaf, self.arguments)
        return found

    @property
    def outputs(self) -> Float[Tensor, "example out"]:
        """What the function gave, one row an example."""
        return self.values[self.output].detach()

    @cached_property
    def nbytes(self) -> int:
        """The memory of all values, each counted by itself."""
        return sum(value.nbytes for value in self.values)

    @property
    def bytes_per_example(self) -> float:
        """The memory of what depends on the inputs."""
        values = {storage(value): value.untyped_storage().nbytes() for value in map(self.__getitem__, self.from_inputs)}
        for value in map(self.__getitem__, self.inputs):  # which may be a few rows of a large set
            values[storage(value)] = min(value.nbytes, value.untyped_storage().nbytes())
        return sum(values.values()) / examples(self.given)

    @cached_property
    def structure(self) -> str:
        """All that two runs must share to be comparable: operations, wiring, numbers and shapes; as a text, which is
        compared and looked up at once."""
        wiring = [(entry.op, entry.args, entry.kwargs, entry.scalars) for entry in self.entries]
        return repr((wiring, [(tuple(value.shape), value.dtype) for value in self.values], self.output, self.drawn))

    @cached_property
    def form(self) -> bytes:
        """The digest of the structure, which is asked for at every step."""
        return digest((), self.structure)

    @cached_property
    def made(self) -> tuple[Slot, ...]:
        """Slots that operations fill."""
        return tuple(dict.fromkeys(slot for entry in self.entries for slot in entry.results))

    @cached_property
    def constants(self) -> tuple[Slot, ...]:
        """Slots that neither weights nor inputs decide: buffers, and numbers from outside torch."""
        return tuple(slot for slot in self.outside if slot not in self.weights and slot not in self.inputs)

    @cached_property
    def program(self) -> bytes:
        """The digest of all that tapes share whose values follow from weights and inputs in the same way."""
        about = repr((self.form, self.weights, self.arguments))
        return digest((self[slot] for slot in self.constants), about)

    @property
    def eps(self) -> float:
        """The precision of the run: the largest machine epsilon of the numbers between weights and outputs."""
        kinds = {self[slot].dtype for slot in self.from_weights}
        return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point or kind.is_complex)

    def pruned(self) -> Tape:
        """What leads to the output, or was read as a number; of anything else not even the values are kept."""
        needed, kept = {*self.weights, *self.inputs, self.output}, []
        awaited = {self.output}  # by what comes later; the last operation of several that give the same is kept
        for entry in reversed(self.entries):
            if entry.reads or not awaited.isdisjoint(entry.results):
                awaited.difference_update(entry.makes)
                awaited.update(entry.slots)
                needed.update(entry.slots, entry.results)
                kept.append(entry)
        nothing = self.values[self.output].new_empty(0)
        values = tuple(value if Slot(k) in needed else nothing for k, value in enumerate(self.values))
        return replace(self, entries=tuple(reversed(kept)), values=values)

    def refilled(self, values: tuple[Tensor, ...]) -> Tape:
        """A tape of the same program with other values; what was found out about the program stays known."""
        other = replace(self, values=values, overwrites=False)
        vars(other).update({name: getattr(self, name) for name in OF_A_PROGRAM})
        return other

    @cached_property
    def is_complex(self) -> bool:
        """Whether any of its numbers is complex."""
        return any(value.is_complex() for value in self.values)

    @cached_property
    def outside(self) -> tuple[Slot, ...]:
        """Slots that no operation made: weights, inputs, buffers, constants."""
        made = {slot for entry in self.entries for slot in entry.makes}
        used = {slot for entry in self.entries if entry.makes for slot in entry.slots}
        return tuple(sorted({*self.weights, *self.inputs, self.output, *used} - made))

    @cached_property
    def from_inputs(self) -> frozenset[Slot]:
        """Slots whose value depends on the inputs."""
        return self.reached(self.inputs)

    @cached_property
    def chooses(self) -> bool:
        """Whether numbers that the inputs decide were read, and may have chosen what Python did next."""
        return any(entry.reads and not self.from_inputs.isdisjoint(entry.slots) for entry in self.entries)

    @cached_property
    def operations(self) -> frozenset[str]:
        """The names of all operations."""
        return frozenset(str(entry.op) for entry in self.entries)

    @cached_property
    def from_weights(self) -> frozenset[Slot]:
        """Slots whose value depends on the weights."""
        return self.reached(self.weights)

    def reached(self, start: Iterable[Slot]) -> frozenset[Slot]:
        """The given slots, and all that is computed from them."""
        return reached(self.entries, start)


OF_A_PROGRAM = (
    *("structure", "form", "program", "nbytes", "inputs", "made", "is_complex"),
    *("outside", "constants", "from_inputs", "from_weights"),
)
"""What is the same on all tapes of a program, and found out once."""


def is_whole(value: Tensor) -> bool:
    """Whether the numbers are whole, or truth values."""
    return not (value.is_floating_point() or value.is_complex())


def storage(value: Tensor) -> int:
    """Where a tensor's elements live."""
    return value.untyped_storage().data_ptr()
