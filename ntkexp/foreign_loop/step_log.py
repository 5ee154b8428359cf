"""The numbers of each followed step, given to a function of the user's as the step happens.

    loss             Σℓᵢ / Σmᵢ by `loss=`, where it is given, over the calls whose gradients the step consumed; mᵢ is
                     what example i counts in the mean, else 1
    examples         the rows of those calls
    gradient_norm    ‖g‖ of the gradient that was consumed, so after clipping and scaling
    weight_norm      ‖θ‖ after the step
    learning_rate    of the group of parameters; learning_rate.0, learning_rate.1, … where there are several
    rule_error       proof (b): how far the weights are from where the optimizer's rule leads, relative to them

Norms are over the parameters of the optimizers that took the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.user_loss import ExampleLoss, losses_of
from ntkexp.kernel.record.tape import examples

LogStep: TypeAlias = Callable[[dict[str, float], int], object]
"""Takes the numbers of a step, and its index; `run.log` of wandb and `mlflow.log_metrics` are such functions."""


@dataclass
class StepLog:
    """Collects the numbers of a step, which several optimizers may take, and hands them on when it is complete."""

    log: LogStep
    optimizers: Sequence[torch.optim.Optimizer]
    loss: ExampleLoss | None = None
    index: int = -1  # of the step whose numbers are held
    numbers: dict[str, float] = field(default_factory=dict)

    def sums_of_loss(self, outputs: Tensor, call: ModelCall) -> tuple[Tensor, Tensor] | None:
        """Σℓᵢ and Σmᵢ of a call, if the loss is known."""
        if self.loss is None:
            return None
        with torch.no_grad():
            losses, counts = losses_of(
                self.loss, outputs.detach(), SeenCall.of(call.inputs, call.names)
            )
            counts = torch.ones_like(losses) if counts is None else counts
            return losses.double().sum(), counts.double().sum()

    def add(self, index: int, step: FollowedStep, after: Mapping[str, Tensor]) -> None:
        """What one optimizer did at a step, after which its parameters are these."""
        if index != self.index:
            self.flush()
            self.index = index
        # ‖·‖² adds up over the optimizers of a step
        squares = {
            "gradient_norm": squared_norm(step.gradient.values()),
            "weight_norm": squared_norm(after.values()),
        }
        for name, square in squares.items():
            self.numbers[name] = (self.numbers.get(name, 0.0) ** 2 + square) ** 0.5
        self.numbers["rule_error"] = max(self.numbers.get("rule_error", 0.0), step.rule_error)

        # the calls, which all of them have in common, and what schedules gave
        self.numbers["examples"] = float(sum(examples(call.inputs) for call in step.calls))
        sums = [call.sums_of_loss for call in step.calls if call.sums_of_loss is not None]
        if sums and (counted := float(sum(counts for _, counts in sums))):
            self.numbers["loss"] = float(sum(losses for losses, _ in sums)) / counted
        rates = [
            float(group["lr"])
            for each in self.optimizers
            for group in each.param_groups
            if "lr" in group
        ]
        names = (
            ["learning_rate"]
            if len(rates) == 1
            else [f"learning_rate.{k}" for k in range(len(rates))]
        )
        self.numbers |= dict(zip(names, rates, strict=True))
        if len(self.optimizers) == 1:
            self.flush()

    def flush(self) -> None:
        """Hand on the numbers that are held."""
        numbers, self.numbers = self.numbers, {}
        if numbers:
            self.log(numbers, self.index)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """‖·‖² of all tensors together, without copies of them.

    >>> squared_norm([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])])
    169.0
    """
    norms = [torch.linalg.vector_norm(tensor.detach()) for tensor in tensors]
    return (
        float(torch.stack([norm.to(norms[0].device).double() for norm in norms]).square().sum())
        if norms
        else 0.0
    )
