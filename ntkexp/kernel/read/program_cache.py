"""The program cache: how a function is read is worked out in the first steps of a run, and carried out in all others.

Recording a function and replaying its differences goes through Python at every operation, and costs small networks far
more than their arithmetic. At other weights both do the same with other numbers, so each becomes a program: one from
weights and inputs to the values on a tape, and one from the values at the ends of a step to its features. A program is
compared with the ordinary way when it is made, and again with the next values, which shows a constant that is none. One
that does not hold is not used, nor is one made of a tape so large that Python is hardly felt.

A program is kept by what it is of, never by where that lies in memory: by the digest of the tape's operations, shapes
and constants, and of who owns which row. Where values route rows every step may have other owners: a program is written
for what comes a second time, and the oldest are forgotten. Both ways run the same operations, so that a run that is
resumed has the same bits, whatever it was that was read in the ordinary way.
"""

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
from ntkexp.kernel.record.program import DoesNotHold, Program, program, same, trace
from ntkexp.kernel.record.recorder import NotPure
from ntkexp.kernel.record.tape import Slot, Tape, is_whole, tensors
from ntkexp.kernel.record.taping import is_out_of_memory, record
from ntkexp.kernel.secant.ownership import Owners
from ntkexp.kernel.secant.replay import Replay
from ntkexp.shapes import Function, Inputs, Weights

# --- Answers: what was found out, for the latest questions.
#
# Where values route rows, by masks, orders or experts, every batch may be a question of its own, and answers are
# as large as what they are about: the oldest are forgotten.


LATEST = 64  # what is remembered: something for every block of a run, where values route rows

A = TypeVar("A")


@dataclass
class Answers(Generic[A]):
    """The latest `room` answers.

    >>> squares = Answers[int](room=2)
    >>> [squares.to(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.kept)
    ([1, 4, 1, 9], [1, 3])
    """

    room: int = field(default_factory=lambda: LATEST)
    kept: OrderedDict[Hashable, A] = field(default_factory=OrderedDict, repr=False)

    def to(self, question: Hashable, find: Callable[[], A]) -> A:
        """The answer to a question; found again if it is not known any more."""
        return self.keep(question, self.kept[question] if question in self.kept else find())

    def keep(self, question: Hashable, answer: A) -> A:
        self.kept[question] = answer
        self.kept.move_to_end(question)
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)
        return answer


# --- What a program is of: the Jacobian of a segment by the difference rules.


@dataclass(frozen=True)
class Request:
    """J̄ between two tapes, or J of one, and for which mixtures of outputs it is read."""

    start: Tape
    end: Tape
    trained: frozenset[str]
    owned: Owners
    mixtures: Mixtures
    as_copies: bool = False  # of tables that are read once, where no program is made

    def read(self, *, at_once: bool) -> Jacobian:
        """The Jacobian in the ordinary way, for all mixtures at once or one after the other."""
        replay = Replay(
            self.start, self.end, self.trained, self.owned.constants, pullback_only=True
        )
        columns = self.mixtures.columns
        pulled = pull_back(
            replay.delta, replay.uses, self.owned, replay.leaves, columns, at_once=at_once
        )
        return assemble(pulled, as_copies=self.as_copies)

    def read_at_once(self) -> Jacobian:
        try:
            with warnings.catch_warnings(
                action="error"
            ):  # a warning says that torch would go output by output
                return self.read(at_once=True)
        except (RuntimeError, UserWarning) as error:
            if is_out_of_memory(error):
                raise
            return self.read(at_once=False)

    @property
    def tapes(self) -> list[Tape]:
        return [self.start] if self.start is self.end else [self.start, self.end]

    @property
    def fed(self) -> list[Tensor]:
        """The values that weights or inputs decide; all others are the same on every tape of a program."""
        fed = [tape[slot] for tape in self.tapes for slot in (*fed_slots(tape), *tape.made)]
        return [*fed, self.mixtures.columns] if self.mixtures.chosen is None else fed


# --- Programs: each is compared with the ordinary way when it is written, and again with the next values.


LARGEST = (
    2**28
)  # bytes on a tape, and as many for each output: all that a replay makes is kept until it is written
TRIALS = 2

T = TypeVar("T", Tape, Jacobian)


@dataclass
class Written(Generic[T]):
    """A program, and the template that its results fill."""

    program: Program
    template: T
    trials: int = TRIALS  # comparisons that are left

    def run(self, fed: Sequence[Tensor]) -> T | None:
        """What the program makes of these values, if it holds."""
        try:
            with torch.no_grad():
                return filled(self.template, fed, self.program.run(fed))
        except DoesNotHold:
            return None
        except RuntimeError as error:  # what is laid out otherwise in memory has no such view
            if is_out_of_memory(error):
                raise
            return None


@dataclass
class Programs(Generic[T]):
    """The latest programs by what they are of; None where there is none to rely on."""

    latest: Answers[Written[T] | None] = field(default_factory=Answers)

    def run(self, key: Hashable, fed: Sequence[Tensor]) -> T | None:
        """What a program gives that has been compared often enough, if there is one that holds."""
        if key not in self.latest.kept:
            return None
        written = self.latest.keep(key, self.latest.kept[key])
        return None if written is None or written.trials else written.run(fed)

    def compare(self, key: Hashable, fed: Sequence[Tensor], expected: T) -> T:
        """What the program gives where it agrees with what is expected; one that does not is never run again."""
        written = self.latest.kept[key]
        if written is None or not written.trials:
            return expected
        written.trials -= 1
        found = written.run(fed)
        if found is not None:  # it agrees, to what another order of summation changes
            one, other = parts(found), parts(expected)
            if len(one) == len(other) and all(map(close, one, other)):
                return found
        self.latest.keep(key, None)
        return expected


@dataclass
class ProgramCache:
    """The programs of one function, whose buffers and frozen weights stay as they are."""

    tapes: Programs[Tape] = field(default_factory=Programs)
    jacobians: Programs[Jacobian] = field(default_factory=Programs)
    once: Answers[bool] = field(default_factory=Answers)  # what was read of what values route

    def record(
        self, function: Function, weights: Weights, inputs: Inputs, *, whole: bool = False
    ) -> Tape:
        """The tape of the function, by its program."""
        fed = [value.detach() for value in (*weights.values(), *tensors(inputs))]
        key = (tuple(weights), outline(inputs))
        if (found := self.tapes.run(key, fed)) is not None:
            return found
        tape = record(function, weights, inputs, whole=whole).pruned()
        if key not in self.tapes.latest.kept:
            self.tapes.latest.keep(key, write_tape(tape))
        return self.tapes.compare(key, fed, tape)

    def read(self, request: Request, *, routed: bool) -> Jacobian:
        """The Jacobian that is requested. Where values route rows, these may have other owners next time."""
        start, end, mixtures = request.start, request.end, request.mixtures
        if is_large(start, mixtures.count):
            return request.read(at_once=False)
        request = replace(request, as_copies=False)  # the template that a program fills has rows
        key = (start.program, start is end, mixtures.chosen, request.owned.digest)
        if start.program != end.program:
            return request.read_at_once()
        if routed:
            known = key in self.once.kept
            if not self.once.keep(key, known):
                return request.read_at_once()
        fed = request.fed
        if (found := self.jacobians.run(key, fed)) is not None:
            return found
        if key in self.jacobians.latest.kept:
            made = request.read_at_once()
        else:
            made, written = write_jacobian(request, fed)
            self.jacobians.latest.keep(key, written)
        return self.jacobians.compare(key, fed, made)


def outline(inputs: Inputs) -> str:
    """What inputs are beside the numbers in their tensors."""

    def kind(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

    return repr(kind(inputs) if isinstance(inputs, Tensor) else tree_map(kind, inputs))


def close(found: Tensor, expected: Tensor) -> bool:
    """Relative to the largest element; where training has diverged there is nothing to compare."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if (equal := same(found, expected)) or is_whole(expected):
        return equal
    size = expected.detach().abs().amax() if expected.numel() else torch.zeros(())
    tolerance = torch.finfo(expected.dtype).eps ** 0.75 * size
    return not size.isfinite() or bool(((found - expected).abs() <= tolerance).all())


def is_large(tape: Tape, outputs: int) -> bool:
    """Whether its operations, as many again for each output, take so long that Python is hardly felt."""
    return tape.nbytes * (1 + outputs) > LARGEST


def write_tape(tape: Tape) -> Written[Tape] | None:
    """How a tape follows from weights and inputs."""
    if is_large(tape, tape.outputs.shape[1]) or any(
        entry.op._schema.is_mutable for entry in tape.entries
    ):
        return None
    written = program(tape.entries, tape.values, fed_slots(tape), tape.made)
    gone, nothing = {*fed_slots(tape), *tape.made}, tape.outputs.new_empty(0)
    template = tape.refilled(
        tuple(nothing if Slot(k) in gone else value for k, value in enumerate(tape.values))
    )
    return Written(written, template)


def write_jacobian(
    request: Request, fed: Sequence[Tensor]
) -> tuple[Jacobian, Written[Jacobian] | None]:
    """A Jacobian, and how it follows from the values on tapes."""
    found: list[Jacobian] = []

    def act() -> list[Tensor]:
        found[:] = [request.read_at_once()]
        return parts(found[0])

    request.mixtures.columns  # noqa: B018  # made before, as a constant of the program
    try:
        written = trace(act, fed, request.tapes)
    except NotPure:
        return found[0] if found else request.read_at_once(), None
    empty = [value.new_empty([0] * value.dim()) for value in parts(found[0])]
    return found[0], Written(written, filled(found[0], (), empty))


# --- Templates: tapes and Jacobians without the numbers that a program makes.


def fed_slots(tape: Tape) -> list[Slot]:
    return [*tape.weights, *tape.inputs]


def parts(made: Tape | Jacobian) -> list[Tensor]:
    """What is compared: all tensors of a Jacobian; the outputs of a tape, to which all else on it leads.

    Between them there may be memory that has not been written yet.
    """
    if isinstance(made, Tape):
        return [made.outputs]
    return [value for block in made.blocks for value in arrays(block).values()]


def filled(template: T, fed: Sequence[Tensor], found: Sequence[Tensor]) -> T:
    """Another tape of the same program, or another Jacobian of the same function."""
    if isinstance(template, Jacobian):
        left = iter(found)
        blocks = tuple(
            type(b)(**(vars(b) | {name: next(left) for name in arrays(b)})) for b in template.blocks
        )
        return replace(template, blocks=blocks)
    values = list(template.values)
    filled_slots = (*template.weights, *template.inputs, *template.made)
    for slot, value in zip(filled_slots, (*fed, *found), strict=True):
        values[slot] = value
    return template.refilled(tuple(values))
