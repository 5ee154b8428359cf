"""The contributions of one walk, read in many ways at once: the ways share the tapes inside each step."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.integrals import Integrals
from ntkexp.path.points import StepBlock
from ntkexp.path.rule.base import Piece
from ntkexp.run.setting import Setting, prepare
from tests.run.small import small

Ways = Mapping[str, tuple[Piece, ...]]


def contributions(ways: Ways, *overrides: str) -> dict[str, Float[Tensor, "probe out train"]]:
    """𝒮 at the probe points by each quadrature of the steps."""
    setting = prepare(small("path.probes=[probe]", *overrides))
    found = {name: with_room(pieces, setting) for name, pieces in ways.items()}
    for step in setting.descent.walk(setting.problem.weights):
        for place in setting.domain.places:
            block = StepBlock(setting.points, step.segment, place)
            for integrals in found.values():
                integrals.add(step, block)
    return {name: integrals.contributions[setting.domain.read] for name, integrals in found.items()}


def with_room(pieces: tuple[Piece, ...], setting: Setting) -> Integrals:
    """Nothing accumulated yet."""
    return Integrals(pieces, *(setting.start.kernel.new_zeros(setting.start.kernel.shape[:axes]) for axes in (4, 3, 2)))


def distance(left: Float[Tensor, "probe out train"], right: Float[Tensor, "probe out train"]) -> float:
    """‖𝒮 − 𝒮′‖/‖𝒮′‖."""
    return float((left - right).norm() / right.norm())
