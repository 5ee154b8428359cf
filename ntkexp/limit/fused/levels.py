"""Operations level by level: those on tiles of one size, until strides or pools make their images coarser.

A register belongs to the level of its image. Those on other levels do not meet it, so that all that happens on a level
comes before all that happens on coarser ones.

>>> from ntkexp.layer import chain
>>> from ntkexp.layer.affine import Conv
>>> from ntkexp.layer.pointwise import ReLU
>>> fine, coarse = levels(chain.fused((Conv(features=2, stride=2), ReLU()), (1, 6, 6), 0, 1), (1, 6, 6))
>>> len(fine.operations), len(coarse.operations), coarse.sizes
(2, 1, (1, 3, 3))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ntkexp.covariance.coarse import Coarse, needed
from ntkexp.covariance.operation import ADD, COARSEN, COPY, WRAP, NoFusedForm, Operation, Operations, coarsen
from ntkexp.covariance.pairs import Pairs

Sizes = tuple[int, int, int]
NOT_KNOWN = Pairs((), ())
UNEQUAL = "a layer whose branches get smaller in different steps"


@dataclass(frozen=True)
class Level:
    """What happens to tiles of an image of these sizes, at the offsets of these pairs of pixels.

    Arriving registers were left by the level before; the first level begins with inputs. What departs is left in
    registers of the level after, or, on the last, as it is.
    """

    sizes: Sizes
    arrivals: tuple[int, ...] = ()
    operations: Operations = ()
    departures: Operations = ()
    pairs: Pairs = NOT_KNOWN

    @property
    def registers(self) -> int:
        """How many tiles are at work."""
        there = (max(operation.register, operation.other) for operation in (*self.operations, *self.departures))
        return 1 + max((0, *self.arrivals, *there))

    @property
    def reach(self) -> Sizes:
        """The largest of any window."""
        deep, down, across = zip((0, 0, 0), *(operation.reach for operation in self.operations), strict=True)
        return max(deep), max(down), max(across)

    @property
    def around(self) -> bool:
        """Whether an image continues on its other side anywhere."""
        return any(operation.kind == WRAP for operation in self.operations)

    @property
    def kept(self) -> Operations:
        """What departs if this is the last level, whose tiles are kept."""
        return (coarsen(0, [Coarse.every(n, 1) for n in self.sizes]),)


def levels(operations: Operations, sizes: Sizes) -> tuple[Level, ...]:
    """Put each operation on the level of its register."""
    found, at = [Level(sizes)], {0: 0}
    for operation in operations:
        here = at[operation.register]
        if operation.kind == ADD and at[operation.other] != here:
            raise NoFusedForm(UNEQUAL)
        if operation.kind == COPY:
            at[operation.other] = here
        if operation.kind != COARSEN:
            found[here] = replace(found[here], operations=(*found[here].operations, operation))
            continue
        found[here + 1 : here + 2] = [after(operation, found[here + 1 : here + 2])]
        found[here] = replace(found[here], departures=(*found[here].departures, operation))
        at[operation.register] = here + 1
    return tuple(found)


def after(operation: Operation, coarser: Sequence[Level]) -> Level:
    """The level to which a register goes, which is there or is made."""
    deep, down, across = (len(one.members) for one in operation.coarse)
    level = coarser[0] if coarser else Level((deep, down, across))
    if level.sizes != (deep, down, across):
        raise NoFusedForm(UNEQUAL)
    return replace(level, arrivals=(*level.arrivals, operation.register))


def paired(found: tuple[Level, ...], wanted: Pairs) -> tuple[Level, ...]:
    """The levels with the pairs that they need, of those wanted at the end, in an image of three axes."""
    last = replace(found[-1], pairs=wanted)
    if len(found) == 1:
        return (last,)
    finer = (needed(operation.coarse, wanted, found[-2].sizes) for operation in found[-2].departures)
    return (*paired(found[:-1], reduce(Pairs.union, finer)), last)
