"""Secant Jacobians: exact at every step size, for kinks too.

The step is cut into n equal pieces and their secant Jacobians J̄ are averaged. Each closes, J̄Δθ = Δf, and the
differences telescope, so the average closes for every n; its parts tend to those of the integral like n⁻². Romberg's
extrapolation keeps the closure, because its weights sum to one:

    S(n, 0) = S_n,    S(n, k) = S(n, k−1) + (S(n, k−1) − S(n/2, k−1)) / (4ᵏ − 1)
"""

from __future__ import annotations

from typing import ClassVar

from ntkexp.mistake import Mistake
from ntkexp.path.rule.base import AbstractRule, Piece


class Secant(AbstractRule):
    """S(pieces, romberg).

    >>> Secant().quadrature(nodes=2, pieces=1, romberg=0)
    (Piece(start=0.0, end=1.0, weight=1.0),)
    >>> Secant().quadrature(nodes=2, pieces=2, romberg=1)[-1]
    Piece(start=0.0, end=1.0, weight=-0.3333333333333333)
    """

    closes: ClassVar[bool] = True

    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        if pieces % 2**romberg:
            raise Mistake(
                f"path.romberg={romberg} halves the pieces {romberg} times, but path.pieces={pieces} is no multiple of "
                f"{2**romberg}"
            )
        return tuple(
            Piece(k / n, (k + 1) / n, share / n) for n, share in shares(pieces, romberg).items() for k in range(n)
        )

    def detail(self, nodes: int, pieces: int, romberg: int) -> str:
        return f"pieces={pieces}" + (f" romberg={romberg}" if romberg else "")


def shares(pieces: int, romberg: int) -> dict[int, float]:
    """The weight of S_n, S_{n/2}, … in S(n, romberg).

    >>> shares(2, 1)
    {2: 1.3333333333333333, 1: -0.3333333333333333}
    """
    if romberg == 0:
        return {pieces: 1.0}
    gain = 1 / (4**romberg - 1)
    total = {n: (1 + gain) * share for n, share in shares(pieces, romberg - 1).items()}
    for n, share in shares(pieces // 2, romberg - 1).items():
        total[n] = total.get(n, 0.0) - gain * share
    return total
