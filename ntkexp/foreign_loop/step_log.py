"""Metrics of each followed step, passed to the user's `log=` function during training.

    loss             Σℓᵢ / Σmᵢ of `loss=`, over the recorded model calls whose gradients the step
                     used; mᵢ is the weight of example i in the mean, 1 by default
    examples         number of examples (rows) in these calls
    gradient_norm    ‖g‖ of the gradient that the optimizer used, after clipping and scaling
    weight_norm      ‖θ‖ after the step
    learning_rate    learning rate; learning_rate.0, learning_rate.1, … for several groups
    rule_error       proof (b): relative distance of the weights from the optimizer's update rule

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
"""A function of a step's metrics and index, such as `run.log` of wandb or
`mlflow.log_metrics`."""


@dataclass
class StepLog:
    """The metrics of the latest step. `log` is called once all optimizers have taken
    the step."""

    log: LogStep
    optimizers: Sequence[torch.optim.Optimizer]
    loss: ExampleLoss | None
    index: int = -1  # index of the step in `numbers`
    numbers: dict[str, float] = field(default_factory=dict)

    def sums_of_loss(
        self, outputs: Tensor, call: ModelCall
    ) -> tuple[Tensor, Tensor] | None:
        """Return two sums over the examples of a call: of the losses ℓᵢ, and of the
        weights mᵢ in the mean. Return None if the user gave no `loss=`."""
        if self.loss is None:
            return None
        with torch.no_grad():
            seen = SeenCall.of(call.inputs, call.names)
            losses, counts = losses_of(self.loss, outputs.detach(), seen)
            if counts is None:
                counts = torch.ones_like(losses)
            return losses.double().sum(), counts.double().sum()

    def add(self, index: int, step: FollowedStep, after: Mapping[str, Tensor]) -> None:
        """Add the step of one optimizer. `after`
        are the optimizer's parameters after the step."""
        if index != self.index:
            self.flush()
            self.index = index
        # ‖·‖² of the step is the sum over the optimizers that took it
        squares = {
            "gradient_norm": squared_norm(step.gradient.values()),
            "weight_norm": squared_norm(after.values()),
        }
        for name, square in squares.items():
            self.numbers[name] = (self.numbers.get(name, 0.0) ** 2 + square) ** 0.5
        self.numbers["rule_error"] = max(
            self.numbers.get("rule_error", 0.0), step.rule_error
        )

        # all optimizers of a step used the same calls
        self.numbers["examples"] = float(
            sum(examples(call.rows) for call in step.calls)
        )
        sums = [
            call.sums_of_loss for call in step.calls if call.sums_of_loss is not None
        ]
        losses = float(sum(loss for loss, _ in sums))
        counts = float(sum(count for _, count in sums))
        if counts:
            self.numbers["loss"] = losses / counts
        self.numbers |= learning_rates(self.optimizers)
        if len(self.optimizers) == 1:
            self.flush()

    def flush(self) -> None:
        """Call `log` with the collected metrics, if there are any."""
        numbers = self.numbers
        self.numbers = {}
        if numbers:
            self.log(numbers, self.index)


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of each parameter group, as metrics by name."""
    rates = [
        float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        if "lr" in group
    ]
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate.{index}": rate for index, rate in enumerate(rates)}


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Return the squared norm of the concatenated tensors, without concatenating them.

    >>> squared_norm([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])])
    169.0
    """
    norms = [torch.linalg.vector_norm(tensor.detach()) for tensor in tensors]
    if not norms:
        return 0.0
    together = torch.stack([norm.to(norms[0].device).double() for norm in norms])
    return float(together.square().sum())
