"""The largest eigenvalue of a symmetric matrix that is known by its products with vectors alone (Lanczos 1950).

With orthonormal v_1, v_2, … from v_{k+1} ∝ A v_k, made orthogonal to all before, A becomes tridiagonal. Its largest
eigenvalue there is Rayleigh's quotient of the best of all vectors that were reached: it comes from below, and needs a
tenth of the products that A v, A²v, … by themselves would need.

>>> matrix = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
>>> round(largest_eigenvalue(lambda vector: matrix @ vector, torch.ones(3, dtype=torch.float64)), 12)
3.0
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, sqrt

import torch
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
