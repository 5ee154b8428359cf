"""Training with a fixed kernel, mode by mode: how much of each is learned by a time, a number of steps or a ridge.

How much of a mode is learned. Of a mode with eigenvalue λ training removes the share λ g(λ) of what is missing:

    flow      g(λ) = (1 − e^{−sλ})/λ        g(0) = s      s the flow's time, weights of the loss included
    descent   g(λ) = (1 − (1 − sλ)ᵏ)/λ      g(0) = ks     k steps of size s
    for ever  g(λ) = 1/λ

>>> lone = torch.tensor([1.0], dtype=torch.float64)
>>> [float(each(lone)) for each in (FlowGain(math.log(2)), DescentGain(0.5, 2), FOREVER)]
[0.5, 0.75, 1.0]

The eigendecomposition of a kernel matrix: one of Θ(X, X) serves every time and every ridge,

    g(R) B = V g(λ + ridge) Vᵀ B,    R = Θ(X, X) + ridge = V (λ + ridge) Vᵀ.

An eigenvalue below n · eps · λ_max is rounding, and counts as zero. So does one that is no larger than the most
negative, which a kernel would not have: it measures what rounding the entries did.

>>> from ntkexp.closed_form.modes import FOREVER
>>> theta = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
>>> modes_of(theta).at(FOREVER, ridge=1.0)(torch.ones(2, 1, dtype=torch.float64)).flatten().tolist()
[0.2, 1.0]

The Cholesky factor of a kernel with a ridge: a tenth of the cost of an eigendecomposition, for one ridge and t = ∞.

Where rounding makes R indefinite in spite of its ridge, a jitter is added to it, ten times as much at each attempt.

>>> found = factorise(torch.tensor([[3.0]], dtype=torch.float64), ridge=1.0)
>>> float(found.solve(torch.ones(1, 1, dtype=torch.float64))), found.jitter
(0.25, 0.0)

What regression says of examples that it was not given, in closed form. Without the examples of a fold F,

    f_{∖F}(X_F) = y_F − ((R⁻¹)_FF)⁻¹ (R⁻¹ y)_F

(folds of one: leave-one-out; Rasmussen & Williams 2006, 5.4.2), so that one eigendecomposition tries every ridge.

>>> from ntkexp.closed_form.modes import modes_of
>>> theta = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
>>> found = held_out(modes_of(theta), 0.0, torch.tensor([[2.0], [4.0]], dtype=torch.float64), folds(2, 2))
>>> [round(float(each), 12) for each in found]
[2.0, 1.0]

Conjugate gradients (Hestenes & Stiefel 1952) for R a = y, where R is known by its products alone and is never held.

With the diagonal of R as preconditioner, each column on its own; it ends when every residual ‖y − R a‖ has fallen below
`tolerance` ‖y‖. Of n distinct eigenvalues it needs n products; of a few that stand out and a ridge, few.

>>> two = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
>>> found = conjugate_gradients(lambda a: two @ a, two.diagonal(), torch.ones(2, 1, dtype=torch.float64))
>>> found.solution.flatten().tolist(), found.products
([1.0, 0.25], 1)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake


class AbstractGain(ABC):
    """A way to train, for some time."""

    @abstractmethod
    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        """The gains g at eigenvalues that are not negative."""

    @property
    @abstractmethod
    def doubled(self) -> AbstractGain:
        """The gain of training for twice as long."""


@dataclass(frozen=True)
class FlowGain(AbstractGain):
    """Gradient flow; without end where the time is infinite."""

    time: float

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise Mistake(f"time={self.time:g}: it takes a number ≥ 0, or inf")

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        zero = spectrum == 0
        if self.time == math.inf:
            refuse_singular(zero)
            return 1 / spectrum
        return torch.where(zero, self.time, -torch.expm1(-self.time * spectrum) / torch.where(zero, 1.0, spectrum))

    @property
    def doubled(self) -> FlowGain:
        return FlowGain(2 * self.time)


FOREVER = FlowGain(math.inf)


@dataclass(frozen=True)
class DescentGain(AbstractGain):
    """Gradient descent; it diverges where the largest sλ exceeds 2."""

    size: float
    steps: int

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        zero, moved = spectrum == 0, self.size * spectrum
        near = -torch.expm1(self.steps * torch.log1p(-moved.clamp(max=1)))
        far = 1 - (-1) ** self.steps * (moved - 1).clamp(min=0) ** self.steps
        share = torch.where(moved < 1, near, far)
        return torch.where(zero, self.size * self.steps, share / torch.where(zero, 1.0, spectrum))

    @property
    def doubled(self) -> DescentGain:
        return DescentGain(self.size, 2 * self.steps)


def refuse_singular(zero: Tensor) -> None:
    """A mode of eigenvalue zero has no inverse, and is not learned at any time."""
    if zero.any():
        raise singular(f"{int(zero.sum())} of {len(zero)} eigenvalues")


def singular(what: str) -> Mistake:
    """The mistake of a kernel without an inverse, with advice."""
    return Mistake(
        f"the kernel is singular ({what} are zero to rounding), so training without end has no closed form; give a "
        "finite time, or a ridge > 0"
    )


Learned: TypeAlias = Callable[[Tensor], Tensor]
"""B [entry, column] ↦ g(R) B."""


@dataclass(frozen=True)
class Modes:
    """Eigenvalues, none of them negative, from the smallest up, and their eigenvectors."""

    values: Float[Tensor, " mode"]
    vectors: Float[Tensor, "entry mode"]

    def at(self, gain: AbstractGain, ridge: float = 0.0) -> Learned:
        """The map B ↦ g(R) B, R being the kernel plus the ridge."""
        refuse_negative(ridge)
        gains = gain(self.values + ridge)[:, None]
        return lambda right: self.vectors @ (gains * (self.vectors.mH @ right))


def modes_of(matrix: Float[Tensor, "entry entry"]) -> Modes:
    """The modes of a matrix's symmetric part, which has to be positive but for rounding."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    rounding = torch.maximum(len(values) * torch.finfo(values.dtype).eps * values[-1:], -values[:1])
    return Modes(torch.where(values > rounding, values, 0.0), vectors)


def refuse_negative(ridge: float) -> None:
    """A ridge that is less than nothing cannot be added to a kernel."""
    if not 0 <= ridge < math.inf:
        raise Mistake(f"ridge={ridge:g}: it takes a number ≥ 0")


ATTEMPTS = 6


@dataclass(frozen=True)
class Factor:
    """L is the factor of R + jitter = L Lᵀ."""

    lower: Float[Tensor, "entry entry"]
    jitter: float

    def solve(self, right: Float[Tensor, "entry column"]) -> Float[Tensor, "entry column"]:
        """Find (R + jitter)⁻¹ B."""
        return torch.cholesky_solve(right, self.lower)


def factorise(matrix: Float[Tensor, "entry entry"], ridge: float) -> Factor:
    """Factorise Θ + ridge; a matrix that is singular to rounding is refused where there is no ridge."""
    refuse_negative(ridge)
    rounding = len(matrix) * torch.finfo(matrix.dtype).eps * float(matrix.diagonal().mean())
    jitters = [0.0] + [rounding * 10.0**k for k in range(ATTEMPTS)] if ridge else [0.0]
    for jitter in jitters:
        work = matrix.clone()
        work.diagonal().add_(ridge + jitter)
        lower, failed = torch.linalg.cholesky_ex(work)
        if not failed and (ridge or float(lower.diagonal().min()) ** 2 > rounding):
            return Factor(lower, jitter)
    raise singular("some of its eigenvalues")


GRID = tuple(10.0 ** (k / 2) for k in range(-16, 3))  # ridges, as multiples of the mean of the kernel's diagonal


def held_out(
    modes: Modes, ridge: float, targets: Float[Tensor, "entry column"], folds: Sequence[Tensor]
) -> Float[Tensor, "entry column"]:
    """Predict each entry by the others' targets, its fold left out."""
    inverse, coefficients = modes.vectors * FOREVER(modes.values + ridge), modes.at(FOREVER, ridge)(targets)
    predicted = torch.empty_like(targets)
    for fold in folds:
        block = inverse[fold] @ modes.vectors[fold].mH
        predicted[fold] = targets[fold] - torch.linalg.solve(block, coefficients[fold])
    return predicted


def folds(examples: int, count: int, entries: int = 1) -> list[Tensor]:
    """Every `count`-th example, with all its entries.

    >>> [fold.tolist() for fold in folds(3, 2, entries=2)]
    [[0, 1, 4, 5], [2, 3]]
    """
    rows = torch.arange(examples * entries).view(examples, entries)
    return [rows[k::count].flatten() for k in range(min(count, examples))]


def ridges(matrix: Float[Tensor, "entry entry"]) -> list[float]:
    """The ridges that are worth trying."""
    return [multiple * float(matrix.diagonal().mean()) for multiple in GRID]


TOLERANCE, MOST = 1e-10, 2000


@dataclass(frozen=True)
class Solution:
    """A solution was found with this largest relative residual and so many products."""

    solution: Float[Tensor, "entry column"]
    residual: float  # the largest, relative
    products: int

    @property
    def words(self) -> str:
        """The number of products and the residual are spelled in words.

        >>> Solution(torch.zeros(1, 1), 3e-11, 40).words
        '40 products, residual 3e-11'
        """
        return f"{self.products} products, residual {self.residual:.0e}"


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    diagonal: Float[Tensor, " entry"],
    right: Float[Tensor, "entry column"],
    tolerance: float = TOLERANCE,
    most: int = MOST,
    tell: Callable[[int, float], None] = lambda products, residual: None,
) -> Solution:
    """Solve R a = `right`, from zero on, until the residual is below `tolerance`; `tell` hears of every product."""
    solution, residual = torch.zeros_like(right), right.clone()
    scale = right.norm(dim=0).clamp(min=torch.finfo(right.dtype).tiny)
    direction = residual / diagonal[:, None]
    slope = (residual * direction).sum(0)
    left, products = float((residual.norm(dim=0) / scale).max()), 0
    while left > tolerance and products < most:
        image = product(direction)
        step = quotient(slope, (direction * image).sum(0))
        solution, residual = solution + step * direction, residual - step * image
        conditioned = residual / diagonal[:, None]
        before, slope = slope, (residual * conditioned).sum(0)
        direction = conditioned + quotient(slope, before) * direction
        left, products = float((residual.norm(dim=0) / scale).max()), products + 1
        tell(products, left)
    return Solution(solution, left, products)


def quotient(above: Float[Tensor, " column"], below: Float[Tensor, " column"]) -> Float[Tensor, " column"]:
    """A quotient is zero for a column that has arrived."""
    return torch.where(below == 0, 0.0, above / torch.where(below == 0, 1.0, below))
