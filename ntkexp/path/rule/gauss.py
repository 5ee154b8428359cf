"""Gauss–Legendre nodes inside the step: order 2n in the step size on smooth networks, about 1 where there are kinks."""

from __future__ import annotations

import numpy as np

from ntkexp.path.rule.base import AbstractRule, Piece


class Gauss(AbstractRule):
    """Σ_k w_k J(θ₀ + u_k Δθ); one node is the midpoint.

    >>> Gauss().quadrature(nodes=1, pieces=1, romberg=0)
    (Piece(start=0.5, end=0.5, weight=1.0),)
    """

    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        positions, weights = np.polynomial.legendre.leggauss(nodes)
        return tuple(
            Piece(u, u, w) for u, w in zip(((1 + positions) / 2).tolist(), (weights / 2).tolist(), strict=True)
        )

    def detail(self, nodes: int, pieces: int, romberg: int) -> str:
        return f"nodes={nodes}"
