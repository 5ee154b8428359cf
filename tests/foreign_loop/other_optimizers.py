"""Optimizers that users copy into their programs. Rules recognise them by the names of their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim


class SignSGD(optim.Optimizer):
    """Signs of the gradient, or of its running mean: w ← (1 − ηλ) w − η sign(m), m ← μ m + (1 − μ) g."""

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
    """Lion as in google/automl: w ← (1 − ηλ) w − η sign(β₁ m + (1 − β₁) g), m ← β₂ m + (1 − β₂) g."""

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
    """LARS as in MoCo v3 and MAE: m ← μ m + r u, w ← w − η m, for matrices u = g + λ w and r = c ‖w‖ / ‖u‖.

    For vectors u = g and r = 1.
    """

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
                    weight_norm, update_norm = torch.norm(weight), torch.norm(update)
                    ratio = group["trust_coefficient"] * weight_norm / update_norm
                    update = update.mul(ratio if weight_norm > 0 and update_norm > 0 else 1.0)
                mean = self.state[weight].setdefault("mu", torch.zeros_like(weight))
                mean.mul_(group["momentum"]).add_(update)
                weight.add_(mean, alpha=-group["lr"])


class SGDScheduleFree(optim.Optimizer):
    """Schedule-free SGD as in facebookresearch/schedule_free.

    The weights are y = (1 − β) z + β x: z ← z − η g(y), and x ← (1 − c) x + c z averages z. Each step has its share c.
    """

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9, **settings: float) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0}
        counts = {"weight_lr_power": 2.0, "k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0}
        super().__init__(params, defaults | counts | {"scheduled_lr": 0.0} | settings)

    def beta(self, group: dict[str, Any]) -> float:
        return float(group["momentum"])

    @torch.no_grad()
    def swap(self, *, train: bool) -> None:
        """Move the weights to x for an evaluation, or back to y."""
        for group in self.param_groups:
            beta = self.beta(group)
            for weight in group["params"]:
                if group["train_mode"] != train and "z" in self.state[weight]:
                    weight.lerp_(end=self.state[weight]["z"], weight=1 - beta if train else 1 - 1 / beta)
            group["train_mode"] = train

    def train(self) -> None:
        self.swap(train=True)

    def eval(self) -> None:
        self.swap(train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta, k = self.beta(group), group["k"]
            rate = group["lr"] * (min(1.0, (k + 1) / group["warmup_steps"]) if group["warmup_steps"] else 1.0)
            group["scheduled_lr"] = rate
            group["lr_max"] = max(rate, group["lr_max"])
            weight_of_step = (k + 1) ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
            group["weight_sum"] += weight_of_step
            share = weight_of_step / group["weight_sum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "z" not in state:
                    state["z"] = weight.clone()
                gradient = self.normalized(weight.grad, state, group)
                gradient.add_(weight, alpha=group["weight_decay"])
                weight.lerp_(end=state["z"], weight=share)
                weight.add_(gradient, alpha=rate * (beta * (1 - share) - 1))
                state["z"].sub_(gradient, alpha=rate)
            group["k"] = k + 1

    def normalized(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient


class AdamWScheduleFree(SGDScheduleFree):
    """Schedule-free AdamW as in facebookresearch/schedule_free."""

    def __init__(
        self, params: Any, lr: float = 0.0025, betas: tuple[float, float] = (0.9, 0.999), **settings: float
    ) -> None:
        super().__init__(params, lr, **{"eps": 1e-8, **settings})
        self.defaults["betas"] = betas
        for group in self.param_groups:
            group.pop("momentum")
            group.setdefault("betas", betas)

    def beta(self, group: dict[str, Any]) -> float:
        return float(group["betas"][0])

    def normalized(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Divide the gradient in place by √v + ε, for v ← β₂ v + (1 − β₂) g², without its bias 1 − β₂ᵏ⁺¹."""
        second = group["betas"][1]
        square = state.setdefault("exp_avg_sq", torch.zeros_like(gradient))
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return gradient.div_(square.div(1 - second ** (group["k"] + 1)).sqrt_().add_(group["eps"]))


class SAM(optim.Optimizer):
    """Sharpness-aware minimisation as in davda54/sam: the gradient at w + ρ g/‖g‖, for the step of an optimizer."""

    def __init__(
        self, params: Any, base_optimizer: Any, rho: float = 0.05, *, adaptive: bool = False, **kw: Any
    ) -> None:
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **kw})
        self.base_optimizer = base_optimizer(self.param_groups, **kw)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, *, zero_grad: bool = False) -> None:
        norm = torch.stack([(scale * weight.grad).norm() for weight, scale in self.members()]).norm()
        for weight, scale in self.members():
            self.state[weight]["old_p"] = weight.data.clone()
            weight.add_(scale.square() * weight.grad * self.defaults["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, *, zero_grad: bool = False) -> None:
        for weight, _ in self.members():
            weight.data = self.state[weight]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def members(self) -> list[tuple[Any, Tensor]]:
        """Return the weights with gradients, each with its scale: |w| if adaptive, and otherwise 1."""
        return [
            (weight, weight.abs() if group["adaptive"] else torch.ones_like(weight))
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
