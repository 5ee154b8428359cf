"""Attribution: what each example added to each output of the queries, summed from the last step to the first.

The sum is `path.backward_sum`, with the linear steps of the loop's optimizers, the gradients of its calls, and c, the
factor between the gradient of the examples and what was consumed: of clipping, of a scaled loss. An example's J is
that of the weights at which it was called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.calls import ModelCall
from ntkexp.foreign_loop.clipping import ADDED, Factors, factor_between
from ntkexp.foreign_loop.replayed_module import CHANGED, CallReaders, Replayed
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.mistake import Mistake
from ntkexp.path.backward_sum import BackwardSum, StepBack
from ntkexp.shapes import Inputs, Weights

AGREES = 1e3  # eps: of sums over a batch, in another order, relative to the sum of their sizes
OF_CASTS = 8  # eps of the shorter numbers: of the same sums by other kernels; by the same ones they are the same
ALIKE = (
    f"{ADDED} A penalty on weights is followed as weight_decay of "
    "the optimizer; one on another output, when that is part of the module's output (output=…), or of a call of its own"
)
DREW = (
    "were other random numbers drawn in the call, by fused attention (choose attn_implementation='eager', or "
    "SDPBackend.MATH in the loop), by a compiled model, after seeding inside? If not, " + ALIKE
)


@dataclass(frozen=True)
class StepFound:
    """What was found of a step: its parts, its decay, the factor of its gradient, and how far two proofs are off."""

    parts: Float[Tensor, "probe out row"]
    decay: Float[Tensor, "probe out"]
    factor: float
    gradient_error: float  # proof (a), relative to the gradient
    closure: float  # proof (c), relative to the change of the outputs
    casts: Float[Tensor, "probe out"]  # what casts, or rounding, did to the gradient, and that to the outputs
    casts_error: float  # how far they moved the gradient, relative to it


@dataclass
class Backwards:
    """The way back over a loop: `later` is the tape of the queries after the step that comes next, `sum` what the steps
    after that have added up."""

    reader: Reader
    calls: CallReaders
    queries: Inputs
    later: Tape
    sum: BackwardSum = field(default_factory=BackwardSum)
    multiplied: Factors = field(default_factory=Factors)

    def take(self, step: FollowedStep, end: Weights, steps: AbstractSteps) -> StepFound:
        """Take one step back."""
        # Jᵀℓ′ of every example, at the weights at which it was called, and their sum
        begun = [step.start if call.at == step.index else steps.start(call.at) for call in step.calls]
        try:
            both = [self.calls.pulled(call, weights) for call, weights in zip(step.calls, begun, strict=True)]
        except Mistake as error:
            raise Mistake(f"step {step.index}: {error}") from error
        calls, replayed = [features for features, _ in both], [each for _, each in both]
        found = {name: torch.zeros_like(step.start[name]) for name in step.heard}
        for each in calls:
            total = each.total(step.start)
            found = {name: part + total[name] for name, part in found.items()}

        # proof (a), and what the optimizer took in beside that gradient: what casts, or rounding, did to it
        factors, missed = self.prove(step, begun, found, replayed)
        rounds = casts(step) or divides(step)
        rounding = {name: step.gradient[name] - factors[name] * found[name] for name in step.heard} if rounds else {}
        nothing = {name: torch.zeros_like(weight) for name, weight in step.start.items()} if rounding else {}

        # the sum, and proof (c)
        tape = self.reader.record(step.start, self.queries)
        back = StepBack(
            start=step.start,
            difference={name: end[name] - weight for name, weight in step.start.items()},
            linear=step.linear,
            right=calls,
            factor=factors,
            beside=nothing | rounding,
        )
        taken = self.sum.take(back, [(1.0, self.reader.along(tape, self.later))])
        change = self.later.outputs - tape.outputs
        closure = (taken.pushed - change).norm()
        self.later = tape
        return StepFound(
            parts=taken.kernel.squeeze(3).neg_(),
            decay=taken.decay,
            factor=min(factors[name] for name in step.heard) if step.heard else 0.0,
            gradient_error=missed,
            closure=float(closure / change.norm()) if bool(change.any()) else float(closure),
            casts=taken.beside,
            casts_error=relative(rounding, step.gradient) if casts(step) else 0.0,
        )

    def prove(
        self, step: FollowedStep, begun: Sequence[Weights], found: Weights, replayed: list[Replayed]
    ) -> tuple[Mapping[str, float], float]:
        """Proof (a): the gradient of the examples is the consumed one, up to one factor, or one for each parameter, and
        the calls gave what their replays give.

        Told are the factors, and how far the gradients differ, relative to their size. Where the loop cast, it is the
        gradient of its calls under the same casts, as autograd has it.
        """
        if casts(step):
            nothing, outputs = {name: torch.zeros_like(step.start[name]) for name in step.heard}, list[Tensor]()
            found = nothing | self.calls.called.gradient(step.calls, begun, outputs.append)
            replayed = [
                replace(each, outputs=given.to(each.outputs), cast_eps=self.calls.called.room(call.how))
                for each, given, call in zip(replayed, outputs, step.calls, strict=True)
            ]
        consumed = {name: step.gradient[name] for name in step.heard}
        room = self.calls.called.room_of(step.calls)
        factors, missed = factors_between(found, consumed, step.index, step.calls, room)
        hold_calls(step, replayed)
        factors = self.multiplied.take(step.index, factors, found, consumed, bound_of(consumed, room))
        return dict.fromkeys(step.start, 0.0) | factors, missed


def hold_calls(step: FollowedStep, replayed: Sequence[Replayed]) -> None:
    """Refuse calls whose replays give something else than they gave."""
    for call, each in zip(step.calls, replayed, strict=True):
        if call.signed is not None and (missed := each.other(call.signed)):
            raise Mistake(
                f"step {step.index}: the model gave other outputs when the loop called it than it does now at the same "
                f"weights, off by {missed:.2g} of them; {CHANGED}"
            )


def casts(step: FollowedStep) -> bool:
    """Whether some call was made under autocast."""
    return any(call.how.autocast is not None for call in step.calls)


def divides(step: FollowedStep) -> bool:
    """Whether the optimizer divides gradients by their sizes, as Adam does: where they cancel, what rounding left may
    then move weights as far as gradients do."""
    return any(isinstance(each.scale, Tensor) for each in step.linear.values())


def relative(part: Weights, whole: Weights) -> float:
    """The size of some gradients relative to that of the whole.

    >>> relative({"w": torch.ones(1)}, {"w": torch.full((1,), 4.0)}), relative({}, {})
    (0.25, 0.0)
    """
    above, below = (sum(float(each.square().sum()) for each in parts.values()) for parts in (part, whole))
    return (above / below) ** 0.5 if above else 0.0


def factors_between(
    found: Weights, consumed: Weights, step: int, calls: Sequence[ModelCall], room: float
) -> tuple[dict[str, float], float]:
    """The factors of the parameters between the gradient that was found, of these calls, and the consumed one, and how
    far the two differ after all: by no more than rounding, also of casts, which have that `room`."""
    if not consumed:
        return {}, 0.0
    bound = bound_of(consumed, room)
    factor, missed = compared(found, consumed, list(consumed))
    if missed <= bound:
        return dict.fromkeys(consumed, factor), missed
    each = {name: compared(found, consumed, [name]) for name in consumed}
    worst = max(each, key=lambda name: each[name][1])
    if (missed := each[worst][1]) <= bound:
        return {name: one[0] for name, one in each.items()}, missed
    rows, drew = sum(len(call.names) for call in calls), any(call.how.states for call in calls)
    raise Mistake(
        f"step {step}: the gradient that was consumed is not that of the {rows} examples seen, off by {missed:.2g} of "
        f"itself in '{worst}'; {DREW if drew else ALIKE}"
    )


def bound_of(consumed: Weights, room: float) -> float:
    """How far rounding may take a gradient, relative to it, and casts that have this room."""
    return max(AGREES * max((torch.finfo(part.dtype).eps for part in consumed.values()), default=0.0), OF_CASTS * room)


def compared(found: Weights, consumed: Weights, names: Sequence[str]) -> tuple[float, float]:
    """The factor between two gradients of these parameters, and how far they differ, relative to the second.

    >>> compared({"w": torch.ones(2)}, {"w": torch.full((2,), 0.5)}, ["w"])
    (0.5, 0.0)
    """
    ours, theirs = (torch.cat([each[name].flatten() for name in names]) for each in (found, consumed))
    return factor_between(ours, theirs)
