"""Effects that are no estimates: the run is trained again without each example, where a sweep back takes longer.

    effect of i = f_T trained without i − f_T        from the same start, in the same order

Groups are left out as well: their members' effects add up to what a group changes only where they do not interact.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.records.contributions import RETRAINED
from ntkexp.removal.check import changes, groups_left_out, outputs_without
from ntkexp.report.leave_out import told_of_trainings
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
    alone = (torch.stack(without) - whole)[:, :, outs]
    values = spread(setting, asked, alone.permute(1, 2, 0))
    with torch.no_grad():
        missed = (whole - rerun.outputs(rerun.flat.vector(state.weights), inputs))[:, outs]
    probe = (asked.points - setting.domain.read.start).tolist()
    check = groups_left_out(
        values[asked.points], rerun.seed, lambda groups: changes(rerun, groups, inputs)[:, :, outs], probe
    )
    told = told_of_trainings(rerun.examples, drifted(missed, alone), check)
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
