"""A step of two trainings as one, back through which differences go as derivatives do through a step of one training.

    p̄ = (p + p′)/2        S̄ = σ/n̄        r̄ = (m/n + m′/n′)/2        ū = (u + u′)/2

With these means in place of its letters, `effects.adjoint` takes a functional of differences back exactly, as the step
is made of products: m = r n, and u², so that ū Δu = β₂ū₋ Δu₋ + (1 − β₂)p̄ Δp. The largest u so far grows by a share of
Δu between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.clipping import Clipping
from ntkexp.effects.curvature import gradient
from ntkexp.effects.trajectory import Denominator, TrainedStep, Update
from ntkexp.mistake import Mistake
from ntkexp.removal.clipping import Clipped
from ntkexp.removal.pair import Pair, slope

SAME_SIZE = 1e-5  # of the step sizes of both trainings, in float32


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """The same step of two trainings, which took the same calls and were told the same by their schedules."""

    first: TrainedStep
    second: TrainedStep

    @property
    def weights(self) -> Pair:
        """θ in both."""
        return Pair(self.first.weights, self.second.weights)

    @cached_property
    def clipped(self) -> Clipped:
        """The gradients, and what both trainings made of them before anything else."""
        ends = [Clipping(self.taken_in(step), step.clip_norm) for step in (self.first, self.second)]
        bound = self.first.clip_norm or self.second.clip_norm
        factor = Pair(*(each.gradient.new_tensor(each.factor) for each in ends))
        return Clipped(Pair(ends[0].gradient, ends[1].gradient), factor, bound)

    def taken_in(self, step: TrainedStep) -> Float[Tensor, " weight"]:
        """The gradient of one of the steps, before it is clipped; nothing where neither asks for it, as steps are then
        linear in it. One may be clipped alone.
        """
        clips = self.first.clip_norm is not None or self.second.clip_norm is not None
        divides = any(update.denominator is not None for update in self.first.updates)
        if not step.batches or not (clips or divides):
            return torch.zeros_like(step.weights)
        found = gradient(step.batches, step.weights)
        return found if step.heard is None else found * step.heard

    @cached_property
    def mean(self) -> TrainedStep:
        """Both as one."""
        self.refuse_other()
        pairs = zip(self.first.updates, self.second.updates, strict=True)
        updates = tuple(mean_update(one, other, self.first.index) for one, other in pairs)
        return replace(self.first, weights=self.weights.mean, updates=updates)

    def refuse_other(self) -> None:
        """Refuse steps that moved other parameters."""
        places = [[update.place for update in step.updates] for step in (self.first, self.second)]
        if places[0] != places[1] or len(self.first.batches) != len(self.second.batches):
            raise Mistake(
                f"step {self.first.index}: without the examples it was another step, of other parameters or calls; "
                "nothing in the loop should depend on what it has learned but its weights"
            )


def mean_update(first: Update, second: Update, step: int) -> Update:
    """How a parameter took gradients in, in the mean."""
    for letter in ("carry", "intake", "ahead", "coupled", "lost"):
        refuse_other_size(getattr(first, letter), getattr(second, letter), step)
    if first.denominator is None or second.denominator is None:
        refuse_other_size(first.scale, second.scale, step)
        return first
    by = (first.denominator, second.denominator)
    n = Pair(*map(divided, by))
    size = Pair(first.scale * n.first, second.scale * n.second)
    refuse_other_size(size.first, size.second, step)
    ratio = Pair(by[0].mean / n.first, by[1].mean / n.second).mean
    return replace(first, scale=size.first / n.mean, denominator=mean_denominator(*by, ratio * n.mean))


def mean_denominator(first: Denominator, second: Denominator, mean: Tensor) -> Denominator:
    """What both steps were divided by, in the mean, with an m that has the mean ratio to it."""
    now, before = roots(first.latest, second.latest), roots(first.latest_before, second.latest_before)
    found = replace(first, mean=mean, latest=now.mean.square(), latest_before=before.mean.square())
    if first.largest is None or second.largest is None:
        return found
    assert first.largest_before is not None
    assert second.largest_before is not None
    largest, so_far = roots(first.largest, second.largest), roots(first.largest_before, second.largest_before)
    beyond = Pair(now.first - so_far.first, now.second - so_far.second)
    gained = Pair(beyond.first.relu(), beyond.second.relu())
    return replace(
        found,
        largest=largest.mean.square(),
        largest_before=so_far.mean.square(),
        passed=slope(beyond, gained, (beyond.first > 0).to(beyond.first)),
    )


def divided(by: Denominator) -> Tensor:
    """The n of a step."""
    return (by.latest if by.largest is None else by.largest).sqrt() / by.root + by.eps


def roots(first: Tensor, second: Tensor) -> Pair:
    """The square roots of both."""
    return Pair(first.sqrt(), second.sqrt())


def refuse_other_size(first: Tensor | float, second: Tensor | float, step: int) -> None:
    """Refuse steps of other sizes: no example has a share in what a schedule decides by what it sees."""
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    if one.shape != other.shape or float((one - other).abs().max()) > SAME_SIZE * float(one.abs().max()):
        raise Mistake(
            f"step {step}: without the examples it was taken with other settings of the optimizer; a schedule that "
            "looks at the loss has a share in the change that no example has: use one that does not"
        )
