"""Effects that are no estimates: the run is trained again without each example, where a sweep back takes longer.

    effect of i = f_T trained without i − f_T        from the same start, in the same order

Groups are left out as well: their members' effects add up to what a group changes only where they do not interact.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.records.contributions import RETRAINED
from ntkexp.records.leave_out import LeaveOut
from ntkexp.removal.check import beside, groups, outputs_without, sizes
from ntkexp.removal.rerun import Rerun
from ntkexp.report.leave_out import held_against
from ntkexp.run.effects_found import EffectsFound, rerun_of, spread
from ntkexp.run.state import RunState
from ntkexp.run.sweep_setting import SweepSetting
from ntkexp.text import short

REPEATED = 0.01
"""The training as it was must end where it did, to this share of what single removals change."""


def effects_trained(state: RunState, asked: SweepSetting) -> EffectsFound:
    """The effects at the points that were asked about, by training."""
    setting, rerun = state.setting, rerun_of(state)
    inputs, outs = setting.problem.inputs[asked.points], list(setting.domain.integrated)
    whole, *without = outputs_without(rerun, [[k] for k in range(rerun.examples)], inputs)
    changes = (torch.stack(without) - whole)[:, :, outs]
    values = spread(setting, asked, changes.permute(1, 2, 0))
    with torch.no_grad():
        missed = (whole - rerun.outputs(rerun.flat.vector(state.weights), inputs))[:, outs]
    check = check_of(rerun, values[asked.points], inputs, (asked.points - setting.domain.read.start).tolist(), outs)
    told = [f"effects are changes in {rerun.examples} trainings, each without one example"]
    told += drifted(missed, changes)
    told += [] if check is None else [f"of groups, sums of effects: {held_against(check, growth=1.0).sentence}"]
    facts: dict[str, float | str] = {"kind": RETRAINED, "mean": setting.experiment.path.mean}
    return EffectsFound(values=values, facts=facts, caveats=told, check=check)


def drifted(missed: Float[Tensor, "point out"], changes: Float[Tensor, "train point out"]) -> list[str]:
    """Say so, where training amplifies rounding to the size of what it is asked about."""
    changed, off = float(changes.square().mean().sqrt()), float(missed.square().mean().sqrt())
    if off <= REPEATED * changed or off == changed == 0.0:
        return []
    return [
        f"trained again as it was, the run ends {short(off)} from where it did, without single examples "
        f"{short(changed)}: its steps amplify rounding, so believe no effect; choose a smaller step size"
    ]


def check_of(
    rerun: Rerun,
    effect: Float[Tensor, "point integrated train"],
    inputs: Float[Tensor, "point *shape"],
    probe: list[int],
    outs: list[int],
) -> LeaveOut | None:
    """Sums of effects on these outputs, held against trainings without groups, if there are any."""
    if not any(size > 1 for size in sizes(rerun.examples)):
        return None
    chosen = groups(effect.square().sum((0, 1)).sqrt(), rerun.seed)
    several = [each for each in chosen if len(each.examples) > 1]
    whole, *without = outputs_without(rerun, [each.examples for each in several], inputs)
    return beside(effect, several, (torch.stack(without) - whole)[:, :, outs], probe)
