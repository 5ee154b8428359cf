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
    """NaN stands at points where no effect was asked for."""

    values: Float[Tensor, "point integrated train"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # of trainings without examples; None: there was no step, or nobody to leave out


def spread(
    setting: Setting, asked: SweepSetting, found: Float[Tensor, "attributed integrated train"]
) -> Float[Tensor, "point integrated train"]:
    """Put what was found at some points among all."""
    values = found.new_full((len(setting.start.outputs), *found.shape[1:]), torch.nan, dtype=torch.float64)
    values[asked.points] = found.double()
    return values


def rerun_of(state: RunState) -> Rerun:
    """The training, to be carried out again."""
    setting = state.setting
    return again(setting.experiment, setting.problem, setting.descent.step_size, state.step)
