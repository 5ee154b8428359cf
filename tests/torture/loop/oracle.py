"""What each example did to the weights and so to the outputs, by plain autograd and the optimizers' formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.read.reader import Reader
from tests.torture.loop.made import Loop


@dataclass
class Oracle:
    """What each example did to the weights, by plain autograd: Δθᵢ at every step, by the optimizers' formulas."""

    loop: Loop
    reader: Reader
    queries: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # Jᵀℓ′ of examples, in this step, by parameter
    memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)

    def back(self, outputs: Tensor, loss: Tensor, names: tuple[str, ...]) -> None:
        """Take in what comes back to each example of a call."""
        (came,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        named = [(name, weight) for name, weight in self.loop.net.named_parameters() if weight.requires_grad]
        for row, name in enumerate(names):
            one = torch.zeros_like(came)
            one[row] = came[row]
            found = torch.autograd.grad(
                outputs, [weight for _, weight in named], one, retain_graph=True, allow_unused=True
            )
            for (key, _), gradient in zip(named, found, strict=True):
                if gradient is not None:
                    held = self.rows.setdefault(name, {})
                    held[key] = held[key] + gradient if key in held else gradient

    def step(self, start: dict[str, Tensor], factors: dict[str, float], settings: list[dict[str, Any]]) -> None:
        """Take in a step that was taken, in which gradients were multiplied with factors."""
        end = {name: weight.detach().clone() for name, weight in self.loop.net.named_parameters()}
        tapes = [self.reader.record(weights, self.queries) for weights in (start, end)]
        features = self.reader.along(tapes[0], tapes[1])
        by_name = dict(self.loop.net.named_parameters())
        for example in sorted({*self.rows, *(name for name, _ in self.memory)}):
            moved = {name: torch.zeros_like(weight) for name, weight in start.items()}
            for optimizer, group in zip(self.loop.optimizers, settings, strict=True):
                own = {id(weight) for weight in optimizer.param_groups[0]["params"]}
                for name, weight in by_name.items():
                    if id(weight) in own and weight.grad is not None:
                        mine = self.rows.get(example, {}).get(name, torch.zeros_like(weight))
                        moved[name] = self.moved(example, name, factors[name] * mine, group, optimizer.state[weight])
            part = features.applied(moved)
            self.parts[example] = self.parts[example] + part if example in self.parts else part
        for name in by_name:
            self.moves[name] = self.moves.get(name, 0) + 1
        self.rows.clear()

    def moved(self, example: str, name: str, mine: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """How a gradient moves its weight."""
        key = (example, name)
        if "betas" in group:
            (first_, second), count = group["betas"], float(state["step"])
            held = self.memory[key] = first_ * self.memory.get(key, torch.zeros_like(mine)) + (1 - first_) * mine
            below = state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**count) + group["eps"]
            return torch.as_tensor(-group["lr"] / (1 - first_**count) * held / below)
        if not group["momentum"]:
            return torch.as_tensor(-group["lr"] * mine)
        steps = self.moves.get(name, 0)
        taken = mine if steps == 0 else (1 - group["dampening"]) * mine
        held = self.memory[key] = group["momentum"] * self.memory.get(key, torch.zeros_like(mine)) + taken
        return torch.as_tensor(-group["lr"] * (mine + group["momentum"] * held if group["nesterov"] else held))
