"""Examples that are read some at a time, use by use: no features of them all, no rows as long as the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ntkexp.kernel.features.strips import Chunks
from ntkexp.kernel.features.use_by_use import UseByUse
from ntkexp.kernel.read.batches import cut
from ntkexp.kernel.record.inputs import examples, part
from ntkexp.kernel.record.tape import Tape
from ntkexp.shapes import Inputs

READ = 0.2e9  # bytes of the values of examples that are read at once
KEPT = 2e9  # bytes of what is read, on either side


@dataclass(frozen=True)
class InTurns:
    """Examples, and how a network is recorded and read at some of them; what was read is kept while it fits."""

    record: Callable[[Inputs], Tape]
    read: Callable[[Tape], UseByUse]
    inputs: Inputs
    kept: dict[tuple[int, int], UseByUse] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """How many there are."""
        return examples(self.inputs)

    @cached_property
    def places(self) -> list[slice]:
        """Which examples are read at once: as many each time as differ by one at most."""
        each = self.record(part(self.inputs, slice(0, 2))).bytes_per_example
        turns = -(-self.examples // max(2, int(READ / each)))
        return list(cut(self.examples, turns))

    def jacobians(self) -> Iterator[tuple[slice, UseByUse]]:
        """The Jacobian of all examples, some at a time."""
        return ((place, self.jacobian(place)) for place in self.places)

    @cached_property
    def groups(self) -> list[list[slice]]:
        """The same, as many together as may be held."""
        count = max(1, int(KEPT / self.jacobian(self.places[0]).nbytes))
        return [self.places[at : at + count] for at in range(0, len(self.places), count)]

    def chunks(self, group: Sequence[slice]) -> tuple[slice, Chunks]:
        """The examples of a group, and their Jacobian."""
        return slice(group[0].start, group[-1].stop), Chunks([self.jacobian(place) for place in group])

    def jacobian(self, place: slice) -> UseByUse:
        """The Jacobian of these examples, kept while there is room."""
        key = place.start, place.stop
        found = self.kept.get(key)
        if found is None:
            found = self.read(self.record(part(self.inputs, place)))
            if sum(each.nbytes for each in self.kept.values()) + found.nbytes <= KEPT:
                self.kept[key] = found
        return found
