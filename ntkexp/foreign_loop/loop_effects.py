"""What a followed loop says of its effects: the numbers, what is known of them, and what speaks against them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics.kinks import kinks
from ntkexp.effects.caveats import Caveats
from ntkexp.effects.mean import Effects, MeanName, kind_of
from ntkexp.effects.sweep_plan import SweepPlan
from ntkexp.foreign_loop.altered_loop import Again
from ntkexp.foreign_loop.example_loss import ExampleLoss
from ntkexp.foreign_loop.followed_effects import FollowedSweep
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.loop_again import LoopAgain
from ntkexp.foreign_loop.loop_trained import TrainedAlone, costs_more
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.inputs import examples
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.record.taping import record
from ntkexp.mistake import Mistake
from ntkexp.records.contributions import RETRAINED
from ntkexp.records.leave_out import LeaveOut
from ntkexp.removal.agreement import cosine, twentieth
from ntkexp.removal.check import beside, groups, groups_left_out, sizes, sizes_of
from ntkexp.report.leave_out import held_against, told_of_trainings

if TYPE_CHECKING:
    from ntkexp.foreign_loop.trace import Trace

LOG = logging.getLogger("ntkexp.follow")
SEED = 0  # of the groups that are left out by chance
UNCHECKED = "effects were not held against trainings without examples; give again=, a function that trains anew"


@dataclass(frozen=True, kw_only=True)
class LoopEffects:
    """The effects, their attributes, and the trainings that they were held against, if there were any."""

    values: Float[Tensor, "probe out example"]
    facts: Mapping[str, float | str]
    check: LeaveOut | None


def loop_effects(trace: Trace, effects: Effects, mean: MeanName, memory_gb: float, again: Again | None) -> LoopEffects:
    """Sweep back over the loop, and carry it out again without examples where somebody says how."""
    training = FollowedTraining(steps=trace.steps, called=trace.called, loss=loss_of(trace), names=trace.examples)
    tape = record(trace.function, trace.steps.end, trace.queries, differentiable=True)
    last, _ = next(trace.steps.backwards())
    plan = plan_of(trace, tape, last, memory_gb, one_step=effects == "one_step")
    if again is not None and effects is True and costs_more(plan):
        return trained_alone(plan, TrainedAlone(training, LoopAgain(again, trace, mean)))
    LOG.warning("ntkexp: %s%s", plan.sentence, "" if again is None else f"; then {retrainings(len(trace.examples))}")
    sweep = FollowedSweep(
        training=training,
        function=trace.function,
        queries=trace.queries,
        kind=effects,
        mean=mean,
        plan=plan,
        files=None if trace.folder is None else TraceFolder(trace.folder),
    )
    values = sweep.effects()
    loop = None if again is None else LoopAgain(again, trace, mean)
    agrees = None if loop is None else agreement_of(loop)
    check = None if loop is None else check_of(loop, values)
    caveats = Caveats(growth=sweep.growth, agreement=agrees, kinks=kinks(tape), eps=eps_of(last)).sentences
    caveats += [UNCHECKED] if check is None else [held_against(check, sweep.growth).sentence]
    facts: dict[str, float | str] = {
        "kind": kind_of(effects),
        "mean": mean,
        "growth": sweep.growth,
        "caveats": "; ".join(caveats),
    }
    return LoopEffects(values=values, facts=facts | ({} if agrees is None else {"agreement": agrees}), check=check)


def trained_alone(plan: SweepPlan, alone: TrainedAlone) -> LoopEffects:
    """Carry the loop out without each example, which is the truth."""
    LOG.warning("ntkexp: %s", plan.spared())
    values = alone.effects()
    check = groups_left_out(values, SEED, alone.loop.changes, range(len(values)))
    told = told_of_trainings(plan.train, [], check)
    facts: dict[str, float | str] = {"kind": RETRAINED, "mean": alone.loop.mean, "caveats": "; ".join(told)}
    return LoopEffects(values=values, facts=facts, check=check)


def loss_of(trace: Trace) -> ExampleLoss:
    """The loss that effects are derivatives of."""
    if trace.loss is None:
        raise Mistake(
            "effects=True: effects are derivatives of the gradient, for which the loss is needed; follow with "
            "loss=, a function of outputs and call that gives one loss for each example"
        )
    return trace.loss


def plan_of(trace: Trace, tape: Tape, last: FollowedStep, memory_gb: float, *, one_step: bool) -> SweepPlan:
    """What the sweep takes, if all steps are like the last."""
    rows = sum(len(call.names) for call in last.calls)
    weights = trace.steps.end.values()
    return SweepPlan(
        free=memory_gb * 1e9,
        points=examples(trace.queries),
        outputs=tape.outputs.shape[1],
        steps=len(trace.steps),
        parameters=sum(weight.numel() for weight in weights),
        train=len(trace.examples),
        rows=rows,
        taken_out=rows if one_step else 0,
        adjoints=max((1, *(adjoints(settings) for settings in last.settings.values()))),
        tape_bytes=tape.bytes_per_example,
        number_bytes=max(weight.element_size() for weight in weights),
    )


def adjoints(settings: Mapping[str, object]) -> int:
    """How many numbers an output feels of each weight: of itself, and of what its optimizer remembers.

    >>> adjoints({"momentum": 0.0}), adjoints({"momentum": 0.9}), adjoints({"betas": (0.9, 0.99), "amsgrad": True})
    (1, 2, 4)
    """
    if "betas" in settings:
        return 4 if settings["amsgrad"] else 3
    return 2 if settings.get("momentum") else 1


def eps_of(step: FollowedStep) -> float | None:
    """The least ε by which an optimizer divides, if one does."""
    return min((float(each["eps"]) for each in step.settings.values() if "betas" in each), default=None)


def retrainings(count: int) -> str:
    """Say how often the loop is carried out again."""
    times = len(groups(torch.zeros(count), SEED)) + 3
    return f"the loop is carried out {times} times again, without some of its examples"


def agreement_of(loop: LoopAgain) -> float:
    """Whether half of a removal does half of it."""
    names = list(loop.trace.examples)
    chosen = [names[k] for k in twentieth(len(names), SEED).tolist()]
    half, none = (loop.outputs(dict.fromkeys(chosen, weight)) for weight in (0.5, 0.0))
    return cosine(loop.repeated.flatten(), half.flatten(), none.flatten())


def check_of(loop: LoopAgain, effect: Float[Tensor, "probe out example"]) -> LeaveOut | None:
    """Effects held against trainings without examples, if there are enough to leave some out."""
    if not sizes(effect.shape[2]):
        return None
    removals = groups(sizes_of(effect), SEED)
    actual = loop.changes([each.examples for each in removals])
    return beside(effect, removals, actual, range(len(effect)))
