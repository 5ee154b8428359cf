"""A program: a computation that was written down once, simplified, and runs again on new values as a function of
Python.

Whether two tensors hold the same numbers, for which a device is not waited for where they are the same memory.

>>> x = torch.ones(2, 3)
>>> same(x, x.view(2, 3)), same(x, x.clone()), same(x, torch.zeros(2, 3)), same(x, x.t())
(True, True, False, False)

Source: operations as a function of Python, a line for each, that forgets every value after its last use.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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


def same(one: Tensor, other: Tensor) -> bool:
    """What `torch.equal` says, but that a number of no value is the same as itself."""
    return is_same_memory(one, other) or torch.equal(one, other)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both look at the same place in the same way."""
    layout = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return layout and one.data_ptr() == other.data_ptr()


# --- Bindings: functions of torch that run one operation each, and are called in half the time of the operation
# itself.


aten = torch.ops.aten

OF_TENSORS = """
    abs.default add.Tensor addcmul.default addmm.default any.default bmm.default cat.default clamp_min.default
    clone.default constant_pad_nd.default div.Tensor eq.Scalar erf.default exp.default gt.Scalar
    index_copy.default index_select.default le.Scalar lerp.Scalar lt.Scalar maximum.default mean.dim minimum.default
    mm.default mul.Tensor native_group_norm.default native_layer_norm.default neg.default permute.default
    pow.Tensor_Scalar relu.default rsqrt.default rsub.Scalar select.int sigmoid.default sign.default sqrt.default
    squeeze.dim stack.default sub.Tensor sum.dim_IntList t.default tanh.default transpose.int unsqueeze.default
    where.self
"""


def operation(name: str) -> OpOverload:
    """The operation of this name and overload."""
    packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(aten, packet), overload)
    return found


FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    operation(name): getattr(torch, name.split(".")[0]) for name in OF_TENSORS.split()
} | {aten.convolution.default: convolve, aten.equal.default: same}
METHODS: dict[OpOverload, str] = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.expand.default: "expand",
}


# --- Reuse: what a program needs no more is written over.
#
# To fill fresh memory takes several times as long as the arithmetic that fills it. A sum, difference, product,
# quotient, mean or bound may go where one of its arguments is, if the program itself made that argument, nothing
# that comes later looks at its memory, and what is written has the same shape, layout and kind. Bits stay the
# same: these operations round each element by itself.


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


# --- Simplification: a program says nothing twice, and works out nothing that it is fed.
#
# Where nothing is overwritten, the same operation on the same values gives the same. What is fed may be results
# already, those on a tape (the operations that gave them are asked first). A view of the same shape is the value
# itself, and a view of a view is one of what the first was taken from.


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


# --- A program: a computation that was written down once, and runs again on new values.
#
# What was written down is a sequence of operations that overwrite nothing. Of these a program keeps the ones that
# its results need, with all that does not depend on the values fed to it worked out beforehand, and forgets each
# tensor after its last use. Numbers that the computation read from tensors (is this mask the same as that one?)
# may have decided how it went on: if one of them is another than when it was written down, the program does not
# hold.


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
        raise NotPure
    return program(recorder.entries, recorder.values, slots, results, known)


def told(entry: Entry, tape: Tape, recorder: Recorder) -> Entry:
    """An operation on a tape, in the slots that a recorder has for its values."""

    def slot(leaf: Any) -> Any:
        return recorder.slot(tape[leaf]) if isinstance(leaf, Slot) else leaf

    return entry.of(slot, tuple(map(slot, entry.results)))
