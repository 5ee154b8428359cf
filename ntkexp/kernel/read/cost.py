"""What a kernel is expected to cost, parameter by parameter: how it is read, and the size of that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ntkexp.kernel.features.blocks import Block, Factored
from ntkexp.kernel.features.features import Key
from ntkexp.kernel.features.gram import sizes
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import View

JACOBIANS = "Jacobians"


@dataclass(frozen=True)
class Cost:
    """The cost of one block of features: that of the kernel of some points with the training examples."""

    parameters: str
    way: str
    uses: int  # for each example
    bytes: int  # of the features of both sides, and of what is made of them
    multiplications: int


def costs(reader: Reader, tape: Tape, probe: int, train: int) -> list[Cost]:
    """The costs for so many points and training examples, each of them like those on the tape."""
    try:
        features, rows = reader.factored(tape), "gradients"
    except NoRule:
        features, rows = reader.tangent(tape), JACOBIANS
    return [cost(key, block, probe, train, rows) for key, block in features.blocks.items()]


def cost(key: Key, block: Block, probe: int, train: int, rows: str) -> Cost:
    """The cost of one block."""
    if isinstance(block, Factored):
        size = replace(sizes(block, block), probe=probe, train=train)
        factors = (probe + train) * size.uses * (size.inputs + size.out * size.features)
        numbers = (factors + size.numbers) * block.inputs.element_size()
        return Cost(parameter_names(key), size.way, size.uses, numbers, size.operations)
    _, out, length = block.rows.shape
    numbers = (probe + train) * out * length * block.rows.element_size()
    return Cost(parameter_names(key), rows, 1, numbers, probe * out * train * out * length)


def parameter_names(key: Key) -> str:
    """The parameters of a block."""
    return ", ".join(part.name if isinstance(part, View) else str(part) for part in key if part is not None)
