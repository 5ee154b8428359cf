"""What a run says of its effects: the numbers, what is known of them, and what there is to say against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.records.leave_out import LeaveOut
from ntkexp.removal.again import again
from ntkexp.removal.rerun import Rerun
from ntkexp.run.setting import Setting
from ntkexp.run.state import RunState
from ntkexp.run.sweep_setting import SweepSetting


@dataclass(frozen=True, kw_only=True)
class EffectsFound:
    """NaN stands where no effect was asked for."""

    values: Float[Tensor, "point out train"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # of trainings without examples; None: there was no step, or nobody to leave out


def spread(
    setting: Setting, asked: SweepSetting, found: Float[Tensor, "attributed integrated train"]
) -> Float[Tensor, "point out train"]:
    """Put what was found at some outputs of some points among all."""
    shape = (*setting.start.outputs.shape, setting.points.train)
    values = setting.start.outputs.new_full(shape, torch.nan, dtype=torch.float64)
    for place, output in enumerate(setting.domain.integrated):
        values[asked.points, output] = found[:, place].double()
    return values


def rerun_of(state: RunState) -> Rerun:
    """The training, to be carried out again."""
    setting = state.setting
    return again(setting.experiment, setting.problem, setting.descent.step_size, state.step)
