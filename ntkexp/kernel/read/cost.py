"""What a kernel is expected to cost: of two ways the cheaper is taken, and what would not fit is read in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ntkexp.kernel.features.blocks import Copies, Factored, Key
from ntkexp.kernel.features.gram import Sizes, alone, parameters_of, sizes
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.uses import View

# --- A kernel of many examples, judged by the Jacobian of a few that is kept use by use.


FITS = 2e9  # bytes of an assembled Jacobian, which is faster while it fits
TIMES = 3  # that rows are there while they are multiplied out, turned and added up


def fits(some: Jacobian, probe: int, train: int) -> bool:
    """Whether so many examples like some have small Jacobians, with what is multiplied out of them."""
    bytes_each = some.blocks[0].numbers.element_size() if some.blocks else 0
    factors = kept_factors(some, probe, train)
    rows = row_length(some, factors) * (probe + train) * some.outputs
    made = max((size.numbers for size in factors.values()), default=0)
    held = some.nbytes / some.examples * (probe + train)
    return held + (TIMES * rows + made) * bytes_each <= FITS


def kept_factors(some: Jacobian, probe: int, train: int) -> dict[Key, Sizes]:
    """The weights whose factors may be kept, and how large these are for so many examples."""
    found = alone(some, some)
    return {key: replace(size, probe=probe, train=train) for key, size in found.items() if size is not None}


def row_length(some: Jacobian, factors: dict[Key, Sizes]) -> int:
    """How many numbers a gradient has of all other parameters."""
    kept = parameters_of(list(factors))
    return sum(size for name, size in some.extents.items() if name not in kept)


def kernel_operations(some: Jacobian, probe: int, train: int) -> float:
    """Multiplications of the exact kernel; with themselves, where `train` is none, of half of it."""
    other = train or probe
    factors = kept_factors(some, probe, other)
    kept = parameters_of(list(factors))
    products = row_length(some, factors) * some.outputs**2 * probe * other
    made = sum(
        row_operations(block) for block in some.blocks if isinstance(block, Factored) and kept.isdisjoint(block.extents)
    )
    total = sum(size.operations for size in factors.values()) + products + made * (probe + other)
    return total if train else total / 2


def row_operations(block: Factored) -> int:
    """Multiplications of an example's gradients."""
    return block.outputs[0].numel() * block.rows


# --- What a kernel is expected to cost, parameter by parameter: how it is read, and the size of that.


JACOBIANS = "Jacobians"


@dataclass(frozen=True)
class Cost:
    """The cost of one gradient block: that of the kernel of some points with the training examples."""

    parameters: str
    way: str
    uses: int  # for each example
    bytes: int  # of the Jacobians of both sides, and of what is made of them
    multiplications: int


def costs(reader: Reader, tape: Tape, probe: int, train: int) -> list[Cost]:
    """The costs for so many points and training examples, each of them like those on the tape."""
    try:
        jacobian, way = reader.assembled(tape), "gradients"
    except NoRule:
        jacobian, way = reader.tangent(tape), JACOBIANS
    found = []
    for block in jacobian.blocks:
        names = ", ".join(part.name if isinstance(part, View) else part for part in block.key if part is not None)
        assert not isinstance(block, Copies)
        if isinstance(block, Factored):
            size = replace(sizes(block, block), probe=probe, train=train)
            factors = (probe + train) * size.uses * (size.inputs + size.out * size.features)
            numbers = (factors + size.numbers) * block.inputs.element_size()
            found.append(Cost(names, size.way, size.uses, numbers, size.operations))
        else:
            _, out, length = block.rows.shape
            numbers = (probe + train) * out * length * block.rows.element_size()
            found.append(Cost(names, way, 1, numbers, probe * out * train * out * length))
    return found
