"""Training with a fixed kernel and Gaussian processes, in closed form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.text import short

# --- Gains. Training with a fixed kernel removes a fraction of the residual y − f_0(X).
# Along an eigenvector of the kernel with eigenvalue λ, this fraction is λ g(λ). The gain
# g depends on the training method and on the time.


class AbstractGain(ABC):
    """The gain g(λ) of a training method after a fixed time."""

    @abstractmethod
    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        """Return the gain g(λ) of each non-negative eigenvalue λ."""

    @property
    @abstractmethod
    def doubled(self) -> AbstractGain:
        """The gain of training for twice the time."""


@dataclass(frozen=True)
class FlowGain(AbstractGain):
    """Gradient flow for a time s: g(λ) = (1 − e^{−sλ})/λ and g(0) = s;
    for s = ∞, g(λ) = 1/λ.

    The time s includes the weight of an example in the loss. If the loss is the mean
    over N examples, t steps of size η take the time s = ηt/N.

    >>> float(FlowGain(math.log(2))(torch.tensor([1.0], dtype=torch.float64)))
    0.5
    """

    time: float

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise Mistake(f"time={self.time:g}: it takes a number ≥ 0, or inf")

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        if self.time == math.inf:
            zeros = int((spectrum == 0).sum())
            if zeros:
                raise singular(f"{zeros} of {len(spectrum)} eigenvalues")
            return 1 / spectrum
        learned_share = -torch.expm1(-self.time * spectrum)
        return quotient(learned_share, spectrum, self.time)

    @property
    def doubled(self) -> FlowGain:
        return FlowGain(2 * self.time)


FOREVER = FlowGain(math.inf)


@dataclass(frozen=True)
class DescentGain(AbstractGain):
    """Gradient descent with k steps of size s: g(λ) = (1 − (1 − sλ)ᵏ)/λ and g(0) = ks.

    Descent diverges if sλ > 2.

    >>> float(DescentGain(0.5, 2)(torch.tensor([1.0], dtype=torch.float64)))
    0.75
    """

    size: float
    steps: int

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        step = self.size * spectrum  # sλ
        # 1 − (1 − sλ)ᵏ. For sλ < 1, use logarithms, which avoid cancellation. Otherwise
        # use powers.
        by_logarithm = -torch.expm1(self.steps * torch.log1p(-step.clamp(max=1)))
        by_power = 1 - (-1) ** self.steps * (step - 1).clamp(min=0) ** self.steps
        learned_share = torch.where(step < 1, by_logarithm, by_power)
        return quotient(learned_share, spectrum, self.size * self.steps)

    @property
    def doubled(self) -> DescentGain:
        return DescentGain(self.size, 2 * self.steps)


def divergence(step_size: float | None, largest: float, examples: int) -> str | None:
    """Return a warning if gradient descent diverges, else None. Without a step size,
    return None.

    `largest` is the largest eigenvalue of the kernel matrix with the ridge. Steps of
    size η on the mean loss of N examples diverge if η λ_max / N > 2.

    >>> divergence(5.0, 4.0, 8)
    'gradient descent diverges with steps of 5; take steps below 4, which is 2N/λ_max'
    >>> divergence(4.0, 4.0, 8)
    """
    if step_size is None or step_size * largest <= 2 * examples:
        return None
    return (
        f"gradient descent diverges with steps of {short(step_size)}; "
        f"take steps below {short(2 * examples / largest)}, which is 2N/λ_max"
    )


def quotient(
    numerator: Float[Tensor, " _"], denominator: Float[Tensor, " _"], limit: float
) -> Float[Tensor, " _"]:
    """Divide element by element. The quotient with the denominator 0 is `limit`."""
    zero = denominator == 0
    return torch.where(zero, limit, numerator / torch.where(zero, 1.0, denominator))


def singular(eigenvalues: str) -> Mistake:
    return Mistake(
        f"the kernel is singular ({eigenvalues} are zero to rounding), so training without end "
        "has no closed form; give a finite time, or a ridge > 0"
    )


Learned: TypeAlias = Callable[[Tensor], Tensor]
"""The map B ↦ g(R) B, where g is a gain, R = kernel matrix + ridge · identity, and B a
matrix [entry, column]."""


@dataclass(frozen=True)
class Modes:
    """The eigendecomposition of a kernel matrix: non-negative eigenvalues in ascending
    order, and eigenvectors. `lowest` is the smallest eigenvalue before rounding errors
    were set to zero."""

    values: Float[Tensor, " mode"]
    vectors: Float[Tensor, "entry mode"]
    lowest: float

    def at(self, gain: AbstractGain, ridge: float = 0.0) -> Learned:
        """Return the map B ↦ g(R) B, with the gain g and R = kernel + ridge."""
        refuse_negative(ridge)
        gains = gain(self.values + ridge)[:, None]
        return lambda right: self.vectors @ (gains * (self.vectors.mH @ right))


def modes_of(matrix: Float[Tensor, "entry entry"], eps: float | None = None) -> Modes:
    """Decompose the symmetric part of Θ(X, X).
    The result can be used for every time and ridge:

        g(R) B = V g(λ + ridge) Vᵀ B,    R = Θ(X, X) + ridge = V (λ + ridge) Vᵀ.

    Set eigenvalues that are only rounding errors to zero: those up to n · eps · λ_max,
    and those up to the absolute value of a negative eigenvalue. `eps` is the precision
    with which the entries were computed, by default that of the matrix's dtype.

    >>> theta = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
    >>> inverse = modes_of(theta).at(FOREVER, ridge=1.0)
    >>> inverse(torch.ones(2, 1, dtype=torch.float64)).flatten().tolist()
    [0.2, 1.0]
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    eps = eps or torch.finfo(values.dtype).eps
    rounding = torch.maximum(len(values) * eps * values[-1:], -values[:1])
    lowest = float(values[0]) if len(values) else 0.0
    return Modes(torch.where(values > rounding, values, 0.0), vectors, lowest)


def refuse_negative(ridge: float) -> None:
    """Raise if the ridge is negative or not finite."""
    if not 0 <= ridge < math.inf:
        raise Mistake(f"ridge={ridge:g}: it takes a number ≥ 0")


JITTER_ATTEMPTS = 6


@dataclass(frozen=True)
class Factor:
    """The Cholesky factor L of the kernel matrix R with ridge: L Lᵀ = R + jitter."""

    lower: Float[Tensor, "entry entry"]
    jitter: float

    def solve(
        self, right: Float[Tensor, "entry column"]
    ) -> Float[Tensor, "entry column"]:
        """Return (R + jitter)⁻¹ B for the matrix B = `right`."""
        return torch.cholesky_solve(right, self.lower)


def factorise(
    matrix: Float[Tensor, "entry entry"], ridge: float, eps: float | None = None
) -> Factor:
    """Compute the Cholesky factor of R = Θ + ridge. It solves R a = y, which describes
    training until t = ∞.

    This takes a tenth of the time of an eigendecomposition, but serves only one ridge.
    If R has a ridge but is indefinite because of rounding, add a jitter, a small
    multiple of the identity. Multiply the jitter by ten at each later attempt. Without
    a ridge, raise if the matrix is singular up to rounding. `eps` is the relative error
    of the entries. By default, it is the precision of the matrix's dtype.

    >>> factor = factorise(torch.tensor([[3.0]], dtype=torch.float64), ridge=1.0)
    >>> float(factor.solve(torch.ones(1, 1, dtype=torch.float64))), factor.jitter
    (0.25, 0.0)
    """
    refuse_negative(ridge)
    eps = eps or torch.finfo(matrix.dtype).eps
    rounding = len(matrix) * eps * float(matrix.diagonal().mean())
    jitters = [0.0]
    if ridge:
        jitters += [rounding * 10.0**k for k in range(JITTER_ATTEMPTS)]
    for jitter in jitters:
        regularised = matrix.clone()
        regularised.diagonal().add_(ridge + jitter)
        lower, failed = torch.linalg.cholesky_ex(regularised)
        if not failed and (ridge or float(lower.diagonal().min()) ** 2 > rounding):
            return Factor(lower, jitter)
    raise singular("some of its eigenvalues")


RIDGE_MULTIPLES = tuple(10.0 ** (k / 2) for k in range(-16, 3))
"""Ridges to try, as multiples of the mean of the kernel's diagonal."""


def held_out(
    modes: Modes,
    ridge: float,
    targets: Float[Tensor, "entry column"],
    folds: Sequence[Tensor],
) -> Float[Tensor, "entry column"]:
    """Predict each fold by kernel regression on the other folds, in closed form:

        f_{∖F}(X_F) = y_F − ((R⁻¹)_FF)⁻¹ (R⁻¹ y)_F

    (Rasmussen & Williams 2006, 5.4.2). R is the kernel matrix with ridge, and f_{∖F} is
    fitted without the fold F. Folds of one example give leave-one-out predictions. The
    eigendecomposition `modes` serves every ridge.

    >>> theta = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> y = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    >>> [round(float(value), 12) for value in held_out(modes_of(theta), 0.0, y, folds(2, 2))]
    [2.0, 1.0]
    """
    # R⁻¹ = V (λ + ridge)⁻¹ Vᵀ
    scaled_vectors = modes.vectors * FOREVER(modes.values + ridge)
    coefficients = modes.at(FOREVER, ridge)(targets)  # R⁻¹ y
    predicted = torch.empty_like(targets)
    for fold in folds:
        inverse_block = scaled_vectors[fold] @ modes.vectors[fold].mH  # (R⁻¹)_FF
        predicted[fold] = targets[fold] - torch.linalg.solve(
            inverse_block, coefficients[fold]
        )
    return predicted


def folds(examples: int, count: int, entries: int = 1) -> list[Tensor]:
    """Split examples into `count` folds. Fold k contains the examples k, k + count, ….

    A matrix has `entries` rows for each example (one for each output).
    Return the rows of each fold.

    >>> [fold.tolist() for fold in folds(3, 2, entries=2)]
    [[0, 1, 4, 5], [2, 3]]
    """
    rows = torch.arange(examples * entries).view(examples, entries)
    return [rows[k::count].flatten() for k in range(min(count, examples))]


def ridges(matrix: Float[Tensor, "entry entry"]) -> list[float]:
    """Return the grid of ridges for this kernel."""
    return [multiple * float(matrix.diagonal().mean()) for multiple in RIDGE_MULTIPLES]


def best_ridge(
    matrices: Sequence[Float[Tensor, "entry entry"]],
    modes: Sequence[Modes],
    targets: Sequence[Float[Tensor, "entry column"]],
    folds: Sequence[Tensor],
) -> float:
    """Return the ridge whose cross-validated predictions have the smallest squared
    error. Several linear systems, such as one for each output, share the ridge.

    >>> theta = torch.tensor([[2.0, 1.9], [1.9, 2.0]], dtype=torch.float64)
    >>> y = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    >>> round(best_ridge([theta], [modes_of(theta)], [y], folds(2, 2)), 12)
    0.2
    """

    def validation_error(ridge: float) -> float:
        errors = (
            held_out(modes_of_matrix, ridge, right, folds) - right
            for modes_of_matrix, right in zip(modes, targets, strict=True)
        )
        return sum(float(error.square().sum()) for error in errors)

    grid = [fmean(each) for each in zip(*map(ridges, matrices), strict=True)]
    return min(grid, key=validation_error)


CG_TOLERANCE = 1e-10
MAX_CG_PRODUCTS = 2000


@dataclass(frozen=True)
class Solution:
    """A solution of linear equations, its largest relative residual,
    and the number of products."""

    solution: Float[Tensor, "entry column"]
    residual: float
    products: int


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    diagonal: Float[Tensor, " entry"],
    right: Float[Tensor, "entry column"],
    tolerance: float = CG_TOLERANCE,
    most: int = MAX_CG_PRODUCTS,
    report_progress: Callable[[int, float], None] = lambda products, residual: None,
) -> Solution:
    """Solve R a = y by conjugate gradients (Hestenes & Stiefel 1952),
    given products with R.

    Solve the columns independently, with the diagonal of R as preconditioner. Stop when
    every residual ‖y − R a‖ is at most `tolerance` ‖y‖, or after `most` products. A
    matrix with n distinct eigenvalues needs at most n products. After each product,
    `report_progress` receives the number of products and the largest relative residual.

    >>> R = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    >>> y = torch.ones(2, 1, dtype=torch.float64)
    >>> solved = conjugate_gradients(lambda a: R @ a, R.diagonal(), y)
    >>> solved.solution.flatten().tolist(), solved.products
    ([1.0, 0.25], 1)
    """
    solution = torch.zeros_like(right)
    residual = right.clone()
    scale = right.norm(dim=0).clamp(min=torch.finfo(right.dtype).tiny)
    direction = residual / diagonal[:, None]
    slope = (residual * direction).sum(0)
    relative_residual = float((residual.norm(dim=0) / scale).max())
    products = 0
    while relative_residual > tolerance and products < most:
        # r is the residual, p the direction, and z = r / diag(R). In a column that has
        # converged, α and β are 0.
        # a ← a + α p, r ← r − α R p with α = rᵀz / pᵀR p
        image = product(direction)
        step = quotient(slope, (direction * image).sum(0), 0.0)
        solution = solution + step * direction
        residual = residual - step * image
        # p ← z + β p with β = rᵀz / (rᵀz before)
        conditioned = residual / diagonal[:, None]
        previous_slope = slope
        slope = (residual * conditioned).sum(0)
        direction = conditioned + quotient(slope, previous_slope, 0.0) * direction
        relative_residual = float((residual.norm(dim=0) / scale).max())
        products += 1
        report_progress(products, relative_residual)
    return Solution(solution, relative_residual, products)


# --- Gaussian processes: posteriors given noisy targets,
# and ensembles of infinitely wide networks


@dataclass(frozen=True)
class Kernels:
    """The blocks K(X, X) and K(x, X) of a kernel. X are the training examples, and x
    other points."""

    train: Float[Tensor, "train train"]
    cross: Float[Tensor, "point train"]


@dataclass(frozen=True)
class Posterior:
    """A Gaussian process conditioned on targets with noise of variance σ²:

        mean        K(x, X) (K(X, X) + σ²)⁻¹ y
        covariance  K(x, x′) − K(x, X) (K(X, X) + σ²)⁻¹ K(X, x′)

    The map `learned` replaces the inverse in the mean, and `twice` the inverse in the
    covariance. For networks whose readout was trained for a time s, they apply the
    gains for the times s and 2s. If σ² > 0, `covariance` differs from the covariance of
    trained networks (`Ensemble.covariance`)."""

    cross: Float[Tensor, "point train"]
    learned: Learned
    twice: Learned

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        return self.cross @ self.learned(targets)

    def covariance(
        self, prior: Float[Tensor, "point point"]
    ) -> Float[Tensor, "point point"]:
        """Return the posterior covariance between points.
        `prior` is the prior covariance."""
        return prior - self.cross @ self.twice(self.cross.mH)

    def variance(self, prior: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """Return the diagonal of `covariance`. `prior` is
        the diagonal of the prior covariance."""
        return prior - (self.cross.mH * self.twice(self.cross.mH)).sum(0)


def condition(
    prior: Kernels, noise: float = 0.0, gain: AbstractGain = FOREVER
) -> Posterior:
    """Condition a Gaussian process with covariance `prior` on targets
    at the training inputs.

    `noise` is the variance σ² of the targets.
    `gain` describes training for a finite time.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> posterior = condition(Kernels(one, one), noise=1.0)
    >>> float(posterior.mean(one)), float(posterior.variance(one[0]))
    (0.5, 0.5)
    """
    modes = modes_of(prior.train)
    return Posterior(prior.cross, modes.at(gain, noise), modes.at(gain.doubled, noise))


@dataclass(frozen=True)
class Ensemble:
    """The outputs of infinitely wide networks after training (Lee et al. 2019).

    `cross` is the tangent kernel Θ(x, X). `start` is 𝒢, the covariance of the outputs
    before training. `learned` is the map g(R) with the gain g and R = Θ(X, X) + ridge.
    With A = Θ(x, X) g(R) and A′ = Θ(x′, X) g(R),

        one network:  f_t(x) = f_0(x) + A (y − f_0(X))
        mean          A y
        covariance    𝒢(x, x′) + A 𝒢(X, X) A′ᵀ − A 𝒢(X, x′) − 𝒢(x, X) A′ᵀ.

    If training changes the readout only, Θ = 𝒢. At t = ∞ without a ridge, the outputs
    are then the Gaussian process with covariance 𝒢, conditioned on the targets. See
    arXiv:1902.06720.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> learned = modes_of(4 * one).at(FOREVER)
    >>> trained = Ensemble(2 * one, Kernels(one, one), learned)  # at a point with f_0(x) = f_0(X)
    >>> float(trained.mean(3 * one)), float(trained.variance(one[0]))
    (1.5, 0.25)
    """

    cross: Float[Tensor, "point train"]
    start: Kernels
    learned: Learned

    @property
    def weights(self) -> Float[Tensor, "point train"]:
        """The matrix A: the weight of each training target in the mean output
        at each point."""
        return self.learned(self.cross.mH).mH

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        return self.cross @ self.learned(targets)

    def covariance(
        self, start: Float[Tensor, "point point"]
    ) -> Float[Tensor, "point point"]:
        """Return the covariance of one output between points x and x′.
        `start` is 𝒢(x, x′)."""
        A = self.weights
        mixed = A @ self.start.cross.mH
        return start + A @ self.start.train @ A.mH - mixed - mixed.mH

    def variance(self, start: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """Return the diagonal of `covariance`. `start` is the diagonal of 𝒢(x, x′)."""
        A = self.weights
        return (
            start
            + (A @ self.start.train * A).sum(1)
            - 2 * (A * self.start.cross).sum(1)
        )


HERMITE_NODES = 48
CALIBRATION_BINS = 15


def probabilities(
    mean: Float[Tensor, "point out"], deviation: Float[Tensor, " point"]
) -> Float[Tensor, "point class"]:
    """Return the probability that each class has the largest output,
    for independent Gaussian outputs.

    With means μ_c and a common standard deviation σ, by Gauss–Hermite quadrature,

        P(c is largest) = E Π_{d≠c} Φ(z + (μ_c − μ_d)/σ),  z ~ N(0, 1).

    With a single output, P(second class) = Φ(μ/σ).

    >>> mean = torch.zeros(1, 3, dtype=torch.float64)
    >>> even = probabilities(mean, torch.ones(1, dtype=torch.float64))
    >>> round(even[0, 0].item(), 12)
    0.333333333333
    """
    scale = deviation.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)[:, None]
    if mean.shape[1] == 1:
        signed: Tensor = torch.special.ndtr(torch.cat([-mean, mean], 1) / scale)
        return signed
    points, quadrature_weights = np.polynomial.hermite_e.hermegauss(HERMITE_NODES)
    nodes = torch.as_tensor(points)
    weights = torch.as_tensor(quadrature_weights)
    scaled_means = mean / scale
    classes = range(mean.shape[1])
    columns = []
    for c in classes:
        others = [d for d in classes if d != c]
        gaps = scaled_means[:, [c]] - scaled_means[:, others]
        # Π_{d≠c} Φ(z + gap) at every quadrature point z
        products = torch.special.log_ndtr(nodes[:, None, None] + gaps).sum(2).exp()
        columns.append((weights[:, None] * products).sum(0) / weights.sum())
    chances = torch.stack(columns, 1)
    total: Tensor = chances.sum(1, keepdim=True)
    return chances / total


def log_loss(
    chances: Float[Tensor, "point class"], labels: Int[Tensor, " point"]
) -> float:
    """Return −mean log P(label).

    Probabilities are clamped to the smallest positive normal float.
    """
    chance_of_label = chances[torch.arange(len(labels)), labels]
    chance_of_label = chance_of_label.clamp(min=torch.finfo(chances.dtype).tiny)
    return float(0.0 - chance_of_label.log().mean())


def calibration_error(
    chances: Float[Tensor, "point class"], labels: Int[Tensor, " point"]
) -> float:
    """Return the expected calibration error with 15 bins
    of confidence (Guo et al. 2017).

        ECE = Σ_bins share · |accuracy − mean confidence|

    >>> certain = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> calibration_error(certain, torch.tensor([1, 0]))
    0.5
    """
    confidence, predicted = chances.max(1)
    correct = (predicted == labels).to(confidence.dtype)
    bin_index = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=confidence.dtype)
    gaps.index_add_(0, bin_index, correct - confidence)
    return float(gaps.abs().sum()) / len(labels)
