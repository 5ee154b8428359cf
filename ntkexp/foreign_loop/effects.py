"""Leave-out effects of the examples of a followed loop: estimated by backward sweeps
over the steps, or measured by retraining without each example."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.capacity import MemoryBudget
from ntkexp.effects.plan import Caveats, SweepMemory
from ntkexp.effects.sweep import ChunkedSweep, Effects, MeanName, kind_of
from ntkexp.foreign_loop.again import Again, LoopAgain
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.problem import LoopProblem
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.user_loss import ExampleLoss, Weighing
from ntkexp.kernel import Tape, plain_kernels
from ntkexp.kernel.record.tape import digest, examples, part
from ntkexp.kernel.record.taping import record
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.removal.retraining import (
    EffectsResult,
    RetrainingCheck,
    checked_effects,
    effects_retrained,
)
from ntkexp.report.progress import Announced
from ntkexp.shapes import Inputs
from ntkexp.statistics import kinks

# --- Backward sweeps over a loop, from the last step to the first,
# for the outputs at its queries.
#
# Queries are handled in chunks, so that their adjoints (the derivatives of the final
# outputs with respect to the weights before a step) fit into memory. If the trace is in
# a folder, the state of the sweep is saved there from time to time. A killed sweep
# continues from the saved state, with the same result to the bit.


SWEEP_SAVE_SECONDS = 60.0
"""Seconds between two saves of a sweep's state."""


@dataclass(kw_only=True)
class FollowedSweep:
    """A backward sweep over a loop that can be interrupted. Its state is saved in the
    folder of the trace."""

    training: FollowedTraining
    sweep: ChunkedSweep
    files: TraceFolder | None
    progress: AbstractProgress = field(default_factory=Silent)

    def effects(self) -> Float[Tensor, "query out example"]:
        """Return the effects. Continue from the saved state if there is one, and save
        the state from time to time."""
        if self.files is not None and self.files.whole(self.files.sweep):
            state = self.files.read(self.files.sweep)
            if state["of"] == self.identity:
                self.sweep.restore(state["sweeps"])
                self.training.norm = state["norm"]
        saved_at = time.monotonic()
        announced = None
        for done, whole in self.sweep.steps_back():
            # Estimate the remaining time from the steps of this process only. A
            # continued sweep took its earlier steps in another process.
            announced = announced or Announced(
                "ntkexp: the sweep for effects", 1 + whole - done, self.progress
            )
            announced.step()
            if time.monotonic() - saved_at >= SWEEP_SAVE_SECONDS:
                self.save()
                saved_at = time.monotonic()
        if announced is not None:
            announced.stop()
        self.save()
        return self.sweep.effects

    @cached_property
    def identity(self) -> Mapping[str, object]:
        """The identity of the sweep: its settings, and a digest of the final weights
        and of the last step's losses. A sweep with another identity does not continue a
        saved state."""
        last = self.training.step(self.training.length - 1)
        losses = [batch.losses(self.training.end).detach() for batch in last.batches]
        asked = [
            "sweeps",
            self.training.length,
            self.sweep.points_per_chunk,
            self.sweep.mean,
            self.sweep.kind,
        ]
        return {"asked": asked, "seen": digest([self.training.end, *losses]).hex()}

    def save(self) -> None:
        """Save the state of the sweep, if the trace has a folder. If the disk is full,
        continue without saving."""
        if self.files is not None:
            state = {
                "of": self.identity,
                "norm": self.training.norm,
                "sweeps": self.sweep.state,
            }
            with suppress(NoPlace):
                self.files.write(self.files.sweep, state)


def sweep_over(
    trace: LoopProblem,
    training: FollowedTraining,
    plan: SweepMemory,
    kind: Effects,
    mean: MeanName,
    progress: AbstractProgress,
) -> FollowedSweep:
    """Return a sweep, not yet started, for all outputs at the queries of a trace."""
    flat = training.flat
    end = training.end

    def outputs(weights: Tensor, query: Inputs) -> Tensor:
        return trace.function(flat.weights(weights), query).reshape(-1)

    def outputs_of(points: slice, weights: Tensor) -> Tensor:
        return trace.function(flat.weights(weights), trace.queries)[points].flatten()

    def end_gradients(points: slice) -> Tensor:
        with plain_kernels():
            if trace.measured is not None:  # a measure takes all queries at once
                gradients: Tensor = jacrev(partial(outputs_of, points))(end)
                return gradients
            queries = (
                part(trace.queries, slice(k, k + 1))
                for k in range(points.start, points.stop)
            )
            return torch.cat(
                [jacrev(partial(outputs, query=query))(end) for query in queries]
            )

    sweep = ChunkedSweep(
        training=training,
        end_gradients=end_gradients,
        points_per_chunk=plan.points_per_chunk,
        outputs_per_pass=plan.outputs_per_pass,
        kind=kind,
        mean=mean,
        effects=end.new_zeros(plan.points, plan.outputs, training.examples),
    )
    files = None if trace.folder is None else TraceFolder(trace.folder)
    return FollowedSweep(training=training, sweep=sweep, files=files, progress=progress)


# --- Effects by sweeps, or by retraining without each example if retraining is cheaper.
#
# Leave-out effects depend on the user's `loss=`. Sweeps and retrainings therefore
# compare it with every call of the followed loop.
#
# Each retraining is followed, too. Proof (b), the optimizer's rule, is checked at every
# step of a retraining. Proof (a), the sum of the examples' gradients, is not checked.
# Instead, the retraining with all examples must end at the followed loop's outputs.


LOG = logging.getLogger("ntkexp.follow")
OUTPUTS_PER_TRAINING = 2
"""A backward sweep for this many outputs costs about as much as one training. Measured:
0.7 outputs for wide networks, and up to 5.5 for others."""
UNCHECKED = (
    "effects were not checked by retraining without examples; give again=, a function "
    "that trains again"
)


def loop_effects(
    trace: LoopProblem,
    effects: Effects,
    mean: MeanName,
    budget: MemoryBudget,
    again: Again | None,
    progress: AbstractProgress | None = None,
) -> EffectsResult:
    """Compute the leave-out effects of all examples by a sweep. If `again` is given,
    check them by retraining, or compute them by retraining if this is cheaper."""
    progress = progress or Silent()
    training = training_of(trace, mean)
    tape = record(trace.function, trace.steps.end, trace.queries, differentiable=True)
    last, _ = next(trace.steps.backwards())
    plan = plan_of(trace, tape, last, budget, one_step=effects == "one_step")
    loop = None if again is None else LoopAgain(again, trace, mean, progress)
    query = range(plan.points)
    if (
        loop is not None
        and effects is True
        and OUTPUTS_PER_TRAINING * plan.train <= plan.points * plan.outputs
    ):
        LOG.warning("ntkexp: %s", plan.retraining_remark())
        for index in reversed(range(training.length)):
            training.step(index)  # raises if `loss=` is not the loop's loss
        return effects_retrained(loop, mean, query)
    sweep = sweep_over(trace, training, plan, effects, mean, progress)
    values = sweep.effects()
    caveats = Caveats(growth=sweep.sweep.growth, kinks=kinks(tape), eps=eps_of(last))
    check = None if loop is None else RetrainingCheck(training=loop, query=query)
    facts = {"kind": kind_of(effects), "mean": mean}
    return checked_effects(values, facts, caveats, check, unchecked=UNCHECKED)


def attributes_of(result: EffectsResult) -> dict[str, float | str]:
    """Return the `attrs` of the array `effect` in the attribution,
    with "agreement" last."""
    facts = dict(result.facts)
    agrees = {"agreement": facts.pop("agreement")} if "agreement" in facts else {}
    return facts | {"caveats": "; ".join(result.caveats)} | agrees


def training_of(trace: LoopProblem, mean: MeanName) -> FollowedTraining:
    """Return the loop as a differentiable training. Raise if the trace has no loss."""
    return FollowedTraining(
        steps=trace.steps,
        called=trace.called,
        loss=loss_of(trace),
        names=trace.examples,
        weighing=Weighing(mean=mean),
    )


def loss_of(trace: LoopProblem) -> ExampleLoss:
    """Return the user's loss function, or raise if the trace has none."""
    if trace.loss is None:
        raise Mistake(
            "effects=True: effects are derivatives of the loss, which is unknown; "
            "follow with loss=, a function of outputs and call that returns one loss "
            "for each example"
        )
    return trace.loss


def plan_of(
    trace: LoopProblem,
    tape: Tape,
    last: FollowedStep,
    budget: MemoryBudget,
    *,
    one_step: bool,
) -> SweepMemory:
    """Plan the memory of the sweep, assuming that all steps are like the last one."""
    rows = sum(len(call.names) for call in last.calls)
    weights = trace.steps.end.values()
    return SweepMemory(
        budget=budget,
        points=examples(trace.queries),
        outputs=tape.outputs.shape[1],
        parameters=sum(weight.numel() for weight in weights),
        train=len(trace.examples),
        rows=rows,
        single_rows=rows if one_step else 0,
        adjoints=max((1, *(adjoints(settings) for settings in last.settings.values()))),
        tape_bytes=tape.bytes_per_example,
        number_bytes=max(weight.element_size() for weight in weights),
    )


def adjoints(settings: Mapping[str, object]) -> int:
    """Return the size of an adjoint, in units of the number of weights: 1 for the
    weights, plus 1 for each optimizer state of a weight.

    >>> adjoints({"momentum": 0.0}), adjoints({"momentum": 0.9}), adjoints({"betas": (0.9, 0.99), "amsgrad": True})
    (1, 2, 4)
    """
    if "betas" in settings:
        return 4 if settings["amsgrad"] else 3
    return 2 if settings.get("momentum") else 1


def eps_of(step: FollowedStep) -> float | None:
    """Return the smallest ε of Adam's denominators, or None if no optimizer is an
    Adam."""
    used = [float(each["eps"]) for each in step.settings.values() if "betas" in each]
    return min(used, default=None)
