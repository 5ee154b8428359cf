"""What can be done to a tile, K and Θ at all pixels for one offset: the words in which a layer says its fused form.

Resolution: how large a variance may be where a kernel depends on small differences of variances and covariances.

Of erf, GELU and waves, nearly equal inputs give what q₁q₂ − c² or (q₁ + q₂)/2 − c says beside 1 + 2q, 1 + q or 1/b².
The difference is known up to the rounding of q or q² itself: b²q eps is the error of a kernel between near neighbours.

>>> resolved("Erf", torch.tensor([1e14], dtype=torch.float64))
Traceback (most recent call last):
ntkexp.mistake.Mistake: Erf: variance 1e+14 is too large for float64 to tell near neighbours apart; lower W_std, or ...

What can be done to a tile, K and Θ at all pixels for one offset: the words in which a layer says its fused form.

    weigh    K′ = s Σ K + b,  Θ′ = s Σ Θ + α Σ K + β    Σ over a window
    bend     κ and κ̇ of a bent line, of constants k and h
    arc      κ and κ̇ of erf
    gate     κ and κ̇ of GELU
    wave     κ and κ̇ of a sine
    series   κ and κ̇ by powers of the correlation
    norm     both divided by √((q₁ + ε)(q₂ + ε))
    copy     a register into another
    add      another register to this one
    clear    zeros outside the image, for a window that looks there
    wrap     the image itself, which goes around, outside of it
    coarsen  means over the pixels that make up a coarse one, or samples of them: a register of fewer pixels

Those that meet variances say what is to be laid out beside a tile for them, functions of the variance at either end.

>>> weigh(0, scale=0.25).weights
(0.25, 0.0, 0.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.pairs import Coarse
from ntkexp.mistake import Mistake

LARGEST_ERROR = 1e-4


def resolved(layer: str, q: Float[Tensor, "..."], squared_frequency: float = 1.0) -> Float[Tensor, "..."]:
    """The variances at which a layer's kernel is known in their precision; others are refused."""
    largest = float(q.detach().max()) if q.numel() else 0.0
    if not squared_frequency * largest * torch.finfo(q.dtype).eps <= LARGEST_ERROR:
        kind = str(q.dtype).removeprefix("torch.")
        longer = "; or compute in float64" if q.dtype != torch.float64 else ""
        raise Mistake(
            f"{layer}: variance {largest:.3g} is too large for {kind} to tell near neighbours apart; "
            f"lower W_std, or scale the inputs down{longer}"
        )
    return q


BEND, WEIGH, COPY, ADD, CLEAR, ARC, GATE, WAVE, NORM, WRAP, SERIES, COARSEN = range(12)
KINDS = ("bend", "weigh", "copy", "add", "clear", "arc", "gate", "wave", "norm", "wrap", "series", "coarsen")
CLEANING = frozenset({BEND, CLEAR, ARC, NORM, SERIES})
"""Those that leave zeros outside the image, whatever was there."""
Ends: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]
"""The variances at all ends ↦ what is laid out for each of them, zero outside the image."""


@dataclass(frozen=True)
class Operation:
    """An operation on a register; `reach` is that of a window, deep, down and across, `weights` are s, b, α and β."""

    kind: int
    register: int
    other: int = 0
    reach: tuple[int, int, int] = (0, 0, 0)
    weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    constants: tuple[float, ...] = ()  # at most three
    ends: Ends | None = None
    met: int = 0  # how many that meet variances come before it
    coarse: tuple[Coarse, ...] = ()  # along each axis, deep, down and across

    @property
    def meets(self) -> bool:
        """Whether it meets variances."""
        return self.ends is not None


Operations = tuple[Operation, ...]


class NoFusedForm(Exception):
    """A layer has none, for examples of this shape; the message says which."""


def weigh(
    register: int,
    scale: float,
    shift: float = 0.0,
    learned: tuple[float, float] = (0.0, 0.0),
    reach: tuple[int, int, int] = (0, 0, 0),
) -> Operation:
    """Weights s and b, of which α and β are learned; clear or wrap the register before, if there is a window."""
    return Operation(WEIGH, register, reach=reach, weights=(scale, shift, *learned))


def bend(register: int, k: float, h: float) -> Operation:
    """A bent line: √q and 1/√q, zero where q is."""
    return Operation(BEND, register, constants=(k, h), ends=roots)


def arc(register: int) -> Operation:
    """The error function: 1/√(1 + 2q)."""
    return Operation(ARC, register, ends=lambda q: ((1 + 2 * resolved("Erf", q)).rsqrt(),))


def gate(register: int) -> Operation:
    """GELU: 1/√(1 + q) and q."""
    return Operation(GATE, register, ends=lambda q: ((1 + resolved("GELU", q)).rsqrt(), q))


def wave(register: int, name: str, size: float, frequency: float, phase: float) -> Operation:
    """A wave a sin(bz + c₀) of cos 2c₀: b²q/2."""
    squared = frequency**2

    def ends(q: Tensor) -> tuple[Tensor]:
        return (squared / 2 * resolved(name, q, squared),)

    return Operation(WAVE, register, constants=(size**2 / 2, squared, phase), ends=ends)


def series(register: int, first: int, step: int, ends: Ends) -> Operation:
    """Powers of ρ from the first on, in steps of one or two: 1/√q, E σ, and coefficients of σ′."""
    return Operation(SERIES, register, constants=(float(first), float(step)), ends=ends)


def norm(register: int, eps: float) -> Operation:
    """A norm: 1/√(q + ε)."""
    return Operation(NORM, register, ends=lambda q: ((q + eps).rsqrt(),))


def copy(register: int, target: int) -> Operation:
    """What is in a register, in the target as well."""
    return Operation(COPY, register, target)


def add(register: int, other: int) -> Operation:
    """The sum, in the first."""
    return Operation(ADD, register, other)


def clear(register: int) -> Operation:
    """What wrapped around is no pixel."""
    return Operation(CLEAR, register)


def wrap(register: int) -> Operation:
    """What is outside the image are pixels of its other side."""
    return Operation(WRAP, register)


def coarsen(register: int, coarse: Sequence[Coarse]) -> Operation:
    """Another map of pixels along each of up to three axes; each pixel belongs to one coarse pixel at most."""
    if not all(one.disjoint for one in coarse):
        raise NoFusedForm("a mean over windows that overlap")
    missing = (Coarse.every(1, 1),) * (3 - len(coarse))
    return Operation(COARSEN, register, coarse=(*missing, *coarse))


def roots(q: Tensor) -> tuple[Tensor, Tensor]:
    """The roots √q and 1/√q, zero where q is."""
    root = q.sqrt()
    return root, torch.where(root > 0, 1 / root, 0.0)
