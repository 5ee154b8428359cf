"""Stochastic gradient descent of PyTorch, with momentum, dampening or Nesterov's look ahead: see `rule.base`.

plain       S = η
momentum    S = η,   β = μ,   α = 1 − τ     (at a parameter's first step β = 0, α = 1)
Nesterov    S = ημ,  N = η,   β = μ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule.base import AbstractRule, LinearStep


class SGDRule(AbstractRule):
    """The state of SGD holds `momentum_buffer`, where there is momentum."""

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (torch.optim.SGD,)

    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        size, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        if not momentum:
            return LinearStep(size, coupled=decay)
        carry, intake = (momentum, 1 - float(group["dampening"])) if times else (0.0, 1.0)
        if group["nesterov"]:
            return LinearStep(size * momentum, size, carry, intake, decay)
        return LinearStep(size, 0.0, carry, intake, decay)

    def below(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None = None) -> Tensor | None:
        return None

    def remembered(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        found: Tensor | None = state.get("momentum_buffer")
        return found
