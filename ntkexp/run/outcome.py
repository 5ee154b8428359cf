"""The outcome of a run: the reason for its end, the comparison of kernel machines, the
changes by phase, error bars, and leave-out effects.

The *closing rule* is a quadrature rule whose contributions add up to the change of the
outputs in every step, such as the secant rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import hypot, isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.plan import Caveats
from ntkexp.effects.sweep import kind_of
from ntkexp.kernel import Closure
from ntkexp.machine.base import (
    DoesNotApply,
    PathKernel,
    Repeated,
    RunMatrices,
    Training,
)
from ntkexp.machine.ladder import MachineOutcome, Region, comparison_rows
from ntkexp.on_disk import blocks, summed
from ntkexp.optimizer.base import AbstractOptimizer, AbstractStable, Memory
from ntkexp.path.integrals import (
    ComponentSums,
    PhaseShare,
    StepTotals,
    Sums,
    phase_shares,
)
from ntkexp.path.step import Descent
from ntkexp.records.results import Result
from ntkexp.removal.rerun import RerunAt, rerun_of
from ntkexp.removal.retraining import (
    EffectsResult,
    RetrainingCheck,
    checked_effects,
    effects_retrained,
)
from ntkexp.run.setting import Setting, SweepSetting, measured_points
from ntkexp.run.state import EffectsPass, RunState
from ntkexp.shapes import Weights
from ntkexp.statistics import summary
from ntkexp.text import counted

# --- The reason why a run ends, and advice if it diverged.


BLOWN_UP = 1e6
"""A run has diverged if its loss is larger than this factor
times (initial loss + 1)."""


@dataclass(frozen=True)
class Ending:
    """The reason why a run ended, as a sentence."""

    sentence: str
    diverged: bool = False


def ending_before(
    setting: Setting, loss: float, first: float, step: int
) -> Ending | None:
    """Return the ending of the run if it ends before this step. Otherwise return None.

    `loss` is the loss before the step, and `first` the loss before training.
    """
    target = setting.experiment.stop_at_loss
    # `stop_at_loss` is compared with the loss before its division by α²
    raw = loss / setting.descent.scale
    if target is not None and raw <= target:
        note = (
            " (before the division by init.alpha²)"
            if setting.descent.scale != 1
            else ""
        )
        return Ending(f"{steps_in_words(step)}, to a loss of {raw:.3g}{note}")
    if isfinite(loss) and loss <= BLOWN_UP * (first + 1):
        return None
    sentence = step_size_advice(
        setting.experiment.optimizer,
        setting.descent.step_size,
        setting.start.largest_stable_step,
    )
    return Ending(f"diverged at step {step}{sentence}", diverged=True)


def steps_in_words(steps: int) -> str:
    """
    >>> steps_in_words(1), steps_in_words(2)
    ('trained for 1 step', 'trained for 2 steps')
    """
    return f"trained for {counted(steps, 'step')}"


def step_size_advice(optimizer: AbstractOptimizer, size: float, stable: float) -> str:
    """Return a sentence that suggests another step size, with the key that sets it.

    The suggestion is half the largest stable step size, or a tenth of the current step
    size if the current one is already stable.

    >>> from ntkexp.optimizer.descent import GD
    >>> for part in step_size_advice(GD(), 1.0, 2.0).split("; "):
    ...     print(part)
    : the step size 1 is 0.5 times the largest stable one at the start, 2
    try optimizer.stable_fraction=0.05
    >>> step_size_advice(GD(step_size=8), 8.0, 2.0).partition("; ")[2]
    'try optimizer.step_size=1'
    """
    if not isinstance(optimizer, AbstractStable):
        return f"; try optimizer.step_size={size / 10:.3g}"
    share = size / stable
    fraction = 0.5 if share > 1 else share / 10
    by_size = optimizer.step_size is not None
    key, value = (
        ("step_size", fraction * stable) if by_size else ("stable_fraction", fraction)
    )
    comparison = f"{share:.3g} times the largest stable one at the start, {stable:.3g}"
    return (
        f": the step size {size:.3g} is {comparison}; try optimizer.{key}={value:.3g}"
    )


# --- The training steps of the run, repeated for the linear model with a fixed kernel
# Θ = J Jᵀ.
#
# The gradient of the linear model is J(X)ᵀℓ′. So if all weights have the same step
# size, θ_s is a combination of θ_0 and the rows of J(X), with coordinates ρ and a:
#
#     θ_s = ρ_s θ_0 + J(X)ᵀ a_s
#
# Training needs only these coordinates. The optimizer updates a as a weight with the
# gradient ℓ′, and ρ as a weight with the gradient 0. So only weight decay changes ρ:
#
#     f_s(X) = f_0(X) + Θ(X, X) a_s + (ρ_s − 1) J(X)·θ_0


@dataclass(frozen=True, kw_only=True)
class SameSteps:
    """A repetition of a run's training with a fixed kernel, with the step sizes and
    clipping factors of the run."""

    descent: Descent
    step_sizes: Sequence[float]
    clippings: Sequence[float]

    def __call__(
        self,
        kernel: Float[Tensor, "row column"],
        start: Float[Tensor, "train out"],
        start_pull: Float[Tensor, "train out"],
    ) -> Repeated:
        """Return a and ρ after the last step with the kernel Θ.

        `start` is f_0(X), and `start_pull` is J(X)·θ_0.
        """
        optimizer = self.descent.optimizer
        if optimizer.elementwise:
            raise DoesNotApply(
                f"optimizer={optimizer.option} scales every weight by its own factor, which no "
                "frozen kernel describes"
            )
        if optimizer.layers:
            raise DoesNotApply(
                "the step size differs between layers, which no frozen kernel describes"
            )
        coordinates: Weights = {
            "examples": torch.zeros_like(start),
            "start": start.new_ones(()),
        }
        memory: Memory = {}

        def gradient(step: int, current: Weights) -> Weights:
            kernel_term = (kernel @ current["examples"].flatten()).view_as(start)
            outputs = start + kernel_term + (current["start"] - 1) * start_pull
            clipped = self.descent.output_gradient(step, outputs) * self.clippings[step]
            return {"examples": clipped, "start": start.new_zeros(())}

        for step, step_size in enumerate(self.step_sizes):
            sizes = dict.fromkeys(coordinates, step_size)
            field = partial(gradient, step)
            move = optimizer.move(
                step, coordinates, field(coordinates), field, sizes, memory
            )
            coordinates = move.weights
            memory = move.memory
        return Repeated(coordinates["examples"], coordinates["start"])


# --- The change of the outputs in each phase,
# and the contributions of the training examples to it.


@dataclass(frozen=True, kw_only=True)
class ChangesByPhase:
    """The change of the outputs in each phase, and the contributions to this change.

    Only outputs with path integrals are included. Phases that were not reached have
    zeros.
    """

    # contributions and decay of each phase, by quadrature rule
    shares: Mapping[str, Sequence[PhaseShare]]
    change: Float[Tensor, "phase point out"]


def changes_by_phase(
    state: RunState, outputs: Float[Tensor, "point out"]
) -> ChangesByPhase | None:
    """Return the changes by phase, or None if the data have no phases.

    `outputs` are the outputs after training.
    """
    count = len(state.setting.problem.data.phases)
    if not count:
        return None
    outs = state.setting.domain.integrated
    end = {
        rule: Sums(sums.contributions, sums.without_examples)
        for rule, sums in state.accumulator.integrals.items()
    }
    ends = [state.setting.start.outputs, *state.phase_outputs, outputs]
    ends += [outputs] * (count + 1 - len(ends))
    return ChangesByPhase(
        shares={
            rule: phase_shares(state.accumulator.phase_ends, end, rule, count)
            for rule in end
        },
        change=torch.stack([after - before for before, after in pairwise(ends)])[
            ..., list(outs)
        ],
    )


# --- The leave-out effects of a run, by backward passes, or by retraining without each
# example if that is cheaper.


UNCHECKED_FIXED_MEAN = (
    "effects of path.mean=fixed were not checked, as trainings without examples renormalise their "
    "means"
)


def effects_of(state: RunState) -> EffectsResult | None:
    """Return the leave-out effects, or None if they were not requested.

    The values at points without effects are NaN."""
    setting = state.setting
    sweep = setting.sweep
    if sweep is None or not (sweep.retrains or state.effects):
        return None
    rerun = rerun_of(
        setting.experiment, setting.problem, setting.descent.step_size, state.step
    )
    training = RerunAt(
        rerun=rerun,
        inputs=setting.problem.inputs[sweep.points],
        outs=setting.domain.integrated,
        end=rerun.flat.vector(state.weights),
    )
    queries = (sweep.points - setting.domain.summed_points.start).tolist()
    if state.effects is None:
        mean = setting.experiment.path.mean
        effects = effects_retrained(training, mean, queries, torch.float64)
    else:
        effects = effects_from_sweeps(state, state.effects, sweep, training, queries)
    shape = (len(setting.start.outputs), *effects.values.shape[1:])
    values = effects.values.new_full(shape, torch.nan)
    values[sweep.points] = effects.values
    return replace(effects, values=values)


def effects_from_sweeps(
    state: RunState,
    effects_pass: EffectsPass,
    sweep: SweepSetting,
    training: RerunAt,
    queries: Sequence[int],
) -> EffectsResult:
    """Return the effects from the backward passes.

    With `path.mean=renormalised`, compare the effects with retraining. Retraining
    without an example also takes the mean over the remaining examples."""
    path = state.setting.experiment.path
    formula = state.setting.experiment.optimizer.denominator_at(0)
    eps = None if formula is None else formula.eps
    renormalises = path.mean == "renormalised"
    check = None
    if renormalises and state.step > 0:
        check = RetrainingCheck(
            training=training, query=queries, singles=sweep.costs_more
        )
    return checked_effects(
        effects_pass.effects.double(),
        {"kind": kind_of(path.effects), "mean": path.mean},
        Caveats(growth=effects_pass.growth, kinks=sweep.kinks, eps=eps),
        check,
        unchecked="" if renormalises else UNCHECKED_FIXED_MEAN,
    )


# --- The outcome of a run: the comparison of kernel machines, and the errors of the
# contributions.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a run."""

    matrices: RunMatrices
    machines: list[MachineOutcome]
    results: list[Result]
    weights: Weights
    steps: int
    diverged: bool
    sentence: str
    effects: EffectsResult | None
    phases: ChangesByPhase | None
    # changes of the outputs by step, for each quadrature rule
    by_step: Mapping[str, StepTotals]
    # sums split by component, for each quadrature rule; empty without components
    by_component: Mapping[str, ComponentSums]


def outcome_of(
    state: RunState,
    outputs: Float[Tensor, "point out"],
    kernel: Float[Tensor, "point kept train kept_"],
    ending: Ending,
) -> Outcome:
    """Return the outcome, given the outputs and the tangent kernel after training."""
    matrices = run_matrices(state, outputs, kernel)
    effects = effects_of(state)
    machines = state.setting.experiment.ladder.predict_all(matrices)
    remarks = [*state.setting.remarks, *miss_remarks(state.misses)]
    if effects is not None:
        remarks += effects.caveats
    is_classification = bool(state.setting.problem.data.classes)
    return Outcome(
        matrices=matrices,
        machines=machines,
        results=comparison_rows(
            machines, split_regions(state), matrices, is_classification
        ),
        weights=state.weights,
        steps=state.step,
        diverged=ending.diverged,
        sentence="; ".join([ending.sentence, *remarks]),
        effects=effects,
        phases=changes_by_phase(state, outputs),
        by_step={rule: state.accumulator.by_step(rule) for rule in matrices.paths},
        by_component={
            rule: sums.by_component
            for rule, sums in state.accumulator.integrals.items()
            if sums.by_component is not None
        },
    )


def run_matrices(
    state: RunState,
    outputs: Float[Tensor, "point out"],
    kernel: Float[Tensor, "point kept train kept_"],
) -> RunMatrices:
    """Return the kernels, outputs and facts from which kernel machines are computed."""
    setting = state.setting
    points = torch.arange(len(outputs), device=outputs.device)
    attributed = torch.isin(points, setting.domain.attributed)
    return RunMatrices(
        inputs=setting.problem.inputs.flatten(1),
        train=setting.points.train,
        start=setting.start.outputs,
        end=outputs,
        targets=setting.descent.targets,
        paths=path_kernels(state),
        kernel_start=kernel_of_pairs(setting.start.kernel, setting),
        kernel_end=kernel_of_pairs(kernel, setting),
        initial_weight_term=initial_weight_term(setting),
        read=setting.domain.summed_points,
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
    """Return the kernel of all pairs of outputs.

    If the run computes no such kernels, return a kernel without training examples.
    """
    if setting.points.makes_kernels:
        return kernel
    points, outputs = setting.start.outputs.shape
    return kernel.new_zeros(points, outputs, 0, outputs)


def miss_remarks(steps: Mapping[int, Closure]) -> list[str]:
    """Return a remark on the `steps` at which the contributions of the closing rule do
    not add up to the change of the outputs. Return [] if there are no such steps.

    >>> (remark,) = miss_remarks({3: Closure(1e-3, 1e-9), 7: Closure(1e-2, 1e-9)})
    >>> remark.partition("; ")[0]
    'the secant misses 2 steps, most of all step 7: by 0.01 where rounding explains 1e-09'
    """
    if not steps:
        return []
    worst = max(steps, key=lambda step: steps[step].miss)
    remark = f"the secant misses step {worst}"
    if len(steps) > 1:
        remark = f"the secant misses {len(steps)} steps, most of all step {worst}"
    return [f"{remark}: {steps[worst].words}; try path.rule=[gauss]"]


def path_kernels(state: RunState) -> dict[str, PathKernel]:
    details = state.setting.experiment.integration.details
    kernels = {}
    for name, integrals in state.accumulator.integrals.items():
        kernel, contributions, decay = integrals.parts
        kernels[name] = PathKernel(
            kernel=kernel,
            contributions=contributions,
            decay=decay,
            rounding=integrals.rounding,
            detail=details[name],
            facts=contribution_facts(state, name),
            half_by=state.accumulator.half_by(name),
        )
    return kernels


def summarise_training(state: RunState) -> Training:
    setting = state.setting
    optimizer = setting.experiment.optimizer
    time = state.time
    # A sum over a mini-batch has a smaller weight than the sum over all examples.
    train = setting.points.train
    batch = optimizer.batch_indices(0, train, setting.experiment.seed)
    sums_batches = batch is not None and setting.experiment.loss.reduction == "sum"
    is_plain = not (
        sums_batches
        or optimizer.needs_backward_sum
        or optimizer.weight_decay
        or optimizer.clip_norm
        or optimizer.layers
        or setting.domain.switches
    )
    return Training(
        time=time,
        weight=setting.descent.weight(train) * setting.experiment.loss.curvature,
        is_quadratic=setting.experiment.loss.is_quadratic,
        is_plain=is_plain,
        is_flow=optimizer.flows,
        mean_coefficients=None
        if optimizer.needs_backward_sum
        else -state.summed_gradient / time,
        repeat=SameSteps(
            descent=setting.descent,
            step_sizes=tuple(state.step_sizes),
            clippings=tuple(state.clippings),
        ),
    )


def initial_weight_term(setting: Setting) -> Float[Tensor, "point out"]:
    """Return J(θ_0)·θ_0 at all points. Kernel machines need this term only if there is
    weight decay. Without weight decay, return zeros."""
    if not setting.experiment.optimizer.weight_decay:
        return torch.zeros_like(setting.start.outputs)
    points = setting.points
    weights = setting.problem.weights
    tapes = (
        points.tape(weights, block)
        for block in points.train_blocks + points.other_blocks
    )
    return torch.cat([points.reader.tangent(tape).applied(weights) for tape in tapes])


def split_regions(state: RunState) -> dict[str, Region]:
    """Return a region for each split: its points, and the sizes of the terms that add
    up to their outputs. Rounding errors are estimated from these sizes."""
    problem = state.setting.problem
    regions = {}
    for name, points in problem.split_slices.items():
        norms = [
            problem.module.term_norms(weights, problem.inputs[points])
            for weights in (problem.weights, state.weights)
        ]
        regions[name] = Region(points, torch.cat(norms))
    return regions


def contribution_facts(state: RunState, rule: str) -> dict[str, float]:
    """Return summary statistics of a quadrature rule's contributions, with an estimate
    of the relative error of the contributions.

    Return an empty dict if the kernel or the contributions are not finite.
    """
    setting = state.setting
    domain = setting.domain
    optimizer = setting.experiment.optimizer
    # select the attributed rows; if these are all rows, avoid the copy
    kernel, contributions, decay = (
        part if len(domain.rows) == len(part) else part[domain.rows]
        for part in state.accumulator.integrals[rule].parts
    )
    if not kernel.isfinite().all():
        return {}
    if not all(block.isfinite().all() for block in blocks(contributions)):
        return {}

    # True if all training examples are attributed, and no measure is explained
    train = setting.points.train
    read_train = int((domain.attributed < train).sum())
    every_train = setting.measured is None and read_train == train
    facts = summary(kernel, contributions, train if every_train else 0)
    if optimizer.weight_decay:
        facts["decay_share"] = float(
            decay.norm() / (summed(contributions) + decay).norm()
        )
    error = state.accumulator.error(rule, state.step)
    if error is not None:
        facts["error_bar"] = relative_error(error.parts, contributions)
        if error.sums is not None:
            facts["sum_error_bar"] = relative_error(
                error.sums, summed(contributions) + decay
            )
    return facts | setting.experiment.integration.facts(state.memory)


def relative_error(error: float, estimated: Tensor) -> float:
    size = hypot(*(float(block.norm()) for block in blocks(estimated)))
    return error / size if size else float("nan")
