"""A tangent kernel in numbers: its spectrum, its alignment with the targets, and its distance from another kernel.

The largest eigenvalue of a symmetric matrix that is known by its products with vectors alone (Lanczos 1950).

With orthonormal v_1, v_2, … from v_{k+1} ∝ A v_k, made orthogonal to all before, A becomes tridiagonal. Its largest
eigenvalue there is Rayleigh's quotient of the best of all vectors that were reached: it comes from below, and needs a
tenth of the products that A v, A²v, … by themselves would need.

>>> matrix = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
>>> round(largest_eigenvalue(lambda vector: matrix @ vector, torch.ones(3, dtype=torch.float64)), 12)
3.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

PRODUCTS, SETTLED = 100, 1e-7  # at most so many, until one more changes the value by no more


def largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Find λ_max on the space that products span from a vector of any shape; NaN where a product is not finite."""
    if not (length := norm(start)):
        return 0.0
    basis, diagonal, beside, found = [start / length], list[float](), list[float](), 0.0
    while len(diagonal) < PRODUCTS:
        image = product(basis[-1])
        diagonal.append(inner(image, basis[-1]))
        if not isfinite(diagonal[-1]):
            return diagonal[-1]
        before, found = found, top_of(diagonal, beside)
        for vector in 2 * basis:  # once would leave what rounding had left of a vector
            image = image - inner(image, vector) * vector
        if abs(found - before) <= SETTLED * found or norm(image) <= torch.finfo(image.dtype).eps * abs(found):
            break
        beside.append(norm(image))
        basis.append(image / beside[-1])
    return found


def top_of(diagonal: list[float], beside: list[float]) -> float:
    """Find λ_max of a tridiagonal matrix."""
    upper = torch.tensor(beside, dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(upper, 1) + torch.diag(upper, -1)
    return float(torch.linalg.eigvalsh(matrix)[-1])


def inner(one: Tensor, other: Tensor) -> float:
    """Multiply two vectors of any shape."""
    return float(torch.dot(one.flatten(), other.flatten()))


def norm(vector: Tensor) -> float:
    """Measure the length of a vector of any shape."""
    return sqrt(inner(vector, vector))


# --- What a tangent kernel among the training examples says about training, in numbers.
#
# With the eigenvalues λ of the (M·C)×(M·C) matrix K and p = λ/Σλ:
#
#     effective rank    exp(−Σ p log p)
#     stability         η w λ_max max ℓ″ / 2: gradient descent on a quadratic with this kernel is stable below 1


TOP = 10
DENSE = 4096  # entries; all eigenvalues of a larger matrix would take minutes at every snapshot


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues stand from the largest down, with their eigenvectors."""

    values: Float[Tensor, " mode"]
    modes: Float[Tensor, "entry mode"]

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the normalised eigenvalues.

        >>> Spectrum(torch.tensor([2.0, 2.0, 0.0]), torch.eye(3)).effective_rank
        2.0
        """
        positive = self.values[self.values > 0]
        shares = positive / positive.sum()
        return float(torch.exp(-(shares * shares.log()).sum()))

    @property
    def condition(self) -> float:
        """λ_max/λ_min; infinite where λ_min is zero to rounding."""
        smallest, largest = float(self.values[-1]), float(self.values[0])
        noise = len(self.values) * torch.finfo(self.values.dtype).eps * largest
        return largest / smallest if smallest > noise else float("inf")

    def share(self, vectors: Float[Tensor, "entry *vector"], top: int) -> float:
        """How much of ‖v‖² lies in the eigenspace of the `top` largest eigenvalues, of all vectors together."""
        inside = self.modes[:, :top].mH @ vectors
        whole = float(vectors.square().sum())
        return float(inside.square().sum()) / whole if whole else float("nan")


def spectrum(kernel: Float[Tensor, "train out train out_"]) -> Spectrum:
    """Find the eigenvalues and eigenvectors of the kernel as a matrix."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values, modes = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return Spectrum(values.flip(0), modes.flip(1))


def largest(kernel: Float[Tensor, "train out train out_"]) -> float:
    """λ_max: from all eigenvalues of a matrix that is small enough, from below by products with a larger one."""
    matrix = kernel.flatten(2).flatten(0, 1)
    if len(matrix) <= DENSE:
        return float(torch.linalg.eigvalsh((matrix + matrix.mH) / 2)[-1])
    return largest_eigenvalue(matrix.__matmul__, matrix.diagonal().sqrt())


# --- How far a kernel is from another one: from that of the start, from that of infinite width, from that of the
# labels.
#
# drift             ‖K − K′‖/‖K′‖ alignment         ⟨K, K′⟩/(‖K‖‖K′‖); centred (CKA) with H = 1 − 11ᵀ/M on both
# sides


def drift(kernel: Float[Tensor, "..."], start: Float[Tensor, "..."]) -> float:
    """Find the distance of a kernel from where it started, relative to the start.

    >>> import torch
    >>> drift(1.5 * torch.eye(4), torch.eye(4))
    0.5
    """
    return float((kernel - start).norm() / start.norm())


def alignment(left: Float[Tensor, "..."], right: Float[Tensor, "..."]) -> float:
    """Find the cosine between two kernels.

    >>> import torch
    >>> alignment(torch.eye(4), torch.eye(4) * 3)
    1.0
    """
    return float((left * right).sum() / (left.norm() * right.norm()))


def label_alignment(kernel: Float[Tensor, "train kept train kept_"], targets: Float[Tensor, "train out"]) -> float:
    """Find the CKA of the kernel, averaged over outputs, with the kernel yyᵀ of the targets."""
    averaged = kernel.diagonal(dim1=1, dim2=3).mean(2)
    return alignment(centred(averaged), centred(targets @ targets.t()))


def centred(kernel: Float[Tensor, "train train"]) -> Float[Tensor, "train train"]:
    """H K H."""
    return kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
