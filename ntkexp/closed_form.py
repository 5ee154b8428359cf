"""Training with a fixed kernel and Gaussian processes, in closed form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.mistake import Mistake

# --- How much of a mode is learned. Of a mode with eigenvalue λ training removes the share λ g(λ) of what is missing.


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
    """Gradient flow for a time s, weights of the loss included: g(λ) = (1 − e^{−sλ})/λ, g(0) = s; for ever 1/λ.

    >>> float(FlowGain(math.log(2))(torch.tensor([1.0], dtype=torch.float64)))
    0.5
    """

    time: float

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise Mistake(f"time={self.time:g}: it takes a number ≥ 0, or inf")

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        zero = spectrum == 0
        if self.time == math.inf:
            if zero.any():  # it has no inverse, and is not learned at any time
                raise singular(f"{int(zero.sum())} of {len(zero)} eigenvalues")
            return 1 / spectrum
        return torch.where(
            zero, self.time, -torch.expm1(-self.time * spectrum) / torch.where(zero, 1.0, spectrum)
        )

    @property
    def doubled(self) -> FlowGain:
        return FlowGain(2 * self.time)


FOREVER = FlowGain(math.inf)


@dataclass(frozen=True)
class DescentGain(AbstractGain):
    """Gradient descent by k steps of size s: g(λ) = (1 − (1 − sλ)ᵏ)/λ, g(0) = ks; it diverges where sλ exceeds 2.

    >>> float(DescentGain(0.5, 2)(torch.tensor([1.0], dtype=torch.float64)))
    0.75
    """

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
    """The modes of a matrix's symmetric part: one eigendecomposition of Θ(X, X) serves every time and every ridge,

        g(R) B = V g(λ + ridge) Vᵀ B,    R = Θ(X, X) + ridge = V (λ + ridge) Vᵀ.

    An eigenvalue below n · eps · λ_max is rounding, and counts as zero. So does one that is no larger than the most
    negative, which a kernel would not have: it measures what rounding the entries did.

    >>> theta = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
    >>> modes_of(theta).at(FOREVER, ridge=1.0)(torch.ones(2, 1, dtype=torch.float64)).flatten().tolist()
    [0.2, 1.0]
    """
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
    """The factor L of R + jitter = L Lᵀ."""

    lower: Float[Tensor, "entry entry"]
    jitter: float

    def solve(self, right: Float[Tensor, "entry column"]) -> Float[Tensor, "entry column"]:
        """(R + jitter)⁻¹ B."""
        return torch.cholesky_solve(right, self.lower)


def factorise(matrix: Float[Tensor, "entry entry"], ridge: float) -> Factor:
    """Cholesky's factor of R = Θ + ridge: a tenth of the cost of an eigendecomposition, for one ridge and t = ∞.

    Where rounding makes R indefinite in spite of its ridge, a jitter is added to it, ten times as much at each attempt;
    a matrix that is singular to rounding is refused where there is no ridge.

    >>> found = factorise(torch.tensor([[3.0]], dtype=torch.float64), ridge=1.0)
    >>> float(found.solve(torch.ones(1, 1, dtype=torch.float64))), found.jitter
    (0.25, 0.0)
    """
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


GRID = tuple(
    10.0 ** (k / 2) for k in range(-16, 3)
)  # ridges, as multiples of the mean of the kernel's diagonal


def held_out(
    modes: Modes, ridge: float, targets: Float[Tensor, "entry column"], folds: Sequence[Tensor]
) -> Float[Tensor, "entry column"]:
    """What regression says of examples that it was not given, in closed form. Without the examples of a fold F,

        f_{∖F}(X_F) = y_F − ((R⁻¹)_FF)⁻¹ (R⁻¹ y)_F

    (folds of one: leave-one-out; Rasmussen & Williams 2006, 5.4.2), so that one eigendecomposition tries every ridge.

    >>> theta = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> found = held_out(modes_of(theta), 0.0, torch.tensor([[2.0], [4.0]], dtype=torch.float64), folds(2, 2))
    >>> [round(float(each), 12) for each in found]
    [2.0, 1.0]
    """
    inverse, coefficients = (
        modes.vectors * FOREVER(modes.values + ridge),
        modes.at(FOREVER, ridge)(targets),
    )
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
    """A solution, its largest relative residual, and the number of products that it took."""

    solution: Float[Tensor, "entry column"]
    residual: float
    products: int


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    diagonal: Float[Tensor, " entry"],
    right: Float[Tensor, "entry column"],
    tolerance: float = TOLERANCE,
    most: int = MOST,
    tell: Callable[[int, float], None] = lambda products, residual: None,
) -> Solution:
    """Solve R a = y by conjugate gradients (Hestenes & Stiefel 1952), R being known by its products alone.

    With the diagonal of R as preconditioner, each column on its own; it ends when every residual ‖y − R a‖ has fallen
    below `tolerance` ‖y‖, or after the `most` products; `tell` hears of each. Of n distinct eigenvalues it needs n
    products; of a few that stand out and a ridge, few.

    >>> two = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    >>> found = conjugate_gradients(lambda a: two @ a, two.diagonal(), torch.ones(2, 1, dtype=torch.float64))
    >>> found.solution.flatten().tolist(), found.products
    ([1.0, 0.25], 1)
    """
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


def quotient(
    above: Float[Tensor, " column"], below: Float[Tensor, " column"]
) -> Float[Tensor, " column"]:
    """A quotient is zero for a column that has arrived."""
    return torch.where(below == 0, 0.0, above / torch.where(below == 0, 1.0, below))


# --- Gaussian processes: the posterior given noisy targets, and what ensembles of infinite width say.


@dataclass(frozen=True)
class Kernels:
    """A kernel among the training examples, and between points and them."""

    train: Float[Tensor, "train train"]
    cross: Float[Tensor, "point train"]


@dataclass(frozen=True)
class Posterior:
    """A Gaussian process conditioned on targets with noise of variance σ²:

        mean        K(x, X) (K(X, X) + σ²)⁻¹ y
        covariance  K(x, x′) − K(x, X) (K(X, X) + σ²)⁻¹ K(X, x′)

    More generally, with g_s (`learned`) and g_2s (`twice`) in place of the inverse, the readouts that were trained for
    the time s: every mode of the prior decays twice, once on either side. With noise this is the posterior's
    covariance, not that of trained networks, which is `Ensemble.covariance`.
    """

    cross: Float[Tensor, "point train"]
    learned: Learned
    twice: Learned

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        return self.cross @ self.learned(targets)

    def covariance(self, prior: Float[Tensor, "point point"]) -> Float[Tensor, "point point"]:
        """The covariance between points, from the prior's."""
        return prior - self.cross @ self.twice(self.cross.mH)

    def variance(self, prior: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """The diagonal of the covariance."""
        return prior - (self.cross.mH * self.twice(self.cross.mH)).sum(0)


def condition(prior: Kernels, noise: float = 0.0, gain: AbstractGain = FOREVER) -> Posterior:
    """Condition the prior on values at the training inputs.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> certain = condition(Kernels(one, one), noise=1.0)
    >>> float(certain.mean(one)), float(certain.variance(one[0]))
    (0.5, 0.5)
    """
    modes = modes_of(prior.train)
    return Posterior(prior.cross, modes.at(gain, noise), modes.at(gain.doubled, noise))


@dataclass(frozen=True)
class Ensemble:
    """Networks of infinite width, trained from random starts (Lee et al. 2019, arXiv:1902.06720), at some points.

    With the tangent kernel Θ (`cross` is Θ(x, X)), the kernel 𝒢 of the outputs before training (`start`), and
    A = Θ(x, X) g(R) (`learned` is g(R), R made of Θ(X, X)), one network and all of them together obey

        f_t(x) = f_0(x) + A (y − f_0(X))
        mean  A y,    covariance  𝒢(x, x′) + A 𝒢(X, X) A′ᵀ − A 𝒢(X, x′) − 𝒢(x, X) A′ᵀ.

    Where the readout alone is trained, Θ = 𝒢, and without end and noise these are the posterior of the Gaussian
    process 𝒢.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> learned = modes_of(4 * one).at(FOREVER)
    >>> trained = Ensemble(2 * one, Kernels(one, one), learned)  # at a point where f_0 is f_0(X)
    >>> float(trained.mean(3 * one)), float(trained.variance(one[0]))
    (1.5, 0.25)
    """

    cross: Float[Tensor, "point train"]
    start: Kernels
    learned: Learned

    @property
    def weights(self) -> Float[Tensor, "point train"]:
        """A: what each training target adds at each point."""
        return self.learned(self.cross.mH).mH

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        return self.cross @ self.learned(targets)

    def covariance(self, start: Float[Tensor, "point point"]) -> Float[Tensor, "point point"]:
        """The covariance of one output between points, from 𝒢 between them (`start`)."""
        A = self.weights
        crossed = A @ self.start.cross.mH
        return start + A @ self.start.train @ A.mH - crossed - crossed.mH

    def variance(self, start: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """The diagonal of the covariance."""
        A = self.weights
        return start + (A @ self.start.train * A).sum(1) - 2 * (A * self.start.cross).sum(1)


NODES, BINS = 48, 15


def probabilities(
    mean: Float[Tensor, "point out"], deviation: Float[Tensor, " point"]
) -> Float[Tensor, "point class"]:
    """How probable each class is where outputs are Gaussian, with means μ_c and one standard deviation σ, independent:

        P(c has the largest output) = E Π_{d≠c} Φ(z + (μ_c − μ_d)/σ),  z ~ N(0, 1);  of a single output  P(+) = Φ(μ/σ),

    by Gauss–Hermite quadrature.

    >>> even = probabilities(torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    >>> round(even[0, 0].item(), 12)
    0.333333333333
    """
    scale = deviation.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)[:, None]
    if mean.shape[1] == 1:
        signed: Tensor = torch.special.ndtr(torch.cat([-mean, mean], 1) / scale)
        return signed
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
    units, columns = mean / scale, []
    for c in range(mean.shape[1]):
        gaps = units[:, [c]] - units[:, [d for d in range(mean.shape[1]) if d != c]]
        below = torch.special.log_ndtr(nodes[:, None, None] + gaps).sum(2).exp()
        columns.append((weights[:, None] * below).sum(0) / weights.sum())
    stacked = torch.stack(columns, 1)
    total: Tensor = stacked.sum(1, keepdim=True)
    return stacked / total


def log_loss(chances: Float[Tensor, "point class"], labels: Int[Tensor, " point"]) -> float:
    """The negative log-likelihood −mean log P(label), no label less probable than numbers can say."""
    probable = chances[torch.arange(len(labels)), labels].clamp(min=torch.finfo(chances.dtype).tiny)
    return float(0.0 - probable.log().mean())


def calibration_error(
    chances: Float[Tensor, "point class"], labels: Int[Tensor, " point"]
) -> float:
    """The expected calibration error Σ_bins share · |accuracy − mean confidence| (Guo et al. 2017, 15 bins).

    >>> certain = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> calibration_error(certain, torch.tensor([1, 0]))
    0.5
    """
    confidence, chosen = chances.max(1)
    right = (chosen == labels).to(confidence.dtype)
    bin_index = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=confidence.dtype).index_add_(0, bin_index, right - confidence)
    return float(gaps.abs().sum()) / len(labels)
