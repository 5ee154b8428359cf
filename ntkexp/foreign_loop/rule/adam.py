"""Adam, AdamW and their AMSGrad variants of PyTorch: see `rule.base`. With v as the state has it after the step,

    S = η/(1 − β₁ᵗ) · r / (√v + εr),   r = √(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁

and decay λ in the gradient of Adam, d = ηλ past the memory of AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule.base import AbstractRule, LinearStep


class AdamRule(AbstractRule):
    """The state of Adam holds `exp_avg`, `exp_avg_sq`, `step`, and with AMSGrad `max_exp_avg_sq`."""

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (torch.optim.Adam, torch.optim.AdamW)

    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        rate, decay, (first, second) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        count = float(state["step"])
        decouples, lost = bool(group["decoupled_weight_decay"]), rate * decay
        if isinstance(group["lr"], Tensor) and not group["fused"]:  # which is divided in its own precision
            lost = 1 - float(1 - group["lr"] * decay)
            rate = float(group["lr"] / (1 - first**count)) * (1 - first**count)
        return LinearStep(
            scale=rate * sqrt(1 - second**count) / (1 - first**count),
            carry=float(first),
            intake=1 - float(first),
            coupled=0.0 if decouples else decay,
            lost=lost if decouples else 0.0,
        )

    def below(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None = None) -> Tensor | None:
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        root = sqrt(1 - group["betas"][1] ** float(state["step"]))
        return torch.sqrt(square, out=out).add_(group["eps"] * root)

    def remembered(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        return state.get("exp_avg")  # none of a parameter that never got a gradient
