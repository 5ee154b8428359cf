"""Layers as operations on tiles, where the fused engine knows them: affine layers of stride one that pad with zeros,
bent lines, and residual layers of these, up to where an image gets smaller or becomes a vector.

>>> from ntkexp.layer.affine import Dense
>>> from ntkexp.layer.pointwise import ReLU
>>> found = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
>>> [KINDS[operation.kind] for operation in found.operations]
['bend', 'weigh']
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ntkexp.layer.affine import AbstractAffine, Conv
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import AbstractBent, Linear
from ntkexp.layer.residual import Residual
from ntkexp.layer.scale import number

BEND, WEIGH, COPY, ADD, CLEAR = range(5)
KINDS = ("bend", "weigh", "copy", "add", "clear")


@dataclass(frozen=True)
class Operation:
    """An operation on a register; `reach` is that of a window, down and across, `weights` are s, b, α, β and k, h."""

    kind: int
    register: int
    other: int = 0
    reach: tuple[int, int] = (0, 0)
    weights: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    met: int = 0


@dataclass(frozen=True)
class TileProgram:
    """What happens to tiles of an image of these sizes.

    Where it has an `end`, the sum over pixels is asked for, of all pairs of them or of equal ones; otherwise the tiles
    themselves. The `rest` of the layers takes examples of shape `rest_shape`.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, int]
    end: Flatten | GlobalAvgPool | None
    rest: tuple[AbstractLayer, ...]
    rest_shape: tuple[int, ...]

    @property
    def met(self) -> int:
        """How many nonlinear layers there are."""
        return sum(operation.kind == BEND for operation in self.operations)

    @property
    def registers(self) -> int:
        """How many tiles are at work."""
        return 1 + max(max(operation.register, operation.other) for operation in self.operations)

    @property
    def reach(self) -> tuple[int, int]:
        """The largest of any window."""
        down, across = zip(*(operation.reach for operation in self.operations), strict=True)
        return max(down), max(across)


class Unknown(Exception):
    """A layer that the fused engine does not know."""


def program(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> TileProgram | None:
    """The operations of the first layers, if what comes after them is little: vectors, or fewer pixels."""
    if len(shape) > 3:
        return None
    operations: tuple[Operation, ...] = ()
    met = known = 0
    before = shape
    try:
        for layer in layers:
            more, met = compiled(layer, before, 0, 1, met)
            operations, before, known = (*operations, *more), layer.shape(before), known + 1
    except Unknown:
        if len(shape) == 1 or layers[known].shape(before)[1:] == before[1:]:
            return None
    if not met:
        return None
    if len(shape) == 1:
        return TileProgram(fused(operations), (1, 1), None, (), before)
    rows, columns = ((1, *shape[1:]) if len(shape) == 2 else shape[1:])[-2:]
    operations = fused((*operations, Operation(CLEAR, 0)))
    last = layers[known]
    if isinstance(last, Flatten | GlobalAvgPool):
        return TileProgram(operations, (rows, columns), last, layers[known + 1 :], last.shape(before))
    return TileProgram(operations, (rows, columns), None, layers[known:], before)


def compiled(
    layer: AbstractLayer, shape: tuple[int, ...], register: int, free: int, met: int
) -> tuple[tuple[Operation, ...], int]:
    """The operations of a layer on a register, with those from `free` on to spare; how many nonlinear ones were met."""
    match layer:
        case AbstractAffine():
            return (Operation(CLEAR, register), affine(layer, shape, register)), met
        case AbstractBent():
            return (Operation(BEND, register, weights=(1, 0, 0, 0, *layer.constants), met=met),), met + 1
        case Linear():
            return (), met
        case Residual():
            branch, met = chained(layer.branch, shape, register, free + 1, met)
            shortcut, met = chained(layer.shortcut, shape, free, free + 1, met)
            return (Operation(COPY, register, free), *branch, *shortcut, Operation(ADD, register, free)), met
    raise Unknown


def chained(
    layers: tuple[AbstractLayer, ...], shape: tuple[int, ...], register: int, free: int, met: int
) -> tuple[tuple[Operation, ...], int]:
    """The operations of layers one after the other; how many nonlinear ones were met."""
    operations: tuple[Operation, ...] = ()
    for layer in layers:
        more, met = compiled(layer, shape, register, free, met)
        operations, shape = (*operations, *more), layer.shape(shape)
    return operations, met


def affine(layer: AbstractAffine, shape: tuple[int, ...], register: int) -> Operation:
    """Weights: K′ = s Σ K + b, Θ′ = s Σ Θ + α Σ K + β."""
    windows: tuple[int, ...] = (1, 1)
    if isinstance(layer, Conv):
        if layer.stride != 1 or layer.circular:
            raise Unknown
        windows = ((1, *layer.windows(shape)) if len(shape) == 2 else layer.windows(shape))[-2:]
    scale, shift = number(layer.W_std) ** 2 / prod(windows), number(layer.b_std) ** 2
    learned = (scale, shift) if layer.param == "ntk" else (float(shape[0]), float(shift > 0))
    weights = (scale, shift, *((0.0, 0.0) if layer.frozen else learned), 0.0, 0.0)
    return Operation(WEIGH, register, reach=(windows[0] // 2, windows[1] // 2), weights=weights)


def fused(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Weights and the bent line after them as one operation; tiles are cleared only where it takes that."""
    found: list[Operation] = []
    clean = {0}
    for operation in operations:
        last = found[-1] if found else None
        if operation.kind == CLEAR and operation.register in clean:
            continue
        if operation.kind == BEND and last and last.kind == WEIGH and last.register == operation.register:
            weights = (*last.weights[:4], *operation.weights[4:])
            found[-1] = replace(operation, reach=last.reach, weights=weights)
        else:
            found.append(operation)
        clean = cleaned(clean, operation)
    return tuple(found)


def cleaned(clean: set[int], operation: Operation) -> set[int]:
    """The registers that hold zeros outside the image."""
    register, other = operation.register, operation.other
    if operation.kind in {BEND, CLEAR}:
        return clean | {register}
    if operation.kind == COPY:
        return clean | {other} if register in clean else clean - {other}
    return clean if operation.kind == ADD and other in clean else clean - {register}
