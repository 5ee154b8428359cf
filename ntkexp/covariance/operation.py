"""What can be done to a tile, K and Θ at all pixels for one offset: the words in which a layer says its fused form.

    weigh    K′ = s Σ K + b,  Θ′ = s Σ Θ + α Σ K + β    Σ over a window
    bend     κ and κ̇ of a bent line, of constants k and h
    copy     a register into another
    add      another register to this one
    clear    zeros outside the image, for a window that looks there

>>> weigh(0, scale=0.25).weights
(0.25, 0.0, 0.0, 0.0, 0.0, 0.0)
"""

from __future__ import annotations

from dataclasses import dataclass

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
    met: int = 0  # how many nonlinear layers come before it


Operations = tuple[Operation, ...]


class NoFusedForm(Exception):
    """A layer has none, for examples of this shape."""


def weigh(
    register: int,
    scale: float,
    shift: float = 0.0,
    learned: tuple[float, float] = (0.0, 0.0),
    reach: tuple[int, int] = (0, 0),
) -> Operation:
    """Weights s and b, of which α and β are learned; the register is cleared before, if there is a window."""
    return Operation(WEIGH, register, reach=reach, weights=(scale, shift, *learned, 0.0, 0.0))


def bend(register: int, k: float, h: float) -> Operation:
    """A nonlinear layer, which needs the variances that it meets."""
    return Operation(BEND, register, weights=(1.0, 0.0, 0.0, 0.0, k, h))


def copy(register: int, target: int) -> Operation:
    """What is in a register, in the target as well."""
    return Operation(COPY, register, target)


def add(register: int, other: int) -> Operation:
    """The sum, in the first."""
    return Operation(ADD, register, other)


def clear(register: int) -> Operation:
    """What wrapped around is no pixel."""
    return Operation(CLEAR, register)
