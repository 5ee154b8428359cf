"""A followed loop as a differentiable training, for leave-out effects.

A leave-out effect is a derivative through all later steps. `FollowedTraining` holds the
data of each step for this derivative: the batches with their losses, the linear step of
each parameter, Adam's moments, and the norm to which gradients were clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose, isnan, log2, sqrt
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.capacity import require_disk
from ntkexp.effects.curvature import gradient
from ntkexp.effects.trajectory import (
    AbstractTrajectory,
    Denominator,
    FlatWeights,
    TakenBatch,
    TrainedStep,
    Update,
    flat_like,
)
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.clipping import factor_between
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.foreign_loop.user_loss import (
    ROUNDING_FACTOR,
    CallLoss,
    CallShare,
    ExampleLoss,
    Weighing,
    cancelled,
)
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import GUARD
from ntkexp.shapes import Weights
from ntkexp.text import several

# --- Adam's moments after every step of a loop, computed from the first step to the
# last: m, v, and the largest v so far for AMSGrad.
#
# They are stored in an unnamed temporary file,
# which the system deletes when it is closed.


ADAM_PARTS = ("mean", "latest", "largest")


@dataclass(frozen=True)
class AdamStates:
    """Adam's moments after every step."""

    rows: NDArray[Any]  # [step, part, weight], the parts as listed in ADAM_PARTS
    # after each step: the number of steps that each parameter has taken
    step_counts: list[dict[str, int]]
    flat: FlatWeights
    device: torch.device

    def denominator(self, step: FollowedStep, name: str) -> Denominator | None:
        """Return the denominator of Adam's step of a parameter, or None if Adam does
        not update the parameter."""
        settings = step.settings[name]
        weight_slice = self.flat.slices[name]
        if "betas" not in settings:
            return None
        beta2 = float(settings["betas"][1])
        amsgrad = bool(settings["amsgrad"])
        times = self.step_counts[step.index][name]
        now = self.row(step.index, weight_slice)
        before = self.row(step.index - 1 if times > 1 else -1, weight_slice)
        return Denominator(
            beta2=beta2,
            bias_correction=sqrt(1 - beta2**times),
            eps=float(settings["eps"]),
            mean=now[0],
            second_moment=now[1],
            second_moment_before=before[1],
            max_second_moment=now[2] if amsgrad else None,
            max_second_moment_before=before[2] if amsgrad else None,
        )

    def row(self, index: int, weight_slice: slice) -> Tensor:
        """Return the moments after a step, or zeros before the first step."""
        if index < 0:
            return torch.zeros_like(self.row(0, weight_slice))
        return torch.from_numpy(np.array(self.rows[index, :, weight_slice])).to(
            self.device
        )


def adam_states(steps: AbstractSteps, flat: FlatWeights) -> AdamStates | None:
    """Compute Adam's moments after every step.
    Return None if no optimizer is an Adam."""
    moments: dict[str, Tensor] = {}
    times: dict[str, int] = dict.fromkeys(flat.shapes, 0)
    rows: NDArray[Any] | None = None
    step_counts = []
    for step, _ in steps.forwards():
        for name in step.with_grad:
            times[name] += 1
            betas = step.settings[name].get("betas")
            if betas is None:
                continue
            # If this step carries no momentum over from the previous step although
            # β₁ > 0, the loop has created a new optimizer here. Drop the moments of the
            # earlier optimizer.
            if betas[0] and not step.linear[name].momentum_decay:
                times[name] = 1
                moments.pop(name, None)
            moments[name] = moments_after(step, name, moments.get(name))
        step_counts.append(dict(times))
        if moments and rows is None:
            rows = empty_rows(len(steps), flat, next(iter(moments.values())))
        if rows is not None:
            for name, part in moments.items():
                rows[step.index, :, flat.slices[name]] = part.cpu().numpy()
    if rows is None:
        return None
    return AdamStates(rows, step_counts, flat, next(iter(steps.end.values())).device)


def moments_after(step: FollowedStep, name: str, before: Tensor | None) -> Tensor:
    """Return Adam's moments of a parameter after a step, [part, weight]."""
    # p = g + λθ, the gradient with weight decay λ
    p = step.gradient[name]
    l2 = step.linear[name].l2
    if isinstance(l2, Tensor) or l2:
        p = p + l2 * step.start[name]
    p = p.reshape(-1)

    # m ← β₁m + (1 − β₁)p,  v ← β₂v + (1 − β₂)p²
    mean, latest, largest = p.new_zeros(3, len(p)) if before is None else before
    beta1, beta2 = step.settings[name]["betas"]
    mean = beta1 * mean + (1 - beta1) * p
    latest = beta2 * latest + (1 - beta2) * p * p
    return torch.stack([mean, latest, torch.maximum(largest, latest)])


def empty_rows(steps: int, flat: FlatWeights, like: Tensor) -> NDArray[Any]:
    """Create an empty temporary file, memory-mapped as an array.
    Raise if the disk is too small."""
    folder = Path(gettempdir())
    dtype = like.cpu().numpy().dtype
    needed = steps * len(ADAM_PARTS) * flat.size * dtype.itemsize
    require_disk(folder, needed, "Adam's moments of every step", "set TMPDIR")
    with TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=(steps, len(ADAM_PARTS), flat.size))


# --- Is the loss of a call a mean over its examples?
#
# Let mᵢ be the count of example i in the mean: 1, its class weight, or its number of
# tokens. Without example i, a mean divides by Σm − mᵢ instead of Σm, so leave-out
# effects need the counts. The trace does not contain the counts. It shows only the loss
# factor κ of each call, with ∂L/∂fᵢ = κ ∂ℓᵢ/∂fᵢ. In a mean, κ = 1/Σm.
#
# The loss is accepted as a mean if κ Σm is the same at every call, up to the scale of a
# GradScaler. If `loss=` does not return m, three kinds of count are tried: each example
# counts 1 ("examples"), its number of outputs ("numbers"), or its number of targets
# ("targets").


# `is_plain` accepts κ Σm if it is an integer up to this number, or the inverse of one
MAX_WHOLE_NUMBER = 1000
# An integer n is distinguished from its neighbours only if n is at most this number,
# divided by the relative tolerance.
RESOLVED_SHARE = 0.01
COUNTS = (
    "let loss= also return the weight of each example in the loop's mean: 'return "
    "losses, weight[labels]' for cross_entropy(weight=weight), the number of targets "
    "of each example for a mean over targets, torch.ones(len(losses)) if each counts "
    "once; or keep the shares of the other examples, with mean='fixed'"
)


def consumed_share(
    share: CallShare, after: TakenBatch, before: TakenBatch
) -> CallShare:
    """Multiply κ by the factor between the gradient that the optimizer used and the
    recorded gradient, for example because a GradScaler divides by its scale before the
    step.

    `after` and `before` are the batch with and without this factor. If all examples of
    the call have weight 0, κ is 0."""
    scale = 0.0
    if before.unweighted_shares[0]:
        scale = float(after.unweighted_shares[0] / before.unweighted_shares[0])
    return replace(share, factor=share.factor * scale)


@dataclass
class MeanCheck:
    """A check that the loss of every call is a mean over its examples. See the comment
    above."""

    first: tuple[int, CallShare] | None = None  # step and share of the first call
    # κ Σm by kind of count m, for the kinds with the same κ Σm at all calls so far
    means: dict[str, float] = field(default_factory=dict)

    def check(self, step: int, shares: Sequence[CallShare]) -> None:
        """Raise unless the loss of each call is a mean over its examples.

        Calls with a single example are not checked,
        because no other example shares their mean."""
        for share in shares:
            if share.factor and share.examples > 1:
                self.first = self.first or (step, share)
                agreed = self.agreed(step, share)
                for other in (self.first[1], *shares):
                    refuse_sum(step, share, other)
                self.compare(step, share, agreed)

    def agreed(self, step: int, share: CallShare) -> dict[str, float]:
        """Compute κ Σm of a call for each kind of count m. Return the values that are
        equal to κ Σm of earlier calls, up to a power of two.

        Raise if m = 1 explains the loss, and the counts that the user gave do not."""
        assert self.first is not None
        means = means_of(share)
        tolerance = share.tolerance + self.first[1].tolerance
        agreed = {
            name: mean
            for name, mean in means.items()
            if same_scale(mean, self.means.get(name, mean), tolerance)
        }
        if share.counts is not None and "examples" in agreed and "counts" not in agreed:
            raise Mistake(
                f"step {step}: the loss is a mean in which each example counts once, as "
                f"at step {self.first[0]}, but loss= returns other weights; let it "
                "return torch.ones(len(losses)), or, for a sum, keep the shares of the "
                "other examples, with mean='fixed'"
            )
        return agreed

    def compare(self, step: int, share: CallShare, agreed: dict[str, float]) -> None:
        """Raise if no kind of count explains the loss of a call, and the user gave no
        counts. Otherwise store the kinds that explain all calls so far."""
        assert self.first is not None
        if share.counts is None and share.targets is not None and isnan(share.targets):
            raise Mistake(
                f"step {step}: loss= has class weights, or targets that are "
                f"ignored; {COUNTS}"
            )
        known = {
            name: mean
            for name, mean in agreed.items()
            if not self.means or name in self.means
        }
        if share.counts is None and not known:
            raise Mistake(
                f"step {step}: the loss is another mean over the examples of a call "
                f"than at step {self.first[0]}; {COUNTS}"
            )
        if share.counts is None and not any(
            is_plain(mean, 2 * share.tolerance) for mean in known.values()
        ):
            raise Mistake(
                f"step {step}: the shares of {share.examples} examples of a call add up "
                f"to {share.factor * share.examples:.4g}, so the loss is not their "
                f"mean, or loss= omits a factor; {COUNTS}"
            )
        if share.counts is None:
            self.means = known
        elif not self.means:
            self.means = agreed


def means_of(share: CallShare) -> dict[str, float]:
    """Return κ Σm of a call for each kind of count m (see the comment above).

    If the user gave counts, the kinds are these counts ("counts") and m = 1. Otherwise
    they are m = 1, the number of outputs, and the number of targets."""
    means = {"examples": share.factor * share.examples}
    if share.counts is not None:
        return means | {"counts": share.factor * float(share.counts.sum())}
    means["numbers"] = share.factor * share.numbers
    if share.targets is not None:
        means["targets"] = share.factor * share.targets
    return means


def refuse_sum(step: int, one: CallShare, other: CallShare) -> None:
    """Raise if the loss is a sum: κ is 1, or two calls with different
    total counts have the same κ."""
    sizes = [
        float(share.examples if share.counts is None else share.counts.sum())
        for share in (one, other)
    ]
    tolerance = one.tolerance + other.tolerance
    same_share = isclose(one.factor, other.factor, rel_tol=tolerance)
    is_sum = one.counts is None and isclose(one.factor, 1.0, rel_tol=tolerance)
    if is_sum or (same_share and not isclose(*sizes, rel_tol=tolerance)):
        raise Mistake(
            f"step {step}: an example has the share {one.factor:.4g} of the loss, "
            "whatever the number of examples in its call: the loss is a sum, or a mean "
            "over all calls of a step, but effects assume a mean over each call; keep "
            "the shares of the other examples, with "
            f"mean='fixed'{'; or ' + COUNTS if is_sum else ''}"
        )


def same_scale(one: float, other: float, tolerance: float) -> bool:
    """Return True if two values of κ Σm are equal up to a power of two.

    >>> same_scale(1.0, 4.0, 1e-9), same_scale(1.0, 3.0, 1e-9)
    (True, False)
    """
    return other * one > 0 and is_power_of_two(one / other, 2 * tolerance)


def is_plain(mean: float, tolerance: float) -> bool:
    """Return True if `mean` = κ Σm is an integer or the inverse of an integer, times a
    power of two.

    In a mean over the examples of one call, κ Σm = 1. A sum or mean over several calls
    or outputs multiplies or divides κ Σm by an integer. A GradScaler multiplies κ Σm by
    a power of two.

    >>> is_plain(1 / 12, 1e-9), is_plain(-5.0, 1e-9), is_plain(24 / 37.1, 1e-9)
    (True, True, False)
    """
    largest = int(min(MAX_WHOLE_NUMBER, max(1.0, RESOLVED_SHARE / tolerance)))
    # even integers are a power of two times an odd one
    return any(
        is_power_of_two(abs(mean) * n, 2 * tolerance)
        or is_power_of_two(abs(mean) / n, 2 * tolerance)
        for n in range(1, largest + 1, 2)
    )


# --- A followed loop as a differentiable training.
#
# The optimizer used c g, where one factor c multiplies the gradient g of all
# parameters. If c is a power of two, it is the scale of a GradScaler. Any other c < 1
# comes from clipping to the norm c(‖g‖ + 1e-6), which must be the same at every clipped
# step. If several processes trained together, g is the mean of their gradients.


# relative rounding error of a gradient that is summed in another order, in units of eps
SUM_ORDER_EPS = 1e4
# If terms of g cancel, rounding may move the factor c away from a power of two. The
# rounding error of c is measured if the relative distance is at most this.
NEAR_POWER = 0.01
# relative tolerance for comparing the clipping norms of two steps, in float32
SAME_NORM = 1e-3


@dataclass(kw_only=True)
class FollowedTraining(AbstractTrajectory):
    """The steps of a followed loop as a differentiable training. Read them from the
    last to the first: any other order replays steps again."""

    steps: AbstractSteps
    called: CalledModule
    loss: ExampleLoss
    names: dict[str, int]  # index of each example
    # weights of the examples in this loop
    weighing: Weighing = field(default_factory=Weighing)
    # the replay that is under way, from the last step to the first
    back: Iterator[tuple[FollowedStep, Weights]] = field(
        default_factory=lambda: iter(())
    )
    next: int = -1  # index of the step that `back` yields next
    # clipping norm of the steps so far, None if none was clipped
    norm: float | None = None
    mean_check: MeanCheck = field(default_factory=MeanCheck)

    def __post_init__(self) -> None:
        for optimizer in self.steps.known:
            if not optimizer.rule.has_effects:
                raise Mistake(
                    f"effects of a loop with {optimizer.kind.__name__} are not known, "
                    "because they need the derivative of its denominator; train with "
                    "SGD, Adam or AdamW, or leave effects out"
                )

    @property
    def length(self) -> int:
        return len(self.steps)

    @property
    def examples(self) -> int:
        return len(self.names)

    @cached_property
    def flat(self) -> FlatWeights:
        return flat_like(self.steps.end)

    @property
    def end(self) -> Float[Tensor, " weight"]:
        return self.flat.vector(self.steps.end)

    @cached_property
    def adam(self) -> AdamStates | None:
        """Adam's moments after every step, or None if no optimizer is an Adam."""
        return adam_states(self.steps, self.flat)

    def step(self, index: int) -> TrainedStep:
        if index != self.next:
            self.back = self.steps.backwards(index + 1)
        followed, _ = next(self.back)
        self.next = index - 1
        if followed.square_outside:
            raise Mistake(
                f"step {index}: the optimizer also updated tensors outside the model, "
                "and effects do not know how these depend on the examples; follow a "
                "module that contains them, or ask only for contributions"
            )
        batches_and_shares = [self.batch(followed, call) for call in followed.calls]
        batches = tuple(batch for batch, _ in batches_and_shares)
        unclipped = TrainedStep(
            index=index,
            weights=self.flat.vector(followed.start),
            batches=batches,
            updates=tuple(self.update(followed, name) for name in followed.with_grad),
            with_grad=self.with_grad(followed),
        )
        step = self.clipped(followed, unclipped)
        if self.weighing.mean == "renormalised":
            shares = [
                consumed_share(share, after, before)
                for after, (before, share) in zip(
                    step.batches, batches_and_shares, strict=True
                )
            ]
            self.mean_check.check(index, shares)
        return step

    def batch(
        self, step: FollowedStep, call: ModelCall
    ) -> tuple[TakenBatch, CallShare]:
        """Return the examples of a call with their losses, and the loss factor κ of the
        call."""
        self.refuse_unknown(step, call)
        losses = CallLoss(self.loss, self.called.at(call), call, step.index)
        share = losses.share(step.start, self.weighing)
        counts = share.counts
        kappa = share.factor / self.steps.processes
        factors = self.weighing.factors(call.names, counts).to(self.end)
        mean_factor = self.weighing.mean_factor(call.names, counts)
        rows = torch.tensor(
            [self.names[name] for name in call.names], device=self.end.device
        )
        batch = TakenBatch(
            examples=rows,
            shares=kappa * factors,
            losses=lambda weights: losses.at(self.flat.weights(weights)),
            per_weight=torch.full_like(factors, kappa * mean_factor),
            counts=1.0 if counts is None else counts.to(self.end),
        )
        return batch, share

    def refuse_unknown(self, step: FollowedStep, call: ModelCall) -> None:
        """Raise if effects cannot include a call, because a derivative is unknown."""
        if call.weights is not None:
            raise Mistake(
                f"step {step.index}: it used gradients at weights that the loop had "
                "moved (SAM), and effects do not know how these weights depend on the "
                "examples; ask only for contributions"
            )
        if call.at != step.index:
            raise Mistake(
                f"step {step.index}: it used gradients that were computed at the "
                f"weights of step {call.at}, which effects cannot include; zero "
                "gradients at every step"
            )
        if self.called.is_cast(call.circumstances):
            how = "under autocast"
            if call.circumstances.autocast is None:
                how = "with frozen weights in half precision"
            raise Mistake(
                f"step {step.index}: it was taken {how}, and the rounding has no "
                "derivative; follow the loop without it, or leave effects out"
            )
        if call.joined:
            raise Mistake(
                f"step {step.index}: its loss uses the outputs "
                f"{several(list(call.joined))} together, but effects need a loss of one "
                "output; ask only for contributions, or let the model return one "
                "tensor (torch.cat)"
            )

    def update(self, step: FollowedStep, name: str) -> Update:
        """Return the linear step of a parameter. Include Adam's denominator if Adam
        updates the parameter."""
        linear = step.of(name)
        denominator = None
        if self.adam is not None:
            denominator = self.adam.denominator(step, name)
        if isinstance(linear.momentum_scale, Tensor):
            linear = replace(linear, momentum_scale=linear.momentum_scale.reshape(-1))
        return Update(
            weight_slice=self.flat.slices[name], linear=linear, denominator=denominator
        )

    def with_grad(self, step: FollowedStep) -> Float[Tensor, " weight"]:
        """Return 1 for weights with a gradient in the step, and 0 for all others."""
        with_grad = set(step.with_grad)
        masks = {
            name: torch.full_like(weight, float(name in with_grad))
            for name, weight in step.start.items()
        }
        return self.flat.vector(masks)

    def clipped(self, followed: FollowedStep, step: TrainedStep) -> TrainedStep:
        """Return `step` with the factor c between its replayed gradient and the
        gradient that the optimizer used.

        If c is a power of two, it is the scale of the loss, so multiply the batches by
        it. Otherwise, the gradient was clipped by norm, so set the clipping norm."""
        if not step.batches:
            return step
        with_grad = self.with_grad(followed)
        gradients = followed.zeros | dict(followed.gradient)
        consumed = self.flat.vector(gradients) * with_grad

        def replayed(multiple: float) -> Tensor:
            batches = [batch.times(multiple) for batch in step.batches]
            return gradient(batches, step.weights) * with_grad

        g = gradient(step.batches, step.weights) * with_grad
        factor, rounding = self.factor(step.index, g, consumed, replayed)
        if is_power_of_two(factor, rounding):
            batches = tuple(batch.times(factor) for batch in step.batches)
            return replace(step, batches=batches)
        return replace(
            step, clip_norm=self.same_norm(step.index, factor, float(g.norm()))
        )

    def factor(
        self,
        index: int,
        g: Tensor,
        consumed: Tensor,
        replayed: Callable[[float], Tensor],
    ) -> tuple[float, float]:
        """Return the factor c between the replayed gradient g and the gradient that the
        optimizer used, and the relative rounding error of c.

        The error is `SUM_ORDER_EPS` eps. Terms of g may cancel if this error does not
        explain the distance of the two gradients, or the distance of c from a nearby
        power of two. Then add the measured rounding error of g (see `cancelled`).

        `replayed(m)` returns the gradient of m times the loss."""
        factor, missed = factor_between(g, consumed)
        rounding = SUM_ORDER_EPS * torch.finfo(self.end.dtype).eps
        near_power = is_power_of_two(factor, NEAR_POWER)
        if missed > rounding or (near_power and not is_power_of_two(factor, rounding)):
            rounding += ROUNDING_FACTOR * cancelled(replayed)
        if not missed <= rounding:
            raise Mistake(
                f"step {index}: the gradients of some parameters were multiplied by "
                "other factors than those of others (relative difference "
                f"{missed:.2g}), but effects need one factor for all; clip all "
                "parameters together, by norm"
            )
        return factor, rounding

    def same_norm(self, index: int, factor: float, size: float) -> float:
        """Return the clipping norm of a step. Raise if the factor is not below 1, or if
        an earlier step was clipped to another norm."""
        multiplied = (
            f"step {index}: the gradient was multiplied by {factor:.4g}, which is not a "
            "power of two"
        )
        if not 0 < factor < 1:
            raise Mistake(
                f"{multiplied} and does not clip; effects support only clipping by norm "
                "and the scale of a GradScaler"
            )
        norm = factor * (size + GUARD)
        if self.norm is None:
            self.norm = norm
        if not isclose(norm, self.norm, rel_tol=SAME_NORM):
            raise Mistake(
                f"{multiplied} and clips to the norm {norm:.4g}, but another step clips "
                f"to {self.norm:.4g}; effects support only one norm for all steps"
            )
        return norm


def is_power_of_two(factor: float, rounding: float) -> bool:
    """Return True if a factor is 0 or a power of two, up to the relative error
    `rounding`.

    >>> is_power_of_two(2.0**-10, 1e-9), is_power_of_two(1.0, 1e-9), is_power_of_two(0.3, 1e-9)
    (True, True, False)
    """
    if factor <= 0:
        return factor == 0
    bits = log2(factor)
    return abs(bits - round(bits)) <= rounding
