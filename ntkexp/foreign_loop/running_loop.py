"""The tensors of a running loop. Checks ensure that only the followed optimizers and
calls change them.

SAM is an exception: it moves weights before a call, and back before the step. The call
then records the moved weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.arguments import ParameterGroups
from ntkexp.foreign_loop.batch_norm import RunningStatistics, refuse_instance_statistics
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import (
    FrozenTensors,
    LatestWeights,
    Outside,
    named_tensors,
    same_bits,
)
from ntkexp.foreign_loop.step import AbstractStore
from ntkexp.foreign_loop.store.shards import current_processes
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

LOG = logging.getLogger("ntkexp.follow")

# rounding error of weights that the loop moved away and back, in units of eps
SWAP_EPS = 32


@dataclass(frozen=True)
class FollowedLoop:
    """The model and the optimizers of a loop."""

    model: nn.Module  # model that the loop calls
    inner: nn.Module  # `model` without wrappers
    module: nn.Module  # a copy of `inner` in evaluation mode
    optimizers: Sequence[torch.optim.Optimizer]
    known: Sequence[KnownOptimizer]  # the rules of the optimizers, in their order
    updated: set[str]  # names of the parameters that the optimizers update

    @property
    def still(self) -> dict[str, Tensor]:
        """The parameters and buffers that no optimizer updates."""
        state = self.inner.state_dict()
        return {name: part for name, part in state.items() if name not in self.updated}


@dataclass
class RunningLoop:
    """A loop while it runs: the store of its steps, and
    its tensors after the latest step."""

    followed: FollowedLoop
    store: AbstractStore
    latest: LatestWeights = field(default_factory=LatestWeights)
    # weights that the loop moved before a call, to move them back after it, as SAM does
    swapped: Weights = field(default_factory=dict)
    swapped_at: int = -1  # index of the first step after that call

    def __post_init__(self) -> None:
        self.model = self.followed.model
        self.inner = self.followed.inner
        self.optimizers = self.followed.optimizers
        self.rules = {
            id(optimizer): known.rule
            for optimizer, known in zip(
                self.optimizers, self.followed.known, strict=True
            )
        }
        self.parameters = ParameterGroups(self.inner, self.optimizers)
        self.frozen = FrozenTensors(self.inner, self.followed.module)
        self.statistics = RunningStatistics(self.inner, current_processes().world)
        self.latest.rounding_of_swaps = self.rounding_of_swaps

    @property
    def moving(self) -> Weights:
        """The weights that optimizers update,
        and the running statistics that calls update."""
        if not self.statistics.moves:
            return self.latest.weights
        return self.latest.weights | self.statistics.latest

    def moved_weights(self, *, closely: bool) -> Weights | None:
        """Return the weights that the loop has moved since the latest step, or None.

        SAM moves weights after its first gradient, computes a second gradient, and
        moves them back. `StepRecorder` raises if they are not moved back. Calls at the
        same weights share one copy. If `closely`, compare all weights. Else compare
        only weights whose number of writes has changed."""
        step = self.store.count
        changed = self.latest.changed(self.parameters, closely=closely)
        if not changed:
            return None
        for name in changed:
            if name in self.latest.unfollowed:
                self.latest.refuse_change(step, name)
        if self.swapped_at == step and changed.keys() == self.swapped.keys():
            pairs = [
                (weight.detach(), self.swapped[name])
                for name, weight in changed.items()
            ]
            if all(same_bits(pairs)):
                return self.swapped
        self.swapped = {
            name: weight.detach().clone() for name, weight in changed.items()
        }
        self.swapped_at = step
        return self.swapped

    def rounding_of_swaps(self, name: str) -> Tensor | None:
        """Return the largest rounding error, for each element, of a weight that the
        loop has moved away and back. Return None if the weight must have the same bits.

        SAM moves weights before its second gradient.
        Schedule-free optimizers move them to an average."""
        weight_before = self.latest.weights[name]
        eps = torch.finfo(weight_before.dtype).eps
        if self.swapped_at == self.store.count:
            size = weight_before.abs() + self.swapped.get(name, weight_before).abs()
            return size * (SWAP_EPS * eps)
        for optimizer in self.optimizers:
            weight = self.parameters.of(optimizer).get(name)
            if weight is None or not self.rules[id(optimizer)].swaps_weights:
                continue
            average = optimizer.state.get(weight, {}).get("z")
            if isinstance(average, Tensor):
                return (weight_before.abs() + average.abs()) * (SWAP_EPS * eps)
        return None

    def refuse_changes(
        self, layers: Mapping[str, nn.Module], *, moves_statistics: bool
    ) -> None:
        """Raise if a frozen tensor has changed, or if running statistics are updated in
        a way that cannot be followed. `layers` are the model's layers by name.
        `moves_statistics` is True if the call updates running statistics."""
        step = self.store.count
        if moves_statistics and self.store.chooses:
            raise Mistake(
                f"step {step}: BatchNorm in training mode updates statistics at every "
                "step, but steps= omits some steps; put it in eval(), or follow all "
                "steps"
            )
        refuse_instance_statistics(step, layers)
        self.frozen.refuse_writes(step, self.moving, layers)

    def changed_outside(self) -> Outside:
        """Return the changes after the last step,
        such as a clamp or a loaded average of weights.

        Log a warning if there are any.
        """
        after_last_step = self.latest.weights | self.statistics.at_step
        names = list(self.frozen.differences(after_last_step))
        if not names:
            return Outside()
        now = named_tensors(self.frozen.model)
        before = named_tensors(self.frozen.copy)
        tensors: Weights = {}
        for name in names:
            if name in now and now[name].shape == before[name].shape:
                tensors[name] = now[name].detach().clone()
        outside = Outside(tuple(names), tensors)
        consequence = "the model is attributed without that change"
        if len(tensors) == len(names):
            consequence = "attribute() reports the effect of this change as `outside`"
        LOG.warning(
            "ntkexp: %s changed outside the steps; %s", outside.named, consequence
        )
        return outside
