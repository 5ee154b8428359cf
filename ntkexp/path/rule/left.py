"""The left end of the step: the sum of Domingos (2020), of first order in the step size."""

from __future__ import annotations

from ntkexp.path.rule.base import AbstractRule, Piece


class Left(AbstractRule):
    """J(θ₀).

    >>> Left().quadrature(nodes=2, pieces=1, romberg=0)
    (Piece(start=0.0, end=0.0, weight=1.0),)
    """

    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        return (Piece(0.0, 0.0, 1.0),)

    def detail(self, nodes: int, pieces: int, romberg: int) -> str:
        return ""
