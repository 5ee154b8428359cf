"""What came of a run: why it ended, what kernel machines make of it, phase by phase, how well its parts are known,
and its effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import hypot, isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics import summary
from ntkexp.effects.plan import Caveats
from ntkexp.kernel.secant.segment import Closure
from ntkexp.machine.base import DoesNotApply, Evidence, PathKernel, Repeated, Training
from ntkexp.machine.ladder import Region, Rung, ladder_rows
from ntkexp.on_disk import blocks, summed
from ntkexp.optimizer.base import AbstractOptimizer, AbstractStable, Memory
from ntkexp.path.integrals import ComponentSums, Share, StepTotals, Sums, by_phase
from ntkexp.path.step import Descent
from ntkexp.records.results import Result
from ntkexp.removal.rerun import RerunAt, again
from ntkexp.removal.retraining import EffectsFound, effects_retrained, effects_swept
from ntkexp.run.setting import Setting, measured_points
from ntkexp.run.state import RunState
from ntkexp.shapes import Weights
from ntkexp.text import counted

# --- Why a run ends, and what to try where it diverged.


BLOWN_UP = 1e6  # times the first loss: far beyond what a run that converges passes through


@dataclass(frozen=True)
class Ending:
    """The reason in words, and whether it is that the run diverged."""

    sentence: str
    diverged: bool = False


def ending_before(setting: Setting, loss: float, first: float, step: int) -> Ending | None:
    """Why the run ends before this step, if it does."""
    target = setting.experiment.stop_at_loss
    raw = loss / setting.descent.scale  # `stop_at_loss` means the loss that is not divided by α²
    if target is not None and raw <= target:
        note = " (before the division by init.alpha²)" if setting.descent.scale != 1 else ""
        return Ending(f"{steps_in_words(step)}, to a loss of {raw:.3g}{note}")
    if isfinite(loss) and loss <= BLOWN_UP * (first + 1):
        return None
    sentence = step_size_advice(
        setting.experiment.optimizer, setting.descent.step_size, setting.start.largest_stable_step
    )
    return Ending(f"diverged at step {step}{sentence}", diverged=True)


def steps_in_words(steps: int) -> str:
    """A number of steps in words.

    >>> steps_in_words(1), steps_in_words(2)
    ('trained for 1 step', 'trained for 2 steps')
    """
    return f"trained for {counted(steps, 'step')}"


def step_size_advice(optimizer: AbstractOptimizer, size: float, stable: float) -> str:
    """What to try instead of the step size that was set, in the key that set it: a size that is stable at the start,
    or, if this one was, a tenth of it.

    >>> from ntkexp.optimizer.descent import GD
    >>> step_size_advice(GD(), 1.0, 2.0)
    ': the step size 1 is 0.5 times the largest stable one at the start, 2; try optimizer.stable_fraction=0.05'
    >>> step_size_advice(GD(step_size=8), 8.0, 2.0).partition("; ")[2]
    'try optimizer.step_size=1'
    """
    if not isinstance(optimizer, AbstractStable):
        return f"; try optimizer.step_size={size / 10:.3g}"
    share = size / stable
    calmer = 0.5 if share > 1 else share / 10
    by_size = optimizer.step_size is not None
    key, value = ("step_size", calmer * stable) if by_size else ("stable_fraction", calmer)
    sentence = f"the step size {size:.3g} is {share:.3g} times the largest stable one at the start, {stable:.3g}"
    return f": {sentence}; try optimizer.{key}={value:.3g}"


# --- The steps that training took, taken once more in function space with a fixed kernel Θ.
#
# An optimizer that scales all weights alike keeps a linear model at θ_s = ρ_s θ_0 + J(X)ᵀ a_s, where ρ and a move
# as weights do whose gradients are 0 and ℓ′:
#
#     f_s(X) = f_0(X) + Θ(X, X) a_s + (ρ_s − 1) J(X)·θ_0


@dataclass(frozen=True, kw_only=True)
class SameSteps:
    """A descent, with the size of each of its steps and the factor by which its gradient was shortened."""

    descent: Descent
    step_sizes: Sequence[float]
    clippings: Sequence[float]

    def __call__(
        self,
        kernel: Float[Tensor, "row column"],
        start: Float[Tensor, "train out"],
        pull: Float[Tensor, "train out"],
    ) -> Repeated:
        """Where they lead with this kernel."""
        optimizer = self.descent.optimizer
        # a kernel knows of steps that scale all weights alike
        if optimizer.elementwise:
            raise DoesNotApply(
                f"optimizer={optimizer.option} scales every weight by its own factor, which no frozen kernel describes"
            )
        if optimizer.layers:
            raise DoesNotApply(
                "the step size differs between layers, which no frozen kernel describes"
            )
        coordinates: Weights = {"examples": torch.zeros_like(start), "start": start.new_ones(())}
        memory: Memory = {}

        def gradient(step: int, here: Weights) -> Weights:
            learned = (kernel @ here["examples"].flatten()).view_as(start)
            outputs = start + learned + (here["start"] - 1) * pull
            shortened = (
                self.descent.output_gradient(step, outputs) * self.clippings[step]
            )  # as its gradient was
            return {"examples": shortened, "start": start.new_zeros(())}

        for step, step_size in enumerate(self.step_sizes):
            sizes, field = dict.fromkeys(coordinates, step_size), partial(gradient, step)
            move = optimizer.move(step, coordinates, field(coordinates), field, sizes, memory)
            coordinates, memory = move.weights, move.memory
        return Repeated(coordinates["examples"], coordinates["start"])


# --- What happened in each phase of a run: how the outputs changed, and what each training example added to that.


@dataclass(frozen=True, kw_only=True)
class ChangesByPhase:
    """Every phase has the outputs at which the path was integrated; one that was not reached changed nothing."""

    shares: Mapping[str, Sequence[Share]]  # by rule, one for each phase
    change: Float[Tensor, "phase point out"]


def changes_by_phase(state: RunState, outputs: Float[Tensor, "point out"]) -> ChangesByPhase | None:
    """What happened until the outputs are these, if the data come in phases."""
    count = len(state.setting.problem.data.phases)
    if not count:
        return None
    outs = state.setting.domain.integrated
    end = {
        rule: Sums(sums.contributions, sums.without_examples)
        for rule, sums in state.accumulator.integrals.items()
    }
    ends = [state.setting.start.outputs, *state.turns, outputs]
    ends += [outputs] * (count + 1 - len(ends))
    return ChangesByPhase(
        shares={rule: by_phase(state.accumulator.marks, end, rule, count) for rule in end},
        change=torch.stack([after - before for before, after in pairwise(ends)])[..., list(outs)],
    )


# --- The effects of a run: as sweeps back have found them, or as trainings without each example, where these cost less.


UNCHECKED = "effects of path.mean=fixed were not checked, as trainings without examples renormalise their means"


def effects_of(state: RunState) -> EffectsFound | None:
    """The effects at the points that were asked about, if they were asked for."""
    setting, swept = state.setting, state.effects
    sweep, path = setting.sweep, setting.experiment.path
    if sweep is None or not (sweep.retrains or swept):
        return None
    rerun = again(setting.experiment, setting.problem, setting.descent.step_size, state.step)
    inputs, end = setting.problem.inputs[sweep.points], rerun.flat.vector(state.weights)
    training = RerunAt(rerun, inputs, setting.domain.integrated, end)
    probe = (sweep.points - setting.domain.read.start).tolist()
    if swept is None:
        found = effects_retrained(training, path.mean, probe, torch.float64)
    else:
        divisor = setting.experiment.optimizer.spread_at(0)
        comparable = state.step > 0 and path.mean == "renormalised"  # as trainings again are
        found = effects_swept(
            swept.effects.double(),
            path.effects,
            path.mean,
            Caveats(
                growth=swept.growth, kinks=sweep.kinks, eps=None if divisor is None else divisor.eps
            ),
            training if comparable else None,
            probe,
            everyone=sweep.costs_more,
            unchecked="" if path.mean == "renormalised" else UNCHECKED,
        )
    values = found.values.new_full((len(setting.start.outputs), *found.values.shape[1:]), torch.nan)
    values[sweep.points] = found.values
    return replace(found, values=values)


# --- What came of a run: what kernel machines make of it, and how well its parts are known.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    evidence: Evidence
    rungs: list[Rung]
    ladder: list[Result]
    weights: Weights
    steps: int
    diverged: bool
    sentence: str
    effects: EffectsFound | None
    phases: ChangesByPhase | None
    by_step: Mapping[str, StepTotals]  # by rule
    by_component: Mapping[str, ComponentSums]  # by rule, where components were told apart


def outcome_of(
    state: RunState,
    outputs: Float[Tensor, "point out"],
    kernel: Float[Tensor, "point kept train kept_"],
    ending: Ending,
) -> Outcome:
    """The outcome, from the outputs and the tangent kernel at the end of training."""
    evidence = evidence_of(state, outputs, kernel)
    effects = effects_of(state)
    rungs = state.setting.experiment.ladder.climb(evidence)
    remarks = [
        *state.setting.remarks,
        *miss_remarks(state.misses),
        *(effects.caveats if effects else []),
    ]
    return Outcome(
        evidence=evidence,
        rungs=rungs,
        ladder=ladder_rows(
            rungs, split_regions(state), evidence, bool(state.setting.problem.data.classes)
        ),
        weights=state.weights,
        steps=state.step,
        diverged=ending.diverged,
        sentence="; ".join([ending.sentence, *remarks]),
        effects=effects,
        phases=changes_by_phase(state, outputs),
        by_step={rule: state.accumulator.by_step(rule) for rule in evidence.paths},
        by_component={
            rule: found.by_component
            for rule, found in state.accumulator.integrals.items()
            if found.by_component is not None
        },
    )


def evidence_of(
    state: RunState,
    outputs: Float[Tensor, "point out"],
    kernel: Float[Tensor, "point kept train kept_"],
) -> Evidence:
    """What machines are made of."""
    setting = state.setting
    attributed = torch.isin(
        torch.arange(len(outputs), device=outputs.device), setting.domain.attributed
    )
    return Evidence(
        inputs=setting.problem.inputs.flatten(1),
        train=setting.points.train,
        start=setting.start.outputs,
        end=outputs,
        targets=setting.descent.targets,
        paths=path_kernels(state),
        kernel_start=kernel_of_pairs(setting.start.kernel, setting),
        kernel_end=kernel_of_pairs(kernel, setting),
        start_pull=start_pull(setting),
        read=setting.domain.read,
        integrated=setting.domain.integrated,
        attributed=attributed,
        limit=setting.start.limit,
        training=summarise_training(state),
        seed=setting.experiment.seed,
        measured=setting.measured,
        measure=partial(measured_points, setting.experiment.loss, setting.problem),
    )


def kernel_of_pairs(
    kernel: Float[Tensor, "point kept train kept_"], setting: Setting
) -> Float[Tensor, "point out some out_"]:
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
    details, accumulator = state.setting.experiment.integration.details, state.accumulator
    found = {}
    for name, integrals in accumulator.integrals.items():
        kernel, contributions, decay = integrals.parts
        found[name] = PathKernel(
            kernel=kernel,
            contributions=contributions,
            decay=decay,
            rounding=integrals.rounding,
            detail=details[name],
            facts=contribution_facts(state, name),
            half_by=accumulator.half_by(name),
        )
    return found


def summarise_training(state: RunState) -> Training:
    setting, optimizer = state.setting, state.setting.experiment.optimizer
    time = state.time
    return Training(
        time=time,
        weight=setting.descent.weight(setting.points.train) * setting.experiment.loss.curvature,
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
        repeat=SameSteps(
            descent=setting.descent,
            step_sizes=tuple(state.step_sizes),
            clippings=tuple(state.clippings),
        ),
    )


def start_pull(setting: Setting) -> Float[Tensor, "point out"]:
    """J(θ_0)·θ_0 at all points where weights decay; zeros elsewhere."""
    if not setting.experiment.optimizer.weight_decay:
        return torch.zeros_like(setting.start.outputs)
    points, weights = setting.points, setting.problem.weights
    tapes = (points.tape(weights, block) for block in points.train_blocks + points.other_blocks)
    return torch.cat([points.reader.tangent(tape).applied(weights) for tape in tapes])


def split_regions(state: RunState) -> dict[str, Region]:
    """Where each split lies, and the size of what rounds there."""
    problem, regions_of_splits = state.setting.problem, {}
    for name, points in problem.places.items():
        norms = [
            problem.module.sizes(weights, problem.inputs[points])
            for weights in (problem.weights, state.weights)
        ]
        regions_of_splits[name] = Region(points, torch.cat(norms))
    return regions_of_splits


def contribution_facts(state: RunState, rule: str) -> dict[str, float]:
    """What can be said of the contributions by a rule, with their error relative to ‖𝒮‖ where that is known."""
    setting, integrals = state.setting, state.accumulator.integrals[rule]
    read, train = setting.domain.attributed, setting.points.train
    rows = setting.domain.rows
    (
        kernel,
        contributions,
        decay,
    ) = (  # the attributed rows of each; the tensor itself, if these are all
        part if len(rows) == len(part) else part[rows] for part in integrals.parts
    )
    if not (
        kernel.isfinite().all() and all(block.isfinite().all() for block in blocks(contributions))
    ):
        return {}
    # whether all training examples were read, at outputs as they are learned by
    every_train = setting.measured is None and int((read < train).sum()) == train
    found = summary(kernel, contributions, train if every_train else 0)
    if setting.experiment.optimizer.weight_decay:
        found["decay_share"] = float(decay.norm() / (summed(contributions) + decay).norm())
    error = state.accumulator.error(rule, state.step)
    if error is not None:
        found["error_bar"] = relative_error(error.parts, contributions)
        if error.sums is not None:
            found["sum_error_bar"] = relative_error(error.sums, summed(contributions) + decay)
    return found | setting.experiment.integration.facts(state.memory)


def relative_error(error: float, whole: Tensor) -> float:
    """An error relative to the norm of what it is the error of."""
    size = hypot(*(float(block.norm()) for block in blocks(whole)))
    return error / size if size else float("nan")
