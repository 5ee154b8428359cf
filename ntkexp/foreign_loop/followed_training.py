"""A followed loop as a training that can be differentiated, for effects: its batches, losses and updates at every step,
what Adam remembered there, and to what norm gradients were clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose, isnan, log2, sqrt
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

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
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.optimizer.base import GUARD
from ntkexp.shapes import Weights

# --- The state of Adam after every step of a loop, replayed forwards: m, v, and the largest v with AMSGrad.
#
# A row for each step lies in an unnamed temporary file, which vanishes when it is closed.


PARTS = ("mean", "latest", "largest")


@dataclass(frozen=True)
class AdamStates:
    """The rows [step, part, weight], and how often each parameter had moved after each step."""

    rows: NDArray[Any]
    moved: list[dict[str, int]]
    flat: FlatWeights
    device: torch.device

    def denominator(self, step: FollowedStep, name: str) -> Denominator | None:
        """What the step of a parameter was divided by, if it was Adam's."""
        settings, place = step.settings[name], self.flat.places[name]
        if "betas" not in settings:
            return None
        second, largest = float(settings["betas"][1]), bool(settings["amsgrad"])
        now, before = self.row(step.index, place), self.row(step.index - 1, place)
        return Denominator(
            second=second,
            root=sqrt(1 - second ** self.moved[step.index][name]),
            eps=float(settings["eps"]),
            mean=now[0],
            latest=now[1],
            latest_before=before[1],
            largest=now[2] if largest else None,
            largest_before=before[2] if largest else None,
        )

    def row(self, index: int, place: slice) -> Tensor:
        """The state after a step: zeros before the first."""
        if index < 0:
            return torch.zeros_like(self.row(0, place))
        return torch.from_numpy(np.array(self.rows[index, :, place])).to(self.device)


def adam_states(steps: AbstractSteps, flat: FlatWeights) -> AdamStates | None:
    """The states after every step, if any optimizer was an Adam."""
    memory: dict[str, Tensor] = {}
    times: dict[str, int] = dict.fromkeys(flat.shapes, 0)
    rows: NDArray[Any] | None = None
    moved = []
    for step, _ in steps.forwards():
        for name in step.with_grad:
            times[name] += 1
            if "betas" in step.settings[name]:
                memory[name] = after(step, name, memory.get(name))
        moved.append(dict(times))
        if memory and rows is None:
            rows = empty_rows(len(steps), flat, next(iter(memory.values())))
        if rows is not None:
            for name, part in memory.items():
                rows[step.index, :, flat.places[name]] = part.cpu().numpy()
    return (
        None
        if rows is None
        else AdamStates(rows, moved, flat, next(iter(steps.end.values())).device)
    )


def after(step: FollowedStep, name: str, before: Tensor | None) -> Tensor:
    """The parts of a parameter after a step, [part, weight]."""
    coupled = step.linear[name].l2
    p = (
        step.gradient[name] + coupled * step.start[name] if coupled else step.gradient[name]
    ).reshape(-1)
    mean, latest, largest = p.new_zeros(3, len(p)) if before is None else before
    first, second = step.settings[name]["betas"]
    latest = second * latest + (1 - second) * p * p
    return torch.stack([first * mean + (1 - first) * p, latest, torch.maximum(largest, latest)])


def empty_rows(steps: int, flat: FlatWeights, like: Tensor) -> NDArray[Any]:
    """An empty file of rows."""
    folder, kind = Path(gettempdir()), like.cpu().numpy().dtype
    needed, free = steps * len(PARTS) * flat.size * kind.itemsize, disk_usage(folder).free
    if free < needed:
        raise NoPlace(
            f"what Adam remembered takes {needed / 1e9:.2g} GB and {folder} has {free / 1e9:.2g} GB free; set TMPDIR "
            "to another place"
        )
    with TemporaryFile(dir=folder) as file:
        return np.memmap(file, kind, "w+", shape=(steps, len(PARTS), flat.size))


# --- The mean that a loop takes, of which nothing is seen but the share κ of each example of a call.
#
# That the others share what an example leaves, as 1/(Σm − mᵢ) in place of 1/Σm, is right where κ is one number over
# Σm, the same at every call but for the scale of a scaler. Where `loss=` does not say what examples count, all of a
# call have to count the same: 1, or the number of outputs or targets of each.


PLAIN = 1000  # the largest part of which a mean may be the share of a loss that is given otherwise
COUNTS = (
    "let loss= also give what each example counts in the loop's mean: 'return losses, weight[labels]' for "
    "cross_entropy(weight=weight), the number of its targets for a mean over them, torch.ones(len(losses)) if each "
    "counts once; or let the others keep their shares, by mean='fixed'"
)


def consumed_share(share: CallShare, after: TakenBatch, before: TakenBatch) -> CallShare:
    """The share with the scale that was taken back, if any was; of a call of which nothing was left, none."""
    scale = after.by_weight[0] / before.by_weight[0] if before.by_weight[0] else 0.0
    return replace(share, factor=share.factor * float(scale))


@dataclass
class MeanTaken:
    """What κ makes of what a call counts, by what may have been counted, as far as all calls agreed."""

    first: tuple[int, CallShare] | None = None
    means: dict[str, float] = field(default_factory=dict)

    def hold(self, step: int, shares: Sequence[CallShare]) -> None:
        """Refuse shares that are not those of a mean over each call; a single example has nothing to share."""
        for share in shares:
            if share.factor and share.examples > 1:
                self.first = self.first or (step, share)
                agreed = self.agreed(step, share)
                for other in (self.first[1], *shares):
                    refuse_sum(step, share, other)
                self.compare(step, share, agreed)

    def agreed(self, step: int, share: CallShare) -> dict[str, float]:
        """Those of the means that the shares of a call agree with."""
        assert self.first is not None
        means, room = means_of(share), share.room + self.first[1].room
        agreed = {
            name: mean
            for name, mean in means.items()
            if same_scale(mean, self.means.get(name, mean), room)
        }
        if share.counts is not None and "examples" in agreed and "counts" not in agreed:
            raise Mistake(
                f"step {step}: shares are those of a mean in which each example counts once, as at step "
                f"{self.first[0]}, and not what loss= says that it counts; let it give torch.ones(len(losses)) (of a "
                "sum, let the others keep their shares, by mean='fixed')"
            )
        return agreed

    def compare(self, step: int, share: CallShare, agreed: dict[str, float]) -> None:
        """Refuse shares of a call that are of no mean over it, unless it is said what its examples count."""
        assert self.first is not None
        if share.counts is None and share.targets is not None and isnan(share.targets):
            raise Mistake(
                f"step {step}: loss= has class weights, or targets that are ignored; {COUNTS}"
            )
        known = {
            name: mean for name, mean in agreed.items() if not self.means or name in self.means
        }
        if share.counts is None and not known:
            raise Mistake(
                f"step {step}: shares of examples are not those of a mean over the examples of a call, as they would "
                f"be by step {self.first[0]}; {COUNTS}"
            )
        if share.counts is None and not any(
            is_plain(mean, 2 * share.room) for mean in known.values()
        ):
            raise Mistake(
                f"step {step}: the shares of {share.examples} examples of a call add up to "
                f"{share.factor * share.examples:.4g}, which is not a mean over them, or one of a loss with a "
                "factor that "
                f"loss= leaves out; {COUNTS}"
            )
        self.means = known if share.counts is None else self.means or agreed


def means_of(share: CallShare) -> dict[str, float]:
    """κ times what a call counts."""
    found = {"examples": share.factor * share.examples}
    if share.counts is not None:
        return found | {"counts": share.factor * float(share.counts.sum())}
    found["numbers"] = share.factor * share.numbers
    return found if share.targets is None else found | {"targets": share.factor * share.targets}


def refuse_sum(step: int, one: CallShare, other: CallShare) -> None:
    """Refuse calls that count differently, and whose examples have the same share; and one whose share is its loss."""
    sizes = [
        float(share.examples if share.counts is None else share.counts.sum())
        for share in (one, other)
    ]
    room = one.room + other.room
    alike = isclose(one.factor, other.factor, rel_tol=room) and not isclose(*sizes, rel_tol=room)
    whole = one.counts is None and isclose(one.factor, 1.0, rel_tol=room)
    if alike or whole:
        raise Mistake(
            f"step {step}: an example has the share {one.factor:.4g} of the loss however many there are in its call: "
            "the loss is a sum, or a mean over all calls of a step, where effects know a mean over each call; let the "
            f"others keep their shares, by mean='fixed'{'; or ' + COUNTS if whole else ''}"
        )


def same_scale(one: float, other: float, room: float) -> bool:
    """Whether two means are the same, but for a power of two.

    >>> same_scale(1.0, 4.0, 1e-9), same_scale(1.0, 3.0, 1e-9)
    (True, False)
    """
    return other * one > 0 and is_power_of_two(one / other, 2 * room)


def is_plain(mean: float, room: float) -> bool:
    """Whether a mean was multiplied or divided by a whole number, and by a power of two, such as a count of calls, of
    outputs, or a scale.

    >>> is_plain(1 / 12, 1e-9), is_plain(-5.0, 1e-9), is_plain(24 / 37.1, 1e-9)
    (True, True, False)
    """
    parts = range(1, int(min(PLAIN, max(1.0, 0.01 / room))) + 1, 2)
    return any(
        is_power_of_two(abs(mean) * each, 2 * room) or is_power_of_two(abs(mean) / each, 2 * room)
        for each in parts
    )


# --- A followed loop as a training that can be differentiated.
#
# What its gradient was multiplied with is one factor c for all parameters. A power of two is a scale of the loss
# that a scaler took back; any other below 1 is clipping, to the norm k = c(‖g‖ + 1e-6), which must be the same at
# every step. Where several processes trained together, g is the mean of their gradients.


ROUNDS = 1e4  # eps: a gradient summed in another order, relative to itself
NEAR = 0.01  # a factor that may be a power of two, where much of a gradient cancels
SAME_NORM = 1e-3  # of two steps that were clipped to one norm, in float32


@dataclass(kw_only=True)
class FollowedTraining(AbstractTrajectory):
    """Steps are best asked for one after another, backwards; `names` gives every example its place."""

    steps: AbstractSteps
    called: CalledModule
    loss: ExampleLoss
    names: dict[str, int]
    weighing: Weighing = field(default_factory=Weighing)  # with which the loop was carried out
    back: Iterator[tuple[FollowedStep, Weights]] = field(default_factory=lambda: iter(()))
    next: int = -1  # step on the way back
    norm: float | None = None  # to which gradients were clipped, as far as was seen
    taken: MeanTaken = field(default_factory=MeanTaken)

    def __post_init__(self) -> None:
        if unknown := next((each for each in self.steps.known if not each.rule.has_effects), None):
            raise Mistake(
                f"effects of a loop with {unknown.kind.__name__} are not known, as they need the derivative of what "
                "its steps are divided by; train with SGD, Adam or AdamW, or leave effects out"
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
    def memory(self) -> AdamStates | None:
        """The states of Adam."""
        return adam_states(self.steps, self.flat)

    def step(self, index: int) -> TrainedStep:
        if index != self.next:
            self.back = self.steps.backwards(index + 1)
        followed, _ = next(self.back)
        self.next = index - 1
        both = [self.batch(followed, call) for call in followed.calls]
        step = TrainedStep(
            index=index,
            weights=self.flat.vector(followed.start),
            batches=tuple(batch for batch, _ in both),
            updates=tuple(self.update(followed, name) for name in followed.with_grad),
            with_grad=self.with_grad(followed),
        )
        found = self.clipped(followed, step)
        if self.weighing.mean == "renormalised":
            each = zip(found.batches, step.batches, (share for _, share in both), strict=True)
            self.taken.hold(
                index, [consumed_share(share, after, before) for after, before, share in each]
            )
        return found

    def batch(self, step: FollowedStep, call: ModelCall) -> tuple[TakenBatch, CallShare]:
        """The examples of a call, and what share they have in it."""
        if call.at != step.index:
            raise Mistake(
                f"step {step.index}: it used gradients that were computed at the weights of step {call.at}, which "
                "effects do not know; zero gradients at every step"
            )
        if self.called.is_cast(call.how):
            frozen = (
                "with frozen weights in short numbers"
                if call.how.autocast is None
                else "under autocast"
            )
            raise Mistake(
                f"step {step.index}: it was taken {frozen}, whose rounding has no derivative; follow the loop "
                "without, or leave effects out"
            )
        losses = CallLoss(self.loss, self.called.at(call), call, step.index)
        share = losses.share(step.start, self.weighing)
        counts, each = share.counts, share.factor / self.steps.processes
        factors = self.weighing.factors(call.names, counts).to(self.end)
        places = torch.tensor([self.names[name] for name in call.names], device=self.end.device)
        batch = TakenBatch(
            examples=places,
            shares=each * factors,
            losses=lambda weights: losses.at(self.flat.weights(weights)),
            per_weight=torch.full_like(factors, each * self.weighing.shared(call.names, counts)),
            counts=1.0 if counts is None else counts.to(self.end),
        )
        return batch, share

    def update(self, step: FollowedStep, name: str) -> Update:
        """How a parameter took the gradient in."""
        linear, denominator = (
            step.of(name),
            None if self.memory is None else self.memory.denominator(step, name),
        )
        if isinstance(linear.momentum_scale, Tensor):
            linear = replace(linear, momentum_scale=linear.momentum_scale.reshape(-1))
        return Update(place=self.flat.places[name], linear=linear, denominator=denominator)

    def with_grad(self, step: FollowedStep) -> Float[Tensor, " weight"]:
        """1 for weights whose gradients were consumed, 0 for others."""
        with_grad = set(step.with_grad)
        return self.flat.vector(
            {n: torch.full_like(w, float(n in with_grad)) for n, w in step.start.items()}
        )

    def clipped(self, followed: FollowedStep, step: TrainedStep) -> TrainedStep:
        """The step with what its gradient was multiplied with."""
        if not step.batches:
            return step
        with_grad = self.with_grad(followed)
        nothing = {name: torch.zeros_like(weight) for name, weight in followed.start.items()}
        consumed = self.flat.vector(nothing | dict(followed.gradient)) * with_grad
        found = gradient(step.batches, step.weights) * with_grad

        def multiplied(multiple: float) -> Tensor:
            return (
                gradient([batch.times(multiple) for batch in step.batches], step.weights)
                * with_grad
            )

        factor, rounding = self.factor(step.index, found, consumed, multiplied)
        if is_power_of_two(factor, rounding):
            batches = tuple(batch.times(factor) for batch in step.batches)
            return replace(step, batches=batches)
        return replace(step, clip_norm=self.same_norm(step.index, factor, float(found.norm())))

    def factor(
        self, index: int, found: Tensor, consumed: Tensor, multiplied: Callable[[float], Tensor]
    ) -> tuple[float, float]:
        """What the consumed gradient is of the one that was found, whose multiples round otherwise; and how far
        rounding may take either."""
        (factor, missed), rounding = (
            factor_between(found, consumed),
            ROUNDS * torch.finfo(self.end.dtype).eps,
        )
        if missed > rounding or is_power_of_two(factor, rounding) < is_power_of_two(factor, NEAR):
            rounding += ROUNDING_FACTOR * cancelled(multiplied)
        if not missed <= rounding:
            raise Mistake(
                f"step {index}: the gradients of some parameters were multiplied with other factors than those of "
                f"others (off by {missed:.2g}), and effects need one factor for all; clip all parameters together"
            )
        return factor, rounding

    def same_norm(self, index: int, factor: float, size: float) -> float:
        """The norm to which the gradient was clipped, if that is what happened."""
        multiplied = f"step {index}: the gradient was multiplied with {factor:.4g}, which is not a power of two"
        if not 0 < factor < 1:
            raise Mistake(
                f"{multiplied} and does not clip; effects know only clipping and the scale of a GradScaler"
            )
        norm = factor * (size + GUARD)
        if self.norm is not None and not isclose(norm, self.norm, rel_tol=SAME_NORM):
            raise Mistake(
                f"{multiplied} and clips to {norm:.4g} where another step clips to {self.norm:.4g}; effects know one "
                "norm for all steps"
            )
        self.norm = norm if self.norm is None else self.norm
        return norm


def is_power_of_two(factor: float, rounding: float) -> bool:
    """Whether a scaler's scale may have been taken back by this; also by nothing at all.

    >>> is_power_of_two(2.0**-10, 1e-9), is_power_of_two(1.0, 1e-9), is_power_of_two(0.3, 1e-9)
    (True, True, False)
    """
    if factor <= 0:
        return factor == 0
    bits = log2(factor)
    return abs(bits - round(bits)) <= rounding
