"""What came of a run: what kernel machines make of it, and how well its parts are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.diagnostics.contributions import summary
from ntkexp.kernel.secant.closure import Closure
from ntkexp.machine.evidence import Evidence, PathKernel
from ntkexp.machine.ladder import Region, Rung
from ntkexp.machine.training import Training
from ntkexp.on_disk import blocks, summed
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.run.effects_found import EffectsFound
from ntkexp.run.effects_swept import effects_swept
from ntkexp.run.effects_trained import effects_trained
from ntkexp.run.ending import Ending
from ntkexp.run.phases_found import PhasesFound, phases_found
from ntkexp.run.same_steps import SameSteps
from ntkexp.run.setting import Setting
from ntkexp.run.state import RunState
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    evidence: Evidence
    regions: Mapping[str, Region]
    rungs: list[Rung]
    weights: Weights
    steps: int
    diverged: bool
    sentence: str
    effects: EffectsFound | None
    phases: PhasesFound | None
    by_step: Mapping[str, StepTotals]  # by rule


def outcome_of(
    state: RunState,
    outputs: Float[Tensor, "point out"],
    kernel: Float[Tensor, "point kept train kept_"],
    ending: Ending,
) -> Outcome:
    """The outcome, from the outputs and the tangent kernel at the end of training."""
    evidence = evidence_of(state, outputs, kernel)
    effects = effects_of(state)
    remarks = [*state.setting.remarks, *miss_remarks(state.misses), *(effects.caveats if effects else [])]
    return Outcome(
        evidence=evidence,
        regions=regions(state),
        rungs=state.setting.experiment.ladder.climb(evidence),
        weights=state.weights,
        steps=state.step,
        diverged=ending.diverged,
        sentence="; ".join([ending.sentence, *remarks]),
        effects=effects,
        phases=phases_found(state, outputs),
        by_step={rule: state.accumulator.by_step(rule) for rule in evidence.paths},
    )


def effects_of(state: RunState) -> EffectsFound | None:
    """The effects, if they were asked for."""
    asked = state.setting.sweep
    if asked is not None and asked.retrains:
        return effects_trained(state, asked)
    return None if state.effects is None else effects_swept(state, state.effects)


def evidence_of(
    state: RunState, outputs: Float[Tensor, "point out"], kernel: Float[Tensor, "point kept train kept_"]
) -> Evidence:
    """What machines are made of."""
    setting = state.setting
    attributed = torch.isin(torch.arange(len(outputs), device=outputs.device), setting.domain.attributed)
    return Evidence(
        inputs=setting.problem.inputs.flatten(1),
        train=setting.points.train,
        start=setting.start.outputs,
        end=outputs,
        targets=setting.descent.targets,
        paths=path_kernels(state),
        kernel_start=of_pairs(setting.start.kernel, setting),
        kernel_end=of_pairs(kernel, setting),
        start_pull=start_pull(setting),
        read=setting.domain.read,
        integrated=setting.domain.integrated,
        attributed=attributed,
        limit=setting.start.limit,
        training=training(state),
    )


def of_pairs(kernel: Float[Tensor, "point kept train kept_"], setting: Setting) -> Float[Tensor, "point out some out_"]:
    """The kernel, if it is one for every pair of outputs, as machines need it; else one without training examples."""
    if setting.points.makes_kernels:
        return kernel
    points, outputs = setting.start.outputs.shape
    return kernel.new_zeros(points, outputs, 0, outputs)


def miss_remarks(steps: Mapping[int, Closure]) -> list[str]:
    """A word about steps whose secant misses the change of the network by more than rounding explains.

    >>> miss_remarks({3: Closure(1e-3, 1e-9), 7: Closure(1e-2, 1e-9)})
    ['the secant misses 2 steps, most of all step 7: by 0.01 where rounding explains 1e-09; try path.rule=[gauss]']
    """
    if not steps:
        return []
    worst = max(steps, key=lambda step: steps[step].miss)
    missed = (
        f"the secant misses {len(steps)} steps, most of all step {worst}"
        if len(steps) > 1
        else f"the secant misses step {worst}"
    )
    return [f"{missed}: {steps[worst].words}; try path.rule=[gauss]"]


def path_kernels(state: RunState) -> dict[str, PathKernel]:
    """The integrals, named by their rules."""
    details, accumulator = state.setting.experiment.integration.details, state.accumulator
    found = {}
    for name, integrals in accumulator.integrals.items():
        kernel, contributions, decay = integrals.parts
        found[name] = PathKernel(
            kernel=kernel,
            contributions=contributions,
            decay=decay,
            detail=details[name],
            facts=facts(state, name),
            half_by=accumulator.half_by(name),
        )
    return found


def training(state: RunState) -> Training:
    """How training went."""
    setting, optimizer = state.setting, state.setting.experiment.optimizer
    time = state.time
    return Training(
        time=time,
        weight=setting.descent.weight * setting.experiment.loss.curvature,
        is_quadratic=setting.experiment.loss.is_quadratic,
        is_plain=not (
            optimizer.remembers
            or optimizer.weight_decay
            or optimizer.clip_norm
            or optimizer.layers
            or setting.domain.switches
        ),
        is_flow=optimizer.flows,
        mean_coefficients=None if optimizer.remembers else -state.summed_gradient / time,
        repeat=SameSteps(descent=setting.descent, step_sizes=tuple(state.step_sizes), clippings=tuple(state.clippings)),
    )


def start_pull(setting: Setting) -> Float[Tensor, "point out"]:
    """J(θ_0)·θ_0 at all points, where weights decay; zeros where nobody asks."""
    if not setting.experiment.optimizer.weight_decay:
        return torch.zeros_like(setting.start.outputs)
    points, weights = setting.points, setting.problem.weights
    tapes = (points.tape(weights, block) for block in points.train_blocks + points.other_blocks)
    return torch.cat([points.reader.tangent(tape).applied(weights) for tape in tapes])


def regions(state: RunState) -> dict[str, Region]:
    """Where each split lies, and the size of what rounds there."""
    problem, found = state.setting.problem, {}
    for name, place in problem.places.items():
        norms = [problem.module.sizes(weights, problem.inputs[place]) for weights in (problem.weights, state.weights)]
        found[name] = Region(place, torch.cat(norms))
    return found


def facts(state: RunState, rule: str) -> dict[str, float]:
    """What can be said of the contributions by a rule, with their error relative to ‖𝒮‖ where that is known.

    Of those by sketches nothing is said but their sum: how far parts exceed it would be off by as much as the parts.
    """
    setting, integrals = state.setting, state.accumulator.integrals[rule]
    read, train = setting.domain.attributed, setting.points.train
    kernel, contributions, decay = (at(setting.domain.rows, part) for part in integrals.parts)
    if not (kernel.isfinite().all() and all(block.isfinite().all() for block in blocks(contributions))):
        return {}
    found = {} if setting.points.sketch else summary(kernel, contributions, train if every_train(read, train) else 0)
    if setting.experiment.optimizer.weight_decay:
        found["decay_share"] = float(decay.norm() / (summed(contributions) + decay).norm())
    error = state.accumulator.error(rule, state.step)
    if error is not None and setting.points.sketch is None:  # which would be off by more than what it measures
        found["error_bar"] = relative(error.parts, contributions)
        if error.sums is not None:
            found["sum_error_bar"] = relative(error.sums, summed(contributions) + decay)
    return found | setting.experiment.integration.facts(state.memory)


def every_train(read: Int[Tensor, " read"], train: int) -> bool:
    """Whether all training examples are among the points that were read."""
    return int((read < train).sum()) == train


def at(rows: Int[Tensor, " row"], part: Tensor) -> Tensor:
    """Some rows of a tensor; itself, if these are all."""
    return part if len(rows) == len(part) else part[rows]


def relative(error: float, whole: Tensor) -> float:
    """An error relative to the norm of what it is the error of."""
    size = hypot(*(float(block.norm()) for block in blocks(whole)))
    return error / size if size else float("nan")
