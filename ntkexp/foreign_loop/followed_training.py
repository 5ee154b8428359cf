"""A followed loop as a training that can be differentiated, with what Adam remembered at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import isclose, log2, sqrt
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
from ntkexp.foreign_loop.again import Weighing
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.calls import SPREAD, CallLoss, ExampleLoss, ModelCall, cancelled
from ntkexp.foreign_loop.clipping import factor_between
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.optimizer.base import GUARD
from ntkexp.shapes import Weights

# --- What Adam remembered at every step of a loop, found by walking it forwards: m, v, and the largest v with
# AMSGrad.
#
# A row for each step lies in a file without a name, which is gone when nobody looks at it any more.


PARTS = ("mean", "latest", "largest")


@dataclass(frozen=True)
class Remembered:
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
        """What was remembered after a step: nothing before the first."""
        if index < 0:
            return torch.zeros_like(self.row(0, place))
        return torch.from_numpy(np.array(self.rows[index, :, place])).to(self.device)


def remembered(steps: AbstractSteps, flat: FlatWeights) -> Remembered | None:
    """Walk forwards and remember, if any optimizer was an Adam."""
    memory: dict[str, Tensor] = {}
    times: dict[str, int] = dict.fromkeys(flat.shapes, 0)
    rows: NDArray[Any] | None = None
    moved = []
    for step, _ in steps.forwards():
        for name in step.heard:
            times[name] += 1
            if "betas" in step.settings[name]:
                memory[name] = after(step, name, memory.get(name))
        moved.append(dict(times))
        if memory and rows is None:
            rows = room(len(steps), flat, next(iter(memory.values())))
        if rows is not None:
            for name, part in memory.items():
                rows[step.index, :, flat.places[name]] = part.cpu().numpy()
    return None if rows is None else Remembered(rows, moved, flat, next(iter(steps.end.values())).device)


def after(step: FollowedStep, name: str, before: Tensor | None) -> Tensor:
    """The parts of a parameter after a step, [part, weight]."""
    coupled = step.linear[name].coupled
    p = (step.gradient[name] + coupled * step.start[name] if coupled else step.gradient[name]).reshape(-1)
    mean, latest, largest = p.new_zeros(3, len(p)) if before is None else before
    first, second = step.settings[name]["betas"]
    latest = second * latest + (1 - second) * p * p
    return torch.stack([first * mean + (1 - first) * p, latest, torch.maximum(largest, latest)])


def room(steps: int, flat: FlatWeights, like: Tensor) -> NDArray[Any]:
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
    def memory(self) -> Remembered | None:
        """What Adam remembered."""
        return remembered(self.steps, self.flat)

    def step(self, index: int) -> TrainedStep:
        if index != self.next:
            self.back = self.steps.backwards(index + 1)
        followed, _ = next(self.back)
        self.next = index - 1
        step = TrainedStep(
            index=index,
            weights=self.flat.vector(followed.start),
            batches=tuple(self.batch(followed, call) for call in followed.calls),
            updates=tuple(self.update(followed, name) for name in followed.heard),
            heard=self.heard(followed),
        )
        return self.clipped(followed, step)

    def batch(self, step: FollowedStep, call: ModelCall) -> TakenBatch:
        """The examples of a call."""
        if call.at != step.index:
            raise Mistake(
                f"step {step.index}: it took gradients in that were made at the weights of step {call.at}, which "
                "effects do not know; zero gradients at every step"
            )
        if call.how.autocast is not None:
            raise Mistake(
                f"step {step.index}: it was taken under autocast, whose rounding has no derivative; follow the loop "
                "without autocast, or ask only what examples added"
            )
        losses = CallLoss(self.loss, self.called.at(call.how), call, step.index)
        factors = self.weighing.factors(call.names).to(self.end)
        share = losses.share(step.start, factors) / self.steps.processes
        places = torch.tensor([self.names[name] for name in call.names], device=self.end.device)
        return TakenBatch(
            examples=places,
            shares=share * factors,
            losses=partial(self.losses, losses),
            per_weight=torch.full_like(factors, share * self.weighing.shared(call.names)),
        )

    def losses(self, of: CallLoss, weights: Float[Tensor, " weight"]) -> Float[Tensor, " row"]:
        """The losses of a call at a vector of weights."""
        return of.at(self.flat.weights(weights))

    def update(self, step: FollowedStep, name: str) -> Update:
        """How a parameter took the gradient in."""
        linear, denominator = step.of(name), None if self.memory is None else self.memory.denominator(step, name)
        if isinstance(linear.scale, Tensor):
            linear = replace(linear, scale=linear.scale.reshape(-1))
        return Update(place=self.flat.places[name], linear=linear, denominator=denominator)

    def heard(self, step: FollowedStep) -> Float[Tensor, " weight"]:
        """1 for weights whose gradients were consumed, 0 for others."""
        heard = set(step.heard)
        return self.flat.vector({n: torch.full_like(w, float(n in heard)) for n, w in step.start.items()})

    def clipped(self, followed: FollowedStep, step: TrainedStep) -> TrainedStep:
        """The step with what its gradient was multiplied with."""
        if not step.batches:
            return step
        heard = self.heard(followed)
        nothing = {name: torch.zeros_like(weight) for name, weight in followed.start.items()}
        consumed = self.flat.vector(nothing | dict(followed.gradient)) * heard
        found = gradient(step.batches, step.weights) * heard

        def multiplied(multiple: float) -> Tensor:
            return gradient([batch.times(multiple) for batch in step.batches], step.weights) * heard

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
        (factor, missed), rounding = factor_between(found, consumed), self.rounding
        if missed > rounding or is_power_of_two(factor, rounding) < is_power_of_two(factor, NEAR):
            rounding += SPREAD * cancelled(multiplied)
        if not missed <= rounding:
            raise Mistake(
                f"step {index}: the gradients of some parameters were multiplied with other factors than those of "
                f"others (off by {missed:.2g}), and effects know one for all; clip all parameters together"
            )
        return factor, rounding

    def same_norm(self, index: int, factor: float, size: float) -> float:
        """The norm to which the gradient was clipped, if that is what happened."""
        multiplied = f"step {index}: the gradient was multiplied with {factor:.4g}, which is no power of two"
        if not 0 < factor < 1:
            raise Mistake(f"{multiplied} and does not clip; effects know clipping and the scale of a scaler")
        norm = factor * (size + GUARD)
        if self.norm is not None and not isclose(norm, self.norm, rel_tol=SAME_NORM):
            raise Mistake(
                f"{multiplied} and clips to {norm:.4g} where another step clips to {self.norm:.4g}; effects know one "
                "norm for all steps"
            )
        self.norm = norm if self.norm is None else self.norm
        return norm

    @property
    def rounding(self) -> float:
        """How far rounding may take a gradient."""
        return ROUNDS * torch.finfo(self.end.dtype).eps


def is_power_of_two(factor: float, rounding: float) -> bool:
    """Whether a scaler's scale may have been taken back by this; also by nothing at all.

    >>> is_power_of_two(2.0**-10, 1e-9), is_power_of_two(1.0, 1e-9), is_power_of_two(0.3, 1e-9)
    (True, True, False)
    """
    if factor <= 0:
        return factor == 0
    bits = log2(factor)
    return abs(bits - round(bits)) <= rounding
