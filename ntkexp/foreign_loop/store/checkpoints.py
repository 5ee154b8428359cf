"""The interval between checkpoints, and the states of optimizers by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.shapes import Weights

# largest share of the free disk that the checkpoints of a trace may use
FREE_DISK_SHARE = 0.25
MAX_TRACE_BYTES = 50e9  # largest size of all checkpoints of a trace together
# Initial interval in steps. Writing a checkpoint takes longer than a small step, so not
# every step gets one.
STEPS_PER_CHECKPOINT = 8
# number of tensors per weight in each replayed step: weight, gradient, denominator
COPIES_PER_STEP = 3


@dataclass
class CheckpointPlan:
    """The interval between checkpoints.

    If the checkpoints take more than their share of the disk, every second checkpoint
    is deleted, and the interval is doubled. So the checkpoints of a loop of any length
    fit."""

    every: int  # interval in steps
    fixed: bool  # True if the user gave the interval
    max_interval: int  # longest interval whose replayed steps fit into memory
    checkpoint_bytes: float
    max_bytes: float  # upper limit for all checkpoints together

    @classmethod
    def of(
        cls,
        every: int | None,
        weights: float,
        size: float,
        free: float,
        budget: MemoryBudget,
    ) -> CheckpointPlan:
        """Choose the interval.

        Args:
            every: the user's interval, or None.
            weights: bytes of the weights.
            size: bytes of a checkpoint, which has weights and optimizer states.
            free: free bytes on the disk.
            budget: memory for a replay.

        >>> CheckpointPlan.of(None, 1e6, 3e6, free=1e9, budget=MemoryBudget(3e7)).max_interval
        10
        """
        max_interval = budget.largest_batch(COPIES_PER_STEP * weights) if weights else 1
        return cls(
            every=every or max(1, min(STEPS_PER_CHECKPOINT, max_interval)),
            fixed=every is not None,
            max_interval=max_interval,
            checkpoint_bytes=size,
            max_bytes=min(FREE_DISK_SHARE * free, MAX_TRACE_BYTES),
        )

    def too_many(self, count: int) -> bool:
        """Return True if every second of `count` checkpoints must be deleted."""
        can_double = not self.fixed and 2 * self.every <= self.max_interval
        return (
            can_double and count > 2 and count * self.checkpoint_bytes > self.max_bytes
        )


# --- States of optimizers, by the names of parameters.


OptimizerState: TypeAlias = dict[str, dict[str, Any]]
STEP_COUNT = "step"  # key of the number of steps of a parameter, in torch's optimizers


def optimizer_states(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> list[OptimizerState]:
    """Copy the states of some optimizers, by parameter name.
    Omit tensors that are no parameters of the model."""
    return [
        {
            names[id(weight)]: copied_state(state)
            for weight, state in optimizer.state.items()
            if id(weight) in names
        }
        for optimizer in optimizers
    ]


def copied_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the state of one parameter."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def states_on(
    states: Sequence[OptimizerState] | None, device: torch.device
) -> list[OptimizerState] | None:
    """Move optimizer states to a device. Step counts stay on the CPU, where most
    optimizers hold them."""
    if states is None:
        return None

    def moved(key: str, value: Any) -> Any:
        return (
            value.to(device)
            if isinstance(value, Tensor) and key != STEP_COUNT
            else value
        )

    return [
        {
            name: {key: moved(key, value) for key, value in state.items()}
            for name, state in optimizer_state.items()
        }
        for optimizer_state in states
    ]


def placed_state(
    state: dict[str, Any], settings: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Move the step count to the device if the optimizer's kernels expect it there."""
    count = state.get(STEP_COUNT)
    is_on_device = settings.get("capturable") or settings.get("fused")
    if is_on_device and isinstance(count, Tensor):
        return {**state, STEP_COUNT: count.to(device)}
    return state


def states_at_end(checkpoint: Mapping[str, Any]) -> Any:
    """Return the states of the optimizers after the last event before a checkpoint.

    These are `memories`, the states before the next event, unless a loop that resumed
    at this checkpoint began with other states. Then they are `ended`.
    """
    return checkpoint.get("ended", checkpoint["memories"])


def cloned(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}
