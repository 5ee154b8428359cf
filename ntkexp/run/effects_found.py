"""What a run says of its effects: the numbers, what is known of them, and what there is to say against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.caveats import Caveats
from ntkexp.removal.again import again
from ntkexp.removal.agreement import agreement
from ntkexp.run.effects_pass import EffectsPass
from ntkexp.run.state import RunState


@dataclass(frozen=True, kw_only=True)
class EffectsFound:
    """NaN stands where no effect was asked for."""

    values: Float[Tensor, "point out train"]
    facts: Mapping[str, float | str]
    caveats: list[str]


def effects_found(state: RunState) -> EffectsFound | None:
    """The effects, if they were asked for."""
    if (found := state.effects) is None:
        return None
    setting = state.setting
    values = setting.start.outputs.new_full(
        (*setting.start.outputs.shape, setting.points.train), torch.nan, dtype=torch.float64
    )
    for place, output in enumerate(setting.domain.integrated):
        values[found.asked.points, output] = found.effects[:, place].double()
    agrees = agreement_of(state, found)
    caveats = Caveats(
        growth=found.growth,
        agreement=agrees,
        kinks=found.asked.kinks,
        eps=None if (spread := setting.experiment.optimizer.spread_at(0)) is None else spread.eps,
    )
    facts = {"mean": setting.experiment.path.mean, "growth": found.growth}
    return EffectsFound(
        values=values, facts=facts if agrees is None else facts | {"agreement": agrees}, caveats=caveats.sentences
    )


def agreement_of(state: RunState, found: EffectsPass) -> float | None:
    """Whether half of a removal does half of it, in the convention of the mean in which trainings are taken again."""
    setting = state.setting
    if setting.experiment.path.mean != "renormalised" or not state.step:
        return None
    rerun = again(setting.experiment, setting.problem, setting.descent.step_size, state.step)
    inputs = setting.problem.inputs[found.asked.points]
    return agreement(rerun, rerun.flat.vector(state.weights), inputs, setting.domain.integrated)
