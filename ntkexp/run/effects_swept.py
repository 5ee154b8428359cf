"""What a run says of effects that were found by sweeps back: what is known of them, and what speaks against them."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.caveats import Caveats
from ntkexp.effects.mean import kind_of
from ntkexp.records.leave_out import LeaveOut
from ntkexp.removal.agreement import agreement
from ntkexp.removal.check import leave_out, sizes
from ntkexp.removal.rerun import Rerun
from ntkexp.report.leave_out import held_against
from ntkexp.run.effects_found import EffectsFound, rerun_of, spread
from ntkexp.run.effects_pass import EffectsPass
from ntkexp.run.state import RunState
from ntkexp.shapes import Weights

EVERYONE = "every example was left out alone, which costs less than effects: `explain` tells what came of it"

UNCHECKED = "effects of path.mean=fixed were not checked, as trainings without examples renormalise their means"


def effects_swept(state: RunState, found: EffectsPass) -> EffectsFound:
    """The effects that sweeps back have found."""
    setting, values = state.setting, spread(state.setting, found.asked, found.effects)
    rerun, mean = rerun_of(state), setting.experiment.path.mean
    comparable = state.step > 0 and mean == "renormalised"  # as trainings again are
    agrees = agreement_of(found, rerun, state.weights) if comparable else None
    check = check_of(found, rerun, values) if comparable and sizes(setting.points.train) else None
    caveats = Caveats(
        growth=found.growth,
        agreement=agrees,
        kinks=found.asked.kinks,
        eps=None if (divisor := setting.experiment.optimizer.spread_at(0)) is None else divisor.eps,
    )
    kind = kind_of(setting.experiment.path.effects)
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


def check_of(found: EffectsPass, rerun: Rerun, values: Float[Tensor, "point integrated train"]) -> LeaveOut:
    """Effects at the points where they were computed, held against trainings without examples."""
    points, domain = found.asked.points, found.setting.domain
    probe, everyone = (points - domain.read.start).tolist(), found.asked.costs_more
    inputs, outs = found.setting.problem.inputs[points], domain.integrated
    return leave_out(rerun, values[points], inputs, probe, outs, everyone=everyone)


def agreement_of(found: EffectsPass, rerun: Rerun, end: Weights) -> float:
    """Whether half of a removal does half of it."""
    inputs = found.setting.problem.inputs[found.asked.points]
    return agreement(rerun, rerun.flat.vector(end), inputs, found.setting.domain.integrated)
