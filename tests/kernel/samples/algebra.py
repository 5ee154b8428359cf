"""Functions of matrices, at matrices that are regular wherever they move."""

from __future__ import annotations

import torch
from torch import Tensor, linalg

from tests.kernel.samples.base import Sample, square


def matrix(h: Tensor, k: Tensor) -> Tensor:
    """Three rows and three columns for every example."""
    return torch.cat([h, k[:, :3]], 1).view(len(h), 3, 3)


def tall(h: Tensor, k: Tensor) -> Tensor:
    """Four rows and three columns."""
    return torch.cat([h, k], 1).view(len(h), 4, 3)


def diagonal(size: float, rows: int = 3, columns: int = 3) -> Tensor:
    """The same number on the diagonal, as of every example."""
    return size * torch.eye(rows, columns, dtype=torch.float64)


def regular(h: Tensor, k: Tensor) -> Tensor:
    """A matrix whose diagonal outweighs its rows."""
    return matrix(h, k).tanh() + diagonal(4.0).to(h)


def definite(h: Tensor, k: Tensor) -> Tensor:
    """A symmetric matrix of positive eigenvalues."""
    return matrix(h, k) @ matrix(h, k).mT / 3 + diagonal(1.0).to(h)


def triangles(h: Tensor, k: Tensor) -> Tensor:
    """Systems of one triangle, from either side, one with a diagonal of ones; and a vector."""
    lower = linalg.solve_triangular(regular(h, k), square(k).mT, upper=False)
    upper = linalg.solve_triangular(matrix(h, k).tanh(), square(h), upper=True, unitriangular=True, left=False)
    return torch.cat([lower.flatten(1), upper.flatten(1)], 1)


def solved(h: Tensor, k: Tensor) -> Tensor:
    """Systems with one right side for all, or with vectors and matrices of their own, from either side."""
    shared = linalg.solve(regular(h, k), torch.arange(6.0, dtype=h.dtype).view(3, 2))
    own = linalg.solve(regular(h, k), square(h), left=False)
    return torch.cat([shared.flatten(1), own.flatten(1), linalg.solve(regular(h, k), k[:, :3])], 1)


def eigenvalues(h: Tensor, k: Tensor) -> Tensor:
    """Of either triangle."""
    both = matrix(h, k) + matrix(h, k).mT
    spread = torch.diag(torch.tensor([0.0, 5.0, -7.0], dtype=h.dtype))
    return torch.cat([linalg.eigvalsh(both.tanh() + spread, UPLO=side) for side in ("L", "U")], 1)


def decomposed(h: Tensor, k: Tensor) -> Tensor:
    """Both factors, of columns that keep their sides."""
    return torch.cat(linalg.qr(tall(h, k).tanh() + diagonal(-5.0, 4).to(h)), 1)


ALGEBRA: dict[str, Sample] = {
    "_linalg_det": lambda h, k: linalg.det(matrix(h, k))[:, None] * k,
    "_linalg_eigh": eigenvalues,
    "_linalg_slogdet": lambda h, k: torch.stack(linalg.slogdet(regular(h, k) * h[:, :1, None]), 1),
    "_linalg_solve_ex": solved,
    "_linalg_svd": lambda h, k: torch.cat(
        [linalg.svdvals(square(h)), linalg.matrix_norm(tall(h, k), "nuc")[:, None]], 1
    ),
    "cholesky_solve": lambda h, k: torch.cholesky_solve(square(k).mT, regular(h, k).tril(), upper=False),
    "linalg_cholesky_ex": lambda h, k: torch.stack(
        [linalg.cholesky(definite(h, k), upper=up) for up in (True, False)]
    ).sum(0),
    "linalg_householder_product": lambda h, k: linalg.householder_product(square(h).mT, k[:, :2]),
    "linalg_inv_ex": lambda h, k: linalg.inv(regular(h, k)),
    "linalg_matrix_exp": lambda h, k: linalg.matrix_exp(matrix(h, k) - matrix(h, k).mT),
    "linalg_pinv": lambda h, k: torch.cat(
        [linalg.pinv(regular(h, k)[:, :2]).flatten(1), linalg.pinv(definite(h, k), hermitian=True).flatten(1)], 1
    ),
    "linalg_qr": decomposed,
    "linalg_solve_triangular": triangles,
}
