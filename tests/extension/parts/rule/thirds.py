"""Secants over the first third of a step and over the rest. Their weights are their lengths, so they close the step."""

from __future__ import annotations

from typing import ClassVar

from ntkexp.path.rule.base import AbstractRule, Substep


class Thirds(AbstractRule):
    """⅓ J̄(0, ⅓) + ⅔ J̄(⅓, 1)."""

    closes: ClassVar[bool] = True

    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        return (Substep(0.0, 1 / 3, 1 / 3), Substep(1 / 3, 1.0, 2 / 3))

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return "thirds"
