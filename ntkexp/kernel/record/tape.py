"""A tape: the operations of a function of weights on one batch of inputs.

The function runs unchanged on ordinary tensors, while a recorder (`recorder.py`) records
every operation of ATen, torch's C++ library. A tape consists of *entries*, one for each
operation, and of *slots*, one for each tensor. An entry names the slots of its arguments
and results. No entry overwrites the value of a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs, Weights

# Inputs are one tensor, a tuple of tensors, or a dict of tensors. The first axis of
# every tensor is the axis of examples.


def as_inputs(inputs: object) -> Inputs:
    """Detach inputs from autograd's graph. Convert lists to tuples, and mappings to
    dicts. Raise Mistake if there is no tensor, if the first axes differ, or for packed
    sequences."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    elif isinstance(inputs, list):
        inputs = tuple(inputs)
    refuse_packed(inputs)
    if not isinstance(inputs, Tensor | tuple | dict):
        kind = type(inputs).__name__
        is_frame = hasattr(inputs, "to_numpy")
        frame = "; convert it by torch.tensor(frame.to_numpy())" if is_frame else ""
        raise Mistake(
            f"the inputs are a {kind}; give a tensor, a tuple of tensors, or a dict of keyword "
            f"arguments{frame}"
        )
    detached = map_tensors(Tensor.detach, inputs)
    examples(detached)
    return detached


def refuse_packed(inputs: object) -> None:
    """Raise Mistake for packed sequences, in which rows
    of several examples alternate."""

    def is_packed(value: object) -> bool:
        return isinstance(value, PackedSequence)

    if any(map(is_packed, tree_leaves(inputs, is_leaf=is_packed))):
        raise Mistake(
            "the inputs are packed sequences, whose rows mix the examples; give the padded tensor "
            "and a tensor of lengths, and let the model call pack_padded_sequence"
        )


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    result: Inputs = tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, inputs
    )
    return result


def part(inputs: Inputs, where: slice) -> Inputs:
    """Return the examples in the slice `where`.

    >>> part({"tokens": torch.ones(5, 2), "cache": False}, slice(1, 3))["tokens"].shape
    torch.Size([2, 2])
    """
    return map_tensors(lambda tensor: tensor[where], inputs)


def tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def examples(inputs: Inputs) -> int:
    """Return the number of examples. Raise Mistake if there is no tensor,
    or if tensors disagree.

    >>> examples(([1.0, 2.0],))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the inputs hold no tensor; give tensors whose first axis is the axis of examples
    """
    counts = {len(tensor) if tensor.dim() else None for tensor in tensors(inputs)}
    if not counts:
        raise Mistake(
            "the inputs hold no tensor; give tensors whose first axis is the axis of examples"
        )
    if len(counts) != 1 or None in counts:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors(inputs))
        raise Mistake(
            f"the inputs have the shapes {shapes}; their first axes must have one length, the "
            "number of examples"
        )
    return int(counts.pop() or 0)


def advice_for_lists(inputs: Inputs) -> str:
    """Return advice if the inputs hold a list with one number for each example.
    Otherwise return an empty string.

    >>> advice_for_lists((torch.ones(2, 3), [3, 2])), advice_for_lists((torch.ones(2, 3), [1, 2, 3]))
    ('; give a tensor in place of a list of numbers: every example gets the whole list', '')
    """
    count = examples(inputs)

    def is_list(leaf: object) -> bool:
        return (
            isinstance(leaf, list | tuple)
            and len(leaf) == count
            and all(isinstance(number, int | float) for number in leaf)
        )

    if any(map(is_list, tree_leaves(inputs, is_leaf=is_list))):
        return "; give a tensor in place of a list of numbers: every example gets the whole list"
    return ""


# Arguments of operations are leaves, or nested lists and tuples of leaves. torch's
# pytree functions support other containers too, which makes them slower than most
# operations.


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of nested arguments.

    >>> map_leaves((1, [2, "x"]), lambda leaf: 10 * leaf)
    (10, [20, 'xxxxxxxxxx'])
    """
    if isinstance(value, tuple):
        return tuple([map_leaves(leaf, function) for leaf in value])
    if isinstance(value, list):
        return [map_leaves(leaf, function) for leaf in value]
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested arguments, in order.

    >>> list(leaves((1, [2, None])))
    [1, 2, None]
    """
    if isinstance(value, tuple | list):
        for leaf in value:
            yield from leaves(leaf)
    else:
        yield value


class Slot(int):
    """The index of a tensor on a tape.

    >>> [Slot(2), 2]
    [@2, 2]
    """

    def __repr__(self) -> str:
        return f"@{int(self)}"


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation: its arguments (with slots in place of tensors), the slots of its
    results, and the Python numbers that it returned (`scalars`)."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]
    scalars: tuple[Any, ...]
    # indices of the tensors in the returned tuple, or None if the operation returned a
    # single value
    places: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The operation without its overload: `aten::add.Tensor` is `add`."""
        return self.op._schema.name.removeprefix("aten::")

    @property
    def reads_number(self) -> bool:
        return any(scalar is not None for scalar in self.scalars)

    def of(self, slot: Callable[[Any], Any], results: tuple[Slot, ...]) -> Entry:
        """Return the same operation with other slots. `slot` maps each old argument to
        a new one, and `results` are the new slots of results."""
        kwargs = {name: map_leaves(value, slot) for name, value in self.kwargs.items()}
        return Entry(
            self.op,
            map_leaves(self.args, slot),
            kwargs,
            results,
            self.scalars,
            self.places,
        )

    @cached_property
    def new_slots(self) -> frozenset[Slot]:
        """The slots of results, except arguments that the operation returns."""
        return frozenset(self.results) - frozenset(self.slots)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        arguments = leaves((self.args, *self.kwargs.values()))
        return tuple([leaf for leaf in arguments if isinstance(leaf, Slot)])


def reached(entries: Iterable[Entry], start: Iterable[Slot]) -> frozenset[Slot]:
    slots = set(start)
    for entry in entries:
        if not slots.isdisjoint(entry.slots):
            slots.update(entry.results)
    return frozenset(slots)


def digest(values: Iterable[Tensor], label: str = "") -> bytes:
    """Return the sha256 of the elements of some tensors and a text.

    >>> ones = torch.ones(2)
    >>> digest([ones]) == digest([ones.clone()]), digest([ones]) == digest([2 * ones])
    (True, False)
    """
    hashed = sha256(label.encode())
    for value in values:
        flat = value.detach().reshape(-1).cpu()
        # `view` needs stride 1, but a tensor with one element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
        hashed.update(flat.view(torch.uint8).numpy().tobytes())
    return hashed.digest()


@dataclass(frozen=True, eq=False)
class Tape:
    """The recorded operations in order, the value of every slot, and the slots of
    weights, inputs, output and random numbers."""

    entries: tuple[Entry, ...]
    values: tuple[Tensor, ...]
    weights: dict[Slot, str]
    arguments: Any  # the inputs, with slots in place of tensors
    output: Slot
    # True if an operation wrote in place, so that autograd cannot differentiate with
    # respect to every slot
    overwrites: bool
    # slots of random numbers, which were drawn for the whole batch
    drawn: tuple[Slot, ...] = ()
    # True if the function runs on this batch only, with every example at its index
    whole_batch: bool = False

    def __getitem__(self, slot: Slot) -> Tensor:
        return self.values[slot]

    @property
    def needs_whole_batch(self) -> bool:
        """True if the function can only run on the whole batch,
        with the examples in order."""
        return self.whole_batch or bool(self.drawn)

    @cached_property
    def inputs(self) -> tuple[Slot, ...]:
        """The slots of the input tensors and of random numbers."""
        given = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Slot)]
        return (*given, *self.drawn)

    @property
    def given(self) -> Inputs:
        """The inputs for which the function was recorded."""
        inputs: Inputs = tree_map(
            lambda leaf: self[leaf] if isinstance(leaf, Slot) else leaf, self.arguments
        )
        return inputs

    @property
    def recorded_weights(self) -> Weights:
        return {name: self[slot].detach() for slot, name in self.weights.items()}

    @property
    def outputs(self) -> Float[Tensor, "example out"]:
        """The outputs of the function, one row for each example."""
        return self.values[self.output].detach()

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all values, counted as if none shared memory."""
        return sum(value.nbytes for value in self.values)

    @property
    def bytes_per_example(self) -> float:
        """The bytes of values that depend on the inputs, for each example."""
        values = {
            storage(value): value.untyped_storage().nbytes()
            for value in map(self.__getitem__, self.from_inputs)
        }
        # an input may be a few rows of a large tensor; count only these rows
        for value in map(self.__getitem__, self.inputs):
            values[storage(value)] = min(value.nbytes, value.untyped_storage().nbytes())
        return sum(values.values()) / examples(self.given)

    @cached_property
    def structure(self) -> str:
        """The operations, slots, numbers, shapes, dtypes and devices, as text. If two
        tapes have equal structures, their values can be compared slot by slot."""
        wiring = [
            (entry.op, entry.args, entry.kwargs, entry.scalars)
            for entry in self.entries
        ]
        kinds = [
            (tuple(value.shape), value.dtype, value.device) for value in self.values
        ]
        return repr((wiring, kinds, self.output, self.drawn))

    @cached_property
    def structure_digest(self) -> bytes:
        return digest((), self.structure)

    @cached_property
    def made(self) -> tuple[Slot, ...]:
        """The slots of all results of operations."""
        return tuple(
            dict.fromkeys(slot for entry in self.entries for slot in entry.results)
        )

    @cached_property
    def constants(self) -> tuple[Slot, ...]:
        """Slots that are neither weights, inputs, nor results of operations,
        such as buffers."""
        return tuple(
            slot
            for slot in self.outside
            if slot not in self.weights and slot not in self.inputs
        )

    @cached_property
    def program_digest(self) -> bytes:
        """A digest of the structure, the arguments and the constants. Tapes with the
        same digest compute their values from weights and inputs in the same way."""
        label = repr((self.structure_digest, self.weights, self.arguments))
        return digest((self[slot] for slot in self.constants), label)

    @property
    def eps(self) -> float:
        """The largest machine epsilon of the values that depend on weights."""
        kinds = {self[slot].dtype for slot in self.from_weights}
        return max(
            torch.finfo(kind).eps
            for kind in kinds
            if kind.is_floating_point or kind.is_complex
        )

    def pruned(self) -> Tape:
        """Return the tape without unneeded entries and values. An entry is needed if it
        affects the output, or returns a Python number that the function may use."""
        needed = {*self.weights, *self.inputs, self.output}
        entries = []
        # Slots that later entries need. If several operations have the same result
        # slot, keep the last operation.
        awaited = {self.output}
        for entry in reversed(self.entries):
            if entry.reads_number or not awaited.isdisjoint(entry.results):
                awaited.difference_update(entry.new_slots)
                awaited.update(entry.slots)
                needed.update(entry.slots, entry.results)
                entries.append(entry)
        nothing = self.values[self.output].new_empty(0)
        values = tuple(
            value if Slot(k) in needed else nothing
            for k, value in enumerate(self.values)
        )
        return replace(self, entries=tuple(reversed(entries)), values=values)

    def refilled(self, values: tuple[Tensor, ...]) -> Tape:
        """Return a tape of the same program with other values. Copy the cached
        properties that depend only on the program."""
        other = replace(self, values=values, overwrites=False)
        vars(other).update({name: getattr(self, name) for name in OF_A_PROGRAM})
        return other

    @cached_property
    def is_complex(self) -> bool:
        return any(value.is_complex() for value in self.values)

    @cached_property
    def outside(self) -> tuple[Slot, ...]:
        """Slots that are not the result of an operation: weights, inputs,
        buffers and constants."""
        made = {slot for entry in self.entries for slot in entry.new_slots}
        used = {
            slot for entry in self.entries if entry.new_slots for slot in entry.slots
        }
        return tuple(sorted({*self.weights, *self.inputs, self.output, *used} - made))

    @cached_property
    def from_inputs(self) -> frozenset[Slot]:
        """The slots of values that depend on the inputs."""
        return self.reached(self.inputs)

    @cached_property
    def chooses(self) -> bool:
        """True if Python read numbers that depend on the inputs.
        The function may have branched on them."""
        return any(
            entry.reads_number and not self.from_inputs.isdisjoint(entry.slots)
            for entry in self.entries
        )

    @cached_property
    def operations(self) -> frozenset[str]:
        return frozenset(str(entry.op) for entry in self.entries)

    @cached_property
    def from_weights(self) -> frozenset[Slot]:
        """The slots of values that depend on the weights."""
        return self.reached(self.weights)

    def reached(self, start: Iterable[Slot]) -> frozenset[Slot]:
        """Return the slots of values that depend on the slots `start`."""
        return reached(self.entries, start)


OF_A_PROGRAM = (
    "structure",
    "structure_digest",
    "program_digest",
    "nbytes",
    "inputs",
    "made",
    "is_complex",
    "outside",
    "constants",
    "from_inputs",
    "from_weights",
)
"""Properties that are equal for all tapes with the same `program_digest`."""


def is_integer(value: Tensor) -> bool:
    """Return True if a tensor holds integers or booleans."""
    return not (value.is_floating_point() or value.is_complex())


def storage(value: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return value.untyped_storage().data_ptr()
