"""What a run says of its effects: the numbers, what is known of them, and what there is to say against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.caveats import Caveats
from ntkexp.records.leave_out import LeaveOut
from ntkexp.removal.again import again
from ntkexp.removal.agreement import agreement
from ntkexp.removal.check import leave_out, sizes
from ntkexp.removal.rerun import Rerun
from ntkexp.report.leave_out import held_against
from ntkexp.run.effects_pass import EffectsPass
from ntkexp.run.state import RunState
from ntkexp.shapes import Weights

RETRAININGS = 2
"""A sweep back for one output takes as long as so many trainings, or longer."""

EVERYONE = "every example was left out alone, which costs less than effects: `explain` tells what came of it"

UNCHECKED = "effects of path.mean=fixed were not checked, as trainings without examples renormalise their means"


@dataclass(frozen=True, kw_only=True)
class EffectsFound:
    """NaN stands where no effect was asked for."""

    values: Float[Tensor, "point out train"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # of trainings without examples; None: there was no step, or nobody to leave out


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
    rerun, mean = rerun_of(state), setting.experiment.path.mean
    comparable = state.step > 0 and mean == "renormalised"  # as trainings again are
    agrees = agreement_of(found, rerun, state.weights) if comparable else None
    check = check_of(found, rerun, values) if comparable and sizes(setting.points.train) else None
    caveats = Caveats(
        growth=found.growth,
        agreement=agrees,
        kinks=found.asked.kinks,
        eps=None if (spread := setting.experiment.optimizer.spread_at(0)) is None else spread.eps,
    )
    kind = "one_step" if setting.experiment.path.effects == "one_step" else "derivative"
    facts: dict[str, float | str] = {"kind": kind, "mean": mean, "growth": found.growth}
    told = [*caveats.sentences, *([] if check is None else [checked(check, found.growth, setting.points.train)])]
    told += [UNCHECKED] if mean != "renormalised" else []
    return EffectsFound(
        values=values,
        facts=facts if agrees is None else facts | {"agreement": agrees},
        caveats=told,
        check=check,
    )


def checked(check: LeaveOut, growth: float, train: int) -> str:
    """Say what the check has found, and that it went further than a check where that was cheap."""
    said = held_against(check, growth).sentence
    return said if check.alone(train) is None else f"{said} ({EVERYONE})"


def rerun_of(state: RunState) -> Rerun:
    """The training, to be carried out again."""
    setting = state.setting
    return again(setting.experiment, setting.problem, setting.descent.step_size, state.step)


def check_of(found: EffectsPass, rerun: Rerun, values: Float[Tensor, "point out train"]) -> LeaveOut:
    """Effects at the points where they were computed, held against trainings without examples."""
    points, domain = found.asked.points, found.setting.domain
    probe = (points - domain.read.start).tolist()
    cheap = rerun.examples <= RETRAININGS * len(points) * len(domain.integrated)
    return leave_out(rerun, values[points], found.setting.problem.inputs[points], probe, everyone=cheap)


def agreement_of(found: EffectsPass, rerun: Rerun, end: Weights) -> float:
    """Whether half of a removal does half of it."""
    inputs = found.setting.problem.inputs[found.asked.points]
    return agreement(rerun, rerun.flat.vector(end), inputs, found.setting.domain.integrated)
