"""Conjugate gradients (Hestenes & Stiefel 1952) for R a = y, where R is known by its products alone and is never held.

With the diagonal of R as preconditioner, each column on its own; it ends when every residual ‖y − R a‖ has fallen below
`tolerance` ‖y‖. Of n distinct eigenvalues it needs n products; of a few that stand out and a ridge, few.

>>> two = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
>>> found = conjugate_gradients(lambda a: two @ a, two.diagonal(), torch.ones(2, 1, dtype=torch.float64))
>>> found.solution.flatten().tolist(), found.products
([1.0, 0.25], 1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
