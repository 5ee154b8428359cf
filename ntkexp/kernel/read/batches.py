"""Batches: a point is read so many examples at a time that what is recorded of them fits memory that is at hand.

More memory than that the system hands out page by page, each of them cleared first, which takes longer than most
operations on it. Features of all batches are then joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.joined import joined
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.inputs import as_inputs, examples, part
from ntkexp.kernel.record.tape import Tape
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
        return examples(self.inputs)

    def read(self, read: Callable[[Tape, Sequence[int], Weights], Features], chosen: Sequence[int]) -> Features:
        """The features of all examples; at once, where those of the batches have no common form."""
        if len(self.places) == 1:
            return read(self.tape, chosen, {})
        found = joined((partial(read, tape, chosen) for tape in self.tapes()), self.examples)
        return read(self.reader.record(self.weights, self.inputs), chosen, {}) if found is None else found

    def tapes(self) -> Iterator[Tape]:
        """One after the other, each forgotten when the next is asked for."""
        yield self.tape
        for place in self.places[1:]:
            yield self.reader.record(self.weights, part(self.inputs, place))


def batches(reader: Reader, weights: Weights, inputs: Inputs) -> Batches:
    """The inputs in batches of equal size, but for one example."""
    given = as_inputs(inputs)
    places = cut(examples(given), count(reader, weights, given))
    return Batches(reader, weights, given, places, reader.record(weights, part(given, places[0])))


def count(reader: Reader, weights: Weights, inputs: Inputs) -> int:
    """How many batches there are."""
    total = examples(inputs)
    if total <= FEW:
        return 1
    one = part(inputs, slice(0, 1))
    size = total * reader.bytes_per_example(one, lambda: reader.record(weights, part(inputs, slice(0, 2))))
    return 1 if size <= AT_ONCE else min(total // 2, -(-int(size) // BATCH))


def cut(total: int, count: int) -> tuple[slice, ...]:
    """Consecutive places of as many examples each, but for one.

    >>> cut(5, 2)
    (slice(0, 2, None), slice(2, 5, None))
    """
    ends = [k * total // count for k in range(count + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))
