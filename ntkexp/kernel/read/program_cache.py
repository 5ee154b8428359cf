"""Compiled programs that record a function and read its Jacobian, without Python's
overhead at each operation.

To record a function and to replay its differences, Python code runs at every operation.
For small networks, this takes far longer than the arithmetic. But every training step
runs the same operations on other numbers. So two programs are compiled: one computes the
values on a tape from weights and inputs, and the other computes a Jacobian from the
values at both ends of a step.

A new program is compared with the ordinary computation twice: on its first values, and
on the next ones. The second comparison detects values that are wrongly treated as
constant. A program that fails is never used again. For large tapes, where Python's
overhead does not matter, no program is compiled.

The key of a program is a digest of the tape's operations, shapes and constants, and of
the owners (`secant.ownership`: the example that each row belongs to). If indices or
masks choose rows of data (routing), the owners may differ at each step. Then a program
is compiled only when the same owners occur for the second time. The oldest programs are
dropped.

Programs run the same operations as the ordinary computation, so a resumed run gives
bitwise equal results."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.features.assemble import assemble, pull_back
from ntkexp.kernel.features.jacobian import Jacobian, arrays
from ntkexp.kernel.read.plan import Mixtures
from ntkexp.kernel.record.program import AssumptionFailed, Program, program, same, trace
from ntkexp.kernel.record.recorder import NotPure
from ntkexp.kernel.record.tape import Slot, Tape, is_integer, tensors
from ntkexp.kernel.record.taping import is_out_of_memory, record
from ntkexp.kernel.secant.ownership import Owners
from ntkexp.kernel.secant.replay import Replay
from ntkexp.shapes import Function, Inputs, Weights

# Capacity of a cache of results. If a function routes by its inputs (by indices or
# masks), each batch of a run may have its own routing, program and entry.
MAX_ANSWERS = 64

A = TypeVar("A")


@dataclass
class LRUCache(Generic[A]):
    """A cache of the `capacity` most recently used values, by key.

    >>> squares = LRUCache[int](capacity=2)
    >>> [squares.get(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.entries)
    ([1, 4, 1, 9], [1, 3])
    """

    capacity: int = field(default_factory=lambda: MAX_ANSWERS)
    entries: OrderedDict[Hashable, A] = field(default_factory=OrderedDict, repr=False)

    def get(self, key: Hashable, find: Callable[[], A]) -> A:
        """Return the cached value under this key, or compute it with `find`."""
        if key in self.entries:
            return self.put(key, self.entries[key])
        return self.put(key, find())

    def put(self, key: Hashable, value: A) -> A:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
        return value


@dataclass(frozen=True)
class Request:
    """A request for a Jacobian of some weighted sums of outputs: the secant Jacobian
    between two tapes, or the Jacobian at one tape."""

    start: Tape
    end: Tape
    trained: frozenset[str]
    owned: Owners
    mixtures: Mixtures
    # allow `Copies` blocks for lookup tables. Programs ignore this option.
    as_copies: bool = False

    def read(self, *, at_once: bool) -> Jacobian:
        """Compute the Jacobian without a program. With `at_once`, run one backward pass
        for all outputs (or mixtures of outputs). Otherwise run one pass for each."""
        replay = Replay(
            self.start, self.end, self.trained, self.owned.constants, pullback_only=True
        )
        columns = self.mixtures.columns
        pulled = pull_back(
            replay.delta,
            replay.uses,
            self.owned,
            replay.leaves,
            columns,
            at_once=at_once,
        )
        return assemble(pulled, as_copies=self.as_copies)

    def read_at_once(self) -> Jacobian:
        try:
            # raise if torch warns that it would loop over outputs instead
            with warnings.catch_warnings(action="error"):
                return self.read(at_once=True)
        except (RuntimeError, UserWarning) as error:
            if is_out_of_memory(error):
                raise
            return self.read(at_once=False)

    @property
    def tapes(self) -> list[Tape]:
        if self.start is self.end:
            return [self.start]
        return [self.start, self.end]

    @property
    def arguments(self) -> list[Tensor]:
        """The arguments of the program: all values that depend on weights or inputs.
        All other values are the same on every tape of the program."""
        arguments = [
            tape[slot]
            for tape in self.tapes
            for slot in (*argument_slots(tape), *tape.made)
        ]
        if self.mixtures.chosen is None:
            return [*arguments, self.mixtures.columns]
        return arguments


# A program is not compiled if (bytes on the tape) × (1 + number of outputs) exceeds
# this limit, because the replay keeps all intermediate values in memory during
# compilation.
MAX_PROGRAM_BYTES = 2**28
TRIALS = 2  # number of comparisons of a new program with the ordinary computation

T = TypeVar("T", Tape, Jacobian)


@dataclass
class CachedProgram(Generic[T]):
    """A compiled program that computes the values of a tape or a Jacobian. `template`
    is the tape or Jacobian without the computed values."""

    program: Program
    template: T
    # number of remaining comparisons with the ordinary computation
    trials: int = TRIALS

    def run(self, arguments: Sequence[Tensor]) -> T | None:
        """Return the result of the program for these values, or None if it fails."""
        try:
            with torch.no_grad():
                return fill_template(
                    self.template, arguments, self.program.run(arguments)
                )
        except AssumptionFailed:
            return None
        except RuntimeError as error:
            # a view that was recorded may be impossible for other strides
            if is_out_of_memory(error):
                raise
            return None


@dataclass
class Programs(Generic[T]):
    """The most recently used programs, by key. An entry is None if its program has
    failed or could not be compiled."""

    latest: LRUCache[CachedProgram[T] | None] = field(default_factory=LRUCache)

    def run(self, key: Hashable, arguments: Sequence[Tensor]) -> T | None:
        """Run the program under this key if it has passed all comparisons.
        Otherwise return None."""
        if key not in self.latest.entries:
            return None
        cached = self.latest.put(key, self.latest.entries[key])
        if cached is None or cached.trials:
            return None
        return cached.run(arguments)

    def compare(self, key: Hashable, arguments: Sequence[Tensor], expected: T) -> T:
        """Compare the program's result with the expected one. If they agree, return the
        program's result. Otherwise drop the program, and return the expected result."""
        cached = self.latest.entries[key]
        if cached is None or not cached.trials:
            return expected
        cached.trials -= 1
        result = cached.run(arguments)
        if result is not None:  # the two may differ in the order of summation
            one = parts(result)
            other = parts(expected)
            if len(one) == len(other) and all(map(is_close, one, other)):
                return result
        self.latest.put(key, None)
        return expected


@dataclass
class ProgramCache:
    """The programs of one function. Its buffers and frozen weights must not change."""

    tapes: Programs[Tape] = field(default_factory=Programs)
    jacobians: Programs[Jacobian] = field(default_factory=Programs)
    # For Jacobians that depend on routing values (indices, masks). A key is added at
    # the first request, and the second request builds a program.
    requested_before: LRUCache[bool] = field(default_factory=LRUCache)

    def record(
        self,
        function: Function,
        weights: Weights,
        inputs: Inputs,
        *,
        whole_batch: bool = False,
    ) -> Tape:
        """Return a tape of the function. Run a program if one was compiled. Otherwise
        record the function, and compile a program."""
        arguments = [value.detach() for value in (*weights.values(), *tensors(inputs))]
        key = (tuple(weights), input_signature(inputs))
        replayed = self.tapes.run(key, arguments)
        if replayed is not None:
            return replayed
        tape = record(function, weights, inputs, whole_batch=whole_batch).pruned()
        if key not in self.tapes.latest.entries:
            self.tapes.latest.put(key, compile_tape(tape))
        return self.tapes.compare(key, arguments, tape)

    def read(self, request: Request, *, routed: bool) -> Jacobian:
        """Return the requested Jacobian. Run a program if one was compiled.

        Set `routed` if indices or masks choose rows of data,
        so that the owners may differ next time."""
        start = request.start
        end = request.end
        mixtures = request.mixtures
        if is_large(start, mixtures.count):
            return request.read(at_once=False)
        # a program returns rows, not copies
        request = replace(request, as_copies=False)
        key = (
            start.program_digest,
            start is end,
            mixtures.chosen,
            request.owned.digest,
        )
        if start.program_digest != end.program_digest:
            return request.read_at_once()
        if routed:
            known = key in self.requested_before.entries
            if not self.requested_before.put(key, known):
                return request.read_at_once()
        arguments = request.arguments
        jacobian = self.jacobians.run(key, arguments)
        if jacobian is not None:
            return jacobian
        if key in self.jacobians.latest.entries:
            jacobian = request.read_at_once()
        else:
            jacobian, cached = compile_jacobian(request, arguments)
            self.jacobians.latest.put(key, cached)
        return self.jacobians.compare(key, arguments, jacobian)


def input_signature(inputs: Inputs) -> str:
    """Return the structure, shapes, dtypes and devices of inputs, as text."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (leaf.shape, leaf.dtype, leaf.device)
        return leaf

    return repr(kind(inputs) if isinstance(inputs, Tensor) else tree_map(kind, inputs))


def is_close(result: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding, relative to the largest
    element. If this element is not finite, training has diverged. Then return True.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    equal = same(result, expected)
    if equal or is_integer(expected):
        return equal
    size = torch.zeros(())
    if expected.numel():
        size = expected.detach().abs().amax()
    if not size.isfinite():
        return True
    tolerance = torch.finfo(expected.dtype).eps ** 0.75 * size
    return bool(((result - expected).abs() <= tolerance).all())


def is_large(tape: Tape, outputs: int) -> bool:
    """Return True if a tape is so large that Python's overhead does not matter."""
    return tape.nbytes * (1 + outputs) > MAX_PROGRAM_BYTES


def compile_tape(tape: Tape) -> CachedProgram[Tape] | None:
    """Compile a program from weights and inputs to all values on a tape. Return None if
    the tape is large, or if an operation writes in place."""
    if is_large(tape, tape.outputs.shape[1]) or any(
        entry.op._schema.is_mutable for entry in tape.entries
    ):
        return None
    cached = program(tape.entries, tape.values, argument_slots(tape), tape.made)
    computed = {*argument_slots(tape), *tape.made}
    values = list(tape.values)
    for slot in computed:
        values[slot] = tape.outputs.new_empty(0)
    return CachedProgram(cached, tape.refilled(tuple(values)))


def compile_jacobian(
    request: Request, arguments: Sequence[Tensor]
) -> tuple[Jacobian, CachedProgram[Jacobian] | None]:
    """Read a Jacobian. Return it, together with a program that computes it from the
    values on the tapes. The program is None if it cannot be compiled."""
    read_jacobian: list[Jacobian] = []

    def act() -> list[Tensor]:
        read_jacobian[:] = [request.read_at_once()]
        return parts(read_jacobian[0])

    request.mixtures.columns  # noqa: B018  # computed here, so that it is a constant of the program
    try:
        cached = trace(act, arguments, request.tapes)
    except NotPure:
        return read_jacobian[0] if read_jacobian else request.read_at_once(), None
    empty = [value.new_empty([0] * value.dim()) for value in parts(read_jacobian[0])]
    return read_jacobian[0], CachedProgram(
        cached, fill_template(read_jacobian[0], (), empty)
    )


def argument_slots(tape: Tape) -> list[Slot]:
    return [*tape.weights, *tape.inputs]


def parts(made: Tape | Jacobian) -> list[Tensor]:
    """Return the tensors to compare: all tensors of a Jacobian,
    or the outputs of a tape.

    For a tape, only the outputs are compared. Every other value affects them, and some
    of the other values may contain uninitialized memory."""
    if isinstance(made, Tape):
        return [made.outputs]
    return [value for block in made.blocks for value in arrays(block).values()]


def fill_template(
    template: T, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> T:
    """Return the template, a tape or a Jacobian, with these values."""
    if isinstance(template, Jacobian):
        remaining = iter(results)
        blocks = tuple(
            type(b)(**(vars(b) | {name: next(remaining) for name in arrays(b)}))
            for b in template.blocks
        )
        return replace(template, blocks=blocks)
    values = list(template.values)
    slots = (*template.weights, *template.inputs, *template.made)
    for slot, value in zip(slots, (*arguments, *results), strict=True):
        values[slot] = value
    return template.refilled(tuple(values))
