"""The program cache: how a function is read is worked out in the first steps of a run, and carried out in all others.

Recording a function and replaying its differences goes through Python at every operation, and costs small networks far
more than their arithmetic. At other weights both do the same with other numbers, so each becomes a program: one from
weights and inputs to the values on a tape, and one from the values at the ends of a step to its features. A program is
held against the ordinary way when it is made, and again with the next values, which shows a constant that is none. One
that does not hold is not used, nor is one made of a tape so large that Python is hardly felt.

A program is kept by what it is of, never by where that lies in memory: by the digest of the tape's operations, shapes
and constants, and of who owns which row. Where values route rows every step may have other owners: a program is written
for what comes a second time, and the oldest are forgotten. Both ways run the same operations, so that a run that is
resumed has the same bits, whatever it was that was read in the ordinary way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.features.blocks import Features
from ntkexp.kernel.read.outputs import (
    Answers,
    Mixtures,
    features_mould,
    fed_slots,
    fill_features,
    fill_tape,
    parts,
    tape_mould,
    varying,
)
from ntkexp.kernel.record.memory import is_out_of_memory
from ntkexp.kernel.record.program import DoesNotHold, Program, program, same, trace
from ntkexp.kernel.record.recorder import NotPure
from ntkexp.kernel.record.tape import Tape, is_whole, tensors
from ntkexp.kernel.secant.ownership import Owners
from ntkexp.shapes import Inputs, Weights

LARGEST = 2**28  # bytes on a tape, and as many for each output: all that a replay makes is kept until it is written
TRIALS = 2

T = TypeVar("T", Tape, Features)


@dataclass
class Written(Generic[T]):
    """A program, and the mould that its results fill."""

    program: Program
    mould: T
    fill: Callable[[T, Sequence[Tensor], Sequence[Tensor]], T]
    trials: int = TRIALS  # comparisons that are left

    def run(self, fed: Sequence[Tensor]) -> T | None:
        """What the program makes of these values, if it holds."""
        try:
            with torch.no_grad():
                return self.fill(self.mould, fed, self.program.run(fed))
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

    def result(
        self,
        key: Hashable,
        fed: Sequence[Tensor],
        usual: Callable[[], T],
        write: Callable[[], tuple[T, Written[T] | None]],
    ) -> T:
        """What the program gives, or the usual way where there is none that holds."""
        if key not in self.latest.kept:
            expected, written = write()
            return self.tried(key, self.latest.keep(key, written), fed, expected)
        written = self.latest.keep(key, self.latest.kept[key])
        if written is None or written.trials:
            return self.tried(key, written, fed, usual())
        found = written.run(fed)
        return usual() if found is None else found

    def tried(self, key: Hashable, written: Written[T] | None, fed: Sequence[Tensor], expected: T) -> T:
        """What the program gives where it agrees with what is expected; one that does not is never run again."""
        if written is None:
            return expected
        written.trials -= 1
        found = written.run(fed)
        if found is not None and alike(parts(found), parts(expected)):
            return found
        self.latest.keep(key, None)
        return expected


@dataclass
class ProgramCache:
    """The programs of one function, whose buffers and frozen weights stay as they are."""

    tapes: Programs[Tape] = field(default_factory=Programs)
    features: Programs[Features] = field(default_factory=Programs)
    once: Answers[bool] = field(default_factory=Answers)  # what was read of what values route

    def tape(self, weights: Weights, inputs: Inputs, usual: Callable[[], Tape]) -> Tape:
        """What `usual` records."""
        fed = [value.detach() for value in (*weights.values(), *tensors(inputs))]
        key = (tuple(weights), outline(inputs))
        return self.tapes.result(key, fed, usual, lambda: write_tape(usual()))

    def read(
        self,
        start: Tape,
        end: Tape,
        mixtures: Mixtures,
        owned: Owners,
        routed: bool,
        reading: Callable[[Tensor, bool], Features],
    ) -> Features:
        """What `reading` makes of two tapes for the columns of mixtures, one by one or, if asked to, all at once. Where
        values route rows, these may have other owners next time."""

        def usual(columns: Tensor) -> Features:
            return at_once(partial(reading, columns))

        if is_large(start, mixtures.count):
            return reading(mixtures.columns, False)
        key = (start.program, start is end, mixtures.chosen, owned.digest)
        if start.program != end.program or (routed and not self.comes_again(key)):
            return usual(mixtures.columns)
        tapes = [start] if start is end else [start, end]
        fed = [value for tape in tapes for value in varying(tape)]
        fed += [mixtures.columns] if mixtures.chosen is None else []
        return self.features.result(
            key,
            fed,
            lambda: usual(mixtures.columns),
            lambda: write_features(partial(usual, mixtures.columns), fed, tapes),
        )

    def comes_again(self, key: Hashable) -> bool:
        """Whether tapes of this program were read before, with these owners."""
        known = key in self.once.kept
        return self.once.keep(key, known)


def outline(inputs: Inputs) -> str:
    """What inputs are beside the numbers in their tensors."""
    told = kind(inputs) if isinstance(inputs, Tensor) else tree_map(kind, inputs)
    return repr(told)


def kind(leaf: Any) -> Any:
    """What a tensor is beside its numbers; anything else is itself."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two ways of the same computation agree, to what another order of summation changes."""
    return len(found) == len(expected) and all(close(*pair) for pair in zip(found, expected, strict=True))


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


def write_tape(tape: Tape) -> tuple[Tape, Written[Tape] | None]:
    """A tape, and how it follows from weights and inputs."""
    if is_large(tape, tape.outputs.shape[1]) or any(entry.op._schema.is_mutable for entry in tape.entries):
        return tape, None
    written = program(tape.entries, tape.values, fed_slots(tape), tape.made)
    return tape, Written(written, tape_mould(tape), fill_tape)


def write_features(
    usual: Callable[[], Features], fed: Sequence[Tensor], tapes: Sequence[Tape]
) -> tuple[Features, Written[Features] | None]:
    """Features, and how they follow from the values on tapes."""
    found: list[Features] = []

    def act() -> list[Tensor]:
        found[:] = [usual()]
        return parts(found[0])

    try:
        written = trace(act, fed, tapes)
    except NotPure:
        return found[0] if found else usual(), None
    return found[0], Written(written, features_mould(found[0]), fill_features)


def at_once(usual: Callable[[bool], Features]) -> Features:
    """Features of all outputs at once, where torch can."""
    try:
        with warnings.catch_warnings(action="error"):  # a warning says that torch would go output by output
            return usual(True)
    except (RuntimeError, UserWarning) as error:
        if is_out_of_memory(error):
            raise
        return usual(False)
