"""Examples of one side of a kernel, read some at a time: assembled, or use by use where that would not fit.

A point is read so many examples at a time that what is recorded of them fits memory that is at hand. More memory than
that the system hands out page by page, each of them cleared first, which takes longer than most operations on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from warnings import warn

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Assembly, Jacobian, stacked
from ntkexp.kernel.read.program_cache import outline
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape, as_inputs, part
from ntkexp.kernel.record.tape import examples as count_examples
from ntkexp.kernel.secant.call import NoRule
from ntkexp.shapes import Inputs, Weights

AT_ONCE = 2**26  # bytes of a tape
BATCH = 2**25  # bytes of each tape where there are several
FEW = 16  # examples that are recorded without a look at one of them


@dataclass(frozen=True)
class Batches:
    """A point, and inputs; of the first batch there is a tape already."""

    reader: Reader
    weights: Weights
    inputs: Inputs
    places: tuple[slice, ...]
    tape: Tape

    @property
    def examples(self) -> int:
        """How many there are in all batches."""
        return count_examples(self.inputs)

    def tangent(self, chosen: Sequence[int]) -> Jacobian:
        """The Jacobian of all examples; each batch is copied to its place, and its tape forgotten."""
        if len(self.places) == 1:
            return self.reader.assembled(self.tape, chosen)
        whole = Assembly(self.examples)
        for tape in self.tapes():
            if not whole.add(self.reader.assembled(tape, chosen, whole.rows)):  # of another form than those before
                return self.reader.assembled(self.reader.record(self.weights, self.inputs), chosen)
        return whole.jacobian

    def one_by_one(self, chosen: Sequence[int]) -> Jacobian:
        """The same, example by example."""
        if len(self.places) == 1:
            return self.reader.one_by_one(self.tape, chosen)
        whole = Assembly(self.examples)
        for tape in self.tapes():
            whole.add(self.reader.one_by_one(tape, chosen))
        return whole.jacobian

    def tapes(self) -> Iterator[Tape]:
        """One after the other, each forgotten when the next is recorded."""
        yield self.tape
        for place in self.places[1:]:
            yield self.reader.record(self.weights, part(self.inputs, place))


def batches(reader: Reader, weights: Weights, inputs: Inputs) -> Batches:
    """The inputs in batches of equal size, but for one example."""
    given = as_inputs(inputs)
    total, count = count_examples(given), 1
    if total > FEW:
        one = outline(part(given, slice(0, 1)))
        each = reader.findings.sizes.to(one, lambda: reader.record(weights, part(given, slice(0, 2))).bytes_per_example)
        if total * each > AT_ONCE:
            count = min(total // 2, -(-int(total * each) // BATCH))
    places = cut(total, count)
    return Batches(reader, weights, given, places, reader.record(weights, part(given, places[0])))


def cut(total: int, count: int) -> tuple[slice, ...]:
    """Consecutive slices of as many examples each, but for one.

    >>> cut(5, 2)
    (slice(0, 2, None), slice(2, 5, None))
    """
    ends = [k * total // count for k in range(count + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))


# --- Examples that are read use by use: no Jacobian of them all is assembled, no row is as long as the weights.


READ = 0.2e9  # bytes of the values of examples that are read at once
KEPT = 2e9  # bytes of what is read, on either side


@dataclass(frozen=True)
class InTurns:
    """Examples, and the outputs at which they are read; what was read is kept while it fits."""

    reader: Reader
    weights: Weights
    inputs: Inputs
    chosen: Sequence[int]
    any_module: bool = False  # whether those that no rules lead through are read example by example
    kept: dict[tuple[int, int], Jacobian] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """How many there are."""
        return count_examples(self.inputs)

    @cached_property
    def places(self) -> list[slice]:
        """Which examples are read at once: as many each time as differ by one at most."""
        each = self.reader.record(self.weights, part(self.inputs, slice(0, 2))).bytes_per_example
        turns = -(-self.examples // max(2, int(READ / each)))
        return list(cut(self.examples, turns))

    @cached_property
    def groups(self) -> list[list[slice]]:
        """The same, as many together as may be held."""
        count = max(1, int(KEPT / self.jacobian(self.places[0]).nbytes))
        return [self.places[at : at + count] for at in range(0, len(self.places), count)]

    def together(self, group: Sequence[slice]) -> tuple[slice, Jacobian]:
        """The examples of a group, and their Jacobian."""
        return slice(group[0].start, group[-1].stop), stacked([self.jacobian(place) for place in group])

    def jacobian(self, place: slice) -> Jacobian:
        """The Jacobian of these examples, kept while there is room."""
        key = place.start, place.stop
        found = self.kept.get(key)
        if found is None:
            tape = self.reader.record(self.weights, part(self.inputs, place))
            try:
                found = self.reader.use_by_use(tape, self.chosen)
            except NoRule as error:
                if not self.any_module:
                    raise
                warn(error.remark, stacklevel=2)
                found = self.reader.one_by_one(tape, self.chosen)
            if sum(each.nbytes for each in self.kept.values()) + found.nbytes <= KEPT:
                self.kept[key] = found
        return found


def kernel_in_turns(left: InTurns, right: InTurns) -> Float[Tensor, "probe out train out_"]:
    """The exact kernel of two sides, which may be one, whose Jacobians would not fit assembled.

    Of as many examples as fit on either side what was read is held, and their part of the kernel is whole; with more,
    the others are read again for each such group.
    """
    kernel: Tensor | None = None
    for k, group in enumerate(left.groups):
        rows, one = left.together(group)
        for other_group in left.groups[k:] if left is right else right.groups:
            same = left is right and other_group is group
            columns, other = (rows, one) if same else right.together(other_group)
            share = gram(one, other)
            if kernel is None:
                kernel = share.new_empty(left.examples, one.outputs, right.examples, other.outputs)
            kernel[rows, :, columns] = share
            if left is right and not same:
                kernel[columns, :, rows] = share.permute(2, 3, 0, 1)
    assert kernel is not None
    return kernel
