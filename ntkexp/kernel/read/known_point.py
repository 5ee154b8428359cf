"""Known points: what it takes to read a point is written down, and done again with other numbers.

Recording a module and pulling back go through Python at every operation, which costs small networks more than their
arithmetic. Where nothing but numbers can change what a module does, both are one program, from weights and inputs to
features, which has the bits of the ordinary way. It is written when a point is read for the second time, and held
against that way twice, as every program is (`program_cache`).

What could be otherwise for other numbers leaves no program: values that decide where rows go, masks, numbers that were
read, draws and writes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.read.parts import fed_slots
from ntkexp.kernel.read.program_cache import Programs, Written, is_large, write_features
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.read.threads import Work
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule

LATEST = 4  # programs, each of other outputs
CONSTANTS = 2**20  # bytes that a program may hold
OPERATIONS = 2**9  # forward, for each output: to write more of them takes a second


@dataclass(frozen=True)
class KnownPoint:
    """A point of a module that was read before: how many outputs there are, and what reading it takes."""

    outputs: int
    work: Work
    programs: Programs[Features] = field(default_factory=lambda: Programs(Answers(LATEST)), repr=False)

    def read(
        self,
        fed: Sequence[Tensor],
        chosen: Sequence[int],
        usual: Callable[[], Features],
        recorded: Callable[[], tuple[Reader, Tape]],
    ) -> Features:
        """What `usual` reads, from weights and inputs."""

        def write() -> tuple[Features, Written[Features] | None]:
            try:
                return write_point(*recorded(), chosen)
            except NoRule:
                return usual(), None

        return self.programs.result(tuple(chosen), fed, usual, write)


def write_point(reader: Reader, tape: Tape, chosen: Sequence[int]) -> tuple[Features, Written[Features] | None]:
    """The features of a point, and how they follow from weights and inputs."""
    usual, many = partial(reader.factored, tape, chosen), len(chosen) * len(tape.entries) > OPERATIONS
    if many or is_large(tape, len(chosen)) or not is_settled(reader, tape):
        return usual(), None
    found, written = write_features(usual, [tape[slot] for slot in fed_slots(tape)], [tape], whole=True)
    if written is not None and sum(constant.nbytes for constant in written.program.constants) > CONSTANTS:
        return found, None
    return found, written


def is_settled(reader: Reader, tape: Tape) -> bool:
    """Whether a tape of other numbers would be the same program."""
    decides = tape.overwrites or tape.drawn or reader.deciding(tape)
    return not decides and not any(entry.reads for entry in tape.entries)
