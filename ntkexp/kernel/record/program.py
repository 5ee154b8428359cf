"""Programs: compile a recorded computation to a Python function
that runs it again on new values.

The recording is a sequence of operations that overwrite nothing. It becomes a program in
four steps:

    simplify     run the same operation on the same values once; do not recompute known values
    prune        run only operations that results need; values independent of inputs are constants
    overwrite    let a sum or a product overwrite an argument that no later operation needs
    compile      write one line of Python for each operation; free a value after its last use

The computation may have read numbers from tensors and branched on them, for example if
two masks are equal. A program repeats the recorded branch. If such a number differs from
the recording, the program is invalid for the new values."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor
from torch._ops import OpOverload

from ntkexp.kernel.record.convolution import convolve
from ntkexp.kernel.record.recorder import NotPure, Recorder, writes
from ntkexp.kernel.record.tape import Entry, Slot, Tape, reached, storage

aten = torch.ops.aten


class AssumptionFailed(Exception):
    """Raised if a number that the program reads, or a shape,
    differs from the recording."""


@dataclass(frozen=True, eq=False)
class Program:
    """Operations from inputs to results, compiled to a Python function. `run` raises
    `AssumptionFailed` if the recording is invalid for the given values."""

    function: Function
    constants: tuple[Tensor, ...]
    read: list[Any]  # numbers that the computation read from tensors
    shapes: list[torch.Size]

    def run(self, fed: Sequence[Tensor]) -> list[Tensor]:
        results, read = self.function(*fed, *self.constants)
        if read != self.read or [result.shape for result in results] != self.shapes:
            raise AssumptionFailed
        return results


def trace(
    act: Callable[[], list[Tensor]], fed: Sequence[Tensor], tapes: Sequence[Tape] = ()
) -> Program:
    """Run `act` once, and return its operations as a program from the tensors `fed` to
    the results of `act`.

    `fed` includes all values on `tapes`, so that the program need not compute them
    again. Raise NotPure if `act` writes into a tensor.
    """
    with Recorder() as recorder:
        slots = [recorder.slot(value) for value in fed]
        known = []
        for tape in tapes:

            def slot(leaf: Any, tape: Tape = tape) -> Any:
                if isinstance(leaf, Slot):
                    return recorder.slot(tape[leaf])
                return leaf

            known += [
                entry.of(slot, tuple(map(slot, entry.results)))
                for entry in tape.entries
            ]
        results = [recorder.slot(result) for result in act()]
    if any(writes(entry.op) for entry in recorder.entries):
        raise NotPure
    return program(recorder.entries, recorder.values, slots, results, known)


def program(
    entries: Sequence[Entry],
    values: Sequence[Tensor],
    fed: Sequence[Slot],
    results: Sequence[Slot],
    known: Sequence[Entry] = (),
) -> Program:
    """Compile a program that computes `results` from the slots `fed`. `known` are the
    operations that computed some of the tensors in `fed`."""
    # run no operation twice
    simplifier = Simplifier(values)
    simplifier.simplify(known)
    entries = simplifier.simplify(entries)
    results = [simplifier.slot(slot) for slot in results]
    # keep only the operations that results need and that depend on inputs
    moving = reached(entries, fed)
    needed = set(results)
    needed_entries = []
    for entry in reversed(entries):
        if not moving.isdisjoint(entry.slots) and (
            entry.reads_number or not needed.isdisjoint(entry.results)
        ):
            needed.update(entry.slots)
            needed_entries.append(entry)
    needed_entries = needed_entries[::-1]
    made = {slot for entry in needed_entries for slot in entry.results}
    constants = sorted(needed - made - set(fed))
    # overwrite values that no later operation needs
    source = Source(
        needed_entries,
        [*fed, *constants],
        results,
        overwritten(needed_entries, values, {*fed, *constants, *results}),
    )
    shapes = [values[slot].shape for slot in results]
    held = tuple(values[slot].detach() for slot in constants)
    return Program(source.function(), held, list(source.read.values()), shapes)


# Simplification. No operation overwrites a value, so the same operation on the same
# values has the same result.


# operations that return their argument if nothing is overwritten
RETURNS_ARGUMENT = ("detach", "alias", "lift_fresh")
RESHAPED = (aten.view.default, aten._unsafe_view.default)
# operations that return their argument if they keep its shape
OF_ONE_SHAPE = (
    *RESHAPED,
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
)


@dataclass
class Simplifier:
    """The slots that are known to hold equal values, among all results so far."""

    values: Sequence[Tensor]
    # for each slot that equals an earlier slot: the first such slot
    same: dict[Slot, Slot] = field(default_factory=dict)
    # result slots of earlier operations, by operation and arguments
    earlier: dict[tuple[OpOverload, str], tuple[Slot, ...]] = field(
        default_factory=dict
    )
    # the tensor whose elements each reshaped view contains
    bases: dict[Slot, Slot] = field(default_factory=dict)

    def slot(self, leaf: Any) -> Any:
        """Return the first slot that holds the same value. Return arguments that are
        not slots unchanged."""
        if isinstance(leaf, Slot):
            return self.same.get(leaf, leaf)
        return leaf

    def simplify(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the operations that still have to run, in order."""
        simplified = []
        for original in entries:
            entry = (
                original
                if self.same.keys().isdisjoint(original.slots)
                else original.of(self.slot, original.results)
            )
            # a view of a view is a view of the original tensor
            if entry.op in RESHAPED:
                value, *shape = entry.args
                base = self.bases[entry.results[0]] = self.bases.get(value, value)
                entry = replace(entry, args=(base, *shape))
            # the result may be the argument itself, or the result of an earlier
            # operation
            is_argument = entry.name in RETURNS_ARGUMENT or (
                entry.op in OF_ONE_SHAPE
                and self.values[entry.results[0]].shape
                == self.values[entry.slots[0]].shape
            )
            # compare texts, because slot 2 equals the number 2, but has the text @2
            key = (entry.op, repr((entry.args, entry.kwargs)))
            known = entry.slots[:1] if is_argument else self.earlier.get(key)
            if known is None:
                self.earlier[key] = entry.results
                simplified.append(entry)
            else:
                self.same.update(zip(entry.results, known, strict=True))
        return simplified


# Overwriting. Writing a result to new memory takes several times as long as the
# arithmetic. An elementwise operation in IN_PLACE may overwrite one of its arguments
# under three conditions: the program itself has computed the argument, no later
# operation reads its memory, and the result has the same shape, layout and dtype.
# Results are bitwise equal, because these operations round each element independently.
# (Without overwriting, a step of `python -m tests.bench steps` takes 15–34 % longer for
# the MLP, 5–12 % for the CNN and the transformer.)


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
# operations whose two arguments may be exchanged, unless `add` has a factor alpha
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
# operations that may return views, although their schemas do not say so
PERHAPS_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")


def overwritten(
    entries: Sequence[Entry], values: Sequence[Tensor], others: Iterable[Slot]
) -> dict[Slot, Slot]:
    """For each operation that may overwrite an argument, return the slot of this
    argument, by the slot of the result. `others` holds inputs, constants and results,
    which must not be overwritten."""
    homes = memory_homes(entries, values)
    # go from the last operation to the first; a home is free if no later operation
    # needs it
    needed = {homes.get(slot, slot) for slot in others}
    targets = {}
    for entry in reversed(entries):
        used = [homes.get(slot, slot) for slot in entry.slots]
        if entry.op in IN_PLACE:
            result = values[entry.results[0]]
            # Try the first argument last, so that it wins if both arguments can be
            # overwritten. Overwriting the first argument is fastest.
            for slot in entry.args[1::-1]:
                if not isinstance(slot, Slot):
                    continue
                home = homes.get(slot, slot)
                is_free = home not in needed and used.count(home) == 1
                if is_free and can_hold(values[slot], result):
                    targets[entry.results[0]] = slot
        needed.update(used)
    return targets


def memory_homes(
    entries: Sequence[Entry], values: Sequence[Tensor]
) -> dict[Slot, Slot]:
    """Return the home of each slot that shares its memory with an earlier slot, or may
    share it. The home is the first slot with this memory."""
    homes: dict[Slot, Slot] = {}
    for entry in entries:
        declared = any(
            result.alias_info is not None for result in entry.op._schema.returns
        )
        is_view = bool(entry.slots) and (declared or entry.name in PERHAPS_VIEWS)
        places = {storage(values[slot]): slot for slot in entry.slots}
        for result in entry.results:
            base = entry.slots[0] if is_view else places.get(storage(values[result]))
            if base is not None:
                homes[result] = homes.get(base, base)
    return homes


def can_hold(argument: Tensor, result: Tensor) -> bool:
    """Return True if the argument occupies its whole storage, in order, and has the
    layout of the result."""
    fills = argument.untyped_storage().nbytes() == argument.nbytes > 0
    return argument.is_contiguous() and fills and has_layout_of(result, argument)


def has_layout_of(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


# If possible, programs call functions of torch, because calling an operation object of
# ATen takes twice as long.


def same(one: Tensor, other: Tensor) -> bool:
    """Compare like `torch.equal`. But if both tensors show the same memory, return True
    at once. Then nan equals nan, and there is no wait for a device.

    >>> x = torch.ones(2, 3)
    >>> same(x, x.view(2, 3)), same(x, x.clone()), same(x, torch.zeros(2, 3)), same(x, x.t())
    (True, True, False, False)
    """
    return (
        has_layout_of(one, other) and one.data_ptr() == other.data_ptr()
    ) or torch.equal(one, other)


OF_TENSORS = """
    abs.default add.Tensor addcmul.default addmm.default any.default bmm.default cat.default clamp_min.default
    clone.default constant_pad_nd.default div.Tensor eq.Scalar erf.default exp.default gt.Scalar
    index_copy.default index_select.default le.Scalar lerp.Scalar lt.Scalar maximum.default mean.dim minimum.default
    mm.default mul.Tensor native_group_norm.default native_layer_norm.default neg.default permute.default
    pow.Tensor_Scalar relu.default rsqrt.default rsub.Scalar select.int sigmoid.default sign.default sqrt.default
    squeeze.dim stack.default sub.Tensor sum.dim_IntList t.default tanh.default transpose.int unsqueeze.default
    where.self
"""
OP_FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    getattr(getattr(aten, packet), overload): getattr(torch, packet)
    for packet, overload in (name.split(".") for name in OF_TENSORS.split())
} | {aten.convolution.default: convolve, aten.equal.default: same}
OP_METHODS: dict[OpOverload, str] = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.expand.default: "expand",
}


# The text of a program as a Python function. Arguments that cannot be written as a
# literal, such as a dtype, become global names of the function. Tracebacks show the
# line that failed.


SOURCE_NAMES = (f"<program {k}>" for k in count())

Function: TypeAlias = Callable[..., tuple[list[Tensor], list[Any]]]
"""A compiled program: from tensors to results,
and to the numbers that the program reads."""


class Source:
    """The Python text of a program. `over` maps the result of an operation to the
    argument that the operation overwrites.

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

    def __init__(
        self,
        entries: Sequence[Entry],
        fed: Sequence[Slot],
        results: Sequence[Slot],
        over: Mapping[Slot, Slot] | None = None,
    ) -> None:
        self.over = over or {}
        # operations and constants, by name
        self.known: dict[str, Any] = {}
        # numbers that operations give to Python, by name
        self.read: dict[str, Any] = {}
        # free the values that no later operation needs
        needed = set(results)
        forgotten = []
        for entry in reversed(entries):
            gone = dict.fromkeys(
                slot for slot in (*entry.slots, *entry.results) if slot not in needed
            )
            needed.update(gone)
            names = "".join(f"v{slot:d} = " for slot in gone)
            forgotten.append(f"; {names}None" if gone else "")
        # if a tensor is an input twice, use its last name
        last = {slot: k for k, slot in enumerate(fed)}
        inputs = ", ".join(
            f"v{slot:d}" if last[slot] == k else f"_{k}" for k, slot in enumerate(fed)
        )
        lines: list[str] = []
        for entry, forget in zip(entries, reversed(forgotten), strict=True):
            outcome = self.outcome(len(lines), entry)
            lines.append(f"{outcome} = {self.call(entry)}{forget}")
        end = f"return {self.argument(list(results))}, [{', '.join(self.read)}]"
        self.text = f"def program({inputs}):\n    " + "\n    ".join([*lines, end])

    def function(self) -> Function:
        file = next(SOURCE_NAMES)
        exec(compile(self.text, file, "exec"), self.known)
        made: Function = self.known.pop("program")
        linecache.cache[file] = (
            len(self.text),
            None,
            self.text.splitlines(keepends=True),
            file,
        )
        finalize(made, linecache.cache.pop, file, None)
        return made

    def outcome(self, place: int, entry: Entry) -> str:
        """Return a name for each tensor and each number
        that an operation returns, in order."""
        slots = iter(entry.results)
        numbers = iter(entry.scalars)
        names = []
        tensors = range(len(entry.results)) if entry.places is None else entry.places
        for k in range(len(entry.results) + len(entry.scalars)):
            name = f"v{next(slots):d}" if k in tensors else f"n{place}_{k}"
            if k not in tensors and (number := next(numbers)) is not None:
                self.read[name] = number
            names.append(name)
        if entry.places is None:
            return ", ".join(names)
        return "".join(f"{name}, " for name in names).rstrip()

    def call(self, entry: Entry) -> str:
        """Return the call of an operation, as a method of its first argument
        or as a function."""
        over = self.over.get(entry.results[0]) if entry.results else None
        args = entry.args
        method = None
        exchanged = entry.op in COMMUTATIVE and not entry.kwargs
        if over is None:
            method = OP_METHODS.get(entry.op)
        elif args[0] == over or exchanged:
            args = args if args[0] == over else args[::-1]
            method = IN_PLACE[entry.op]
        texts = [self.argument(value) for value in args]
        texts += [
            f"{name}={self.argument(value)}" for name, value in entry.kwargs.items()
        ]
        if method is not None:
            return f"{texts[0]}.{method}({', '.join(texts[1:])})"
        if over is not None:
            texts.append(f"out={self.argument(over)}")
        if entry.op in OP_FUNCTIONS:
            operation = self.name(OP_FUNCTIONS[entry.op], entry.name)
        else:
            operation = self.name(
                entry.op, f"{entry.name}_{entry.op._overloadname}".replace("::", "_")
            )
        return f"{operation}({', '.join(texts)})"

    def argument(self, value: Any) -> str:
        """Return the text of an argument. Write tuples as lists,
        which torch accepts too."""
        if isinstance(value, Slot):
            return f"v{value:d}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.argument, value))}]"
        if type(value) in (int, bool, str, type(None)) or (
            type(value) is float and isfinite(value)
        ):
            return repr(value)
        return self.name(value, f"c{len(self.known)}")

    def name(self, value: Any, name: str) -> str:
        if self.known.setdefault(name, value) is value:
            return name
        return self.name(value, f"{name}_")
