"""Optimizers that people copy into their programs. They are known by the names of their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim


class SignSGD(optim.Optimizer):
    """Signs of the gradient, or of its running mean."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                direction = weight.grad
                if group["momentum"]:
                    direction = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                    direction.mul_(group["momentum"]).add_(weight.grad, alpha=1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction.sign(), alpha=-group["lr"])


class Lion(optim.Optimizer):
    """Lion as in google/automl."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                mean = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                update = mean * first + weight.grad * (1 - first)
                weight.add_(update.sign_(), alpha=-group["lr"])
                mean.mul_(second).add_(weight.grad, alpha=1 - second)


class LARS(optim.Optimizer):
    """LARS as in MoCo v3 and MAE: no ratio and no decay for vectors."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                update: Tensor | None = weight.grad
                if update is None:
                    continue
                if weight.dim() > 1:
                    update = update.add(weight, alpha=group["weight_decay"])
                    sizes = torch.norm(weight), torch.norm(update)
                    ratio = group["trust_coefficient"] * sizes[0] / sizes[1]
                    update = update.mul(ratio if sizes[0] > 0 and sizes[1] > 0 else 1.0)
                mean = self.state[weight].setdefault("mu", torch.zeros_like(weight))
                mean.mul_(group["momentum"]).add_(update)
                weight.add_(mean, alpha=-group["lr"])
