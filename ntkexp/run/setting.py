"""Prepare an experiment: draw data and initial weights, plan memory,
and choose the step size.

Runs that need too much memory or time are rejected here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.plan import SweepMemory
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem, limit_kernels
from ntkexp.kernel import ProgramCache, Reader, Tape
from ntkexp.kernel.read.plan import work
from ntkexp.kernel.record.casts import remark, with_casts
from ntkexp.kernel.secant.segment import point
from ntkexp.machine.base import DoesNotApply, LimitKernels
from ntkexp.measure import AbstractMeasure, MeasuredPoints, Objective
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.path.budget import RunMemory, core_seconds, refuse_endless
from ntkexp.path.components import Components, components_of
from ntkexp.path.domain import Domain
from ntkexp.path.integrals import Rounding
from ntkexp.path.integration import fair_counts
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.settings import Kernels
from ntkexp.path.step import Descent, Phase, phases_of
from ntkexp.statistics import kinks, largest_kernel_eigenvalue
from ntkexp.text import counted

# --- Checks before anything is computed.


def refuse_sketch(experiment: Experiment) -> None:
    """Raise if sketched kernels are requested,
    which are available only in kernel files."""
    size = experiment.kernel.sketch
    if size is not None:
        raise Mistake(
            f"kernel.sketch={size}: kernels along a path are exact; for large networks use "
            "path.kernels=none or trace, or sketch one kernel by ntkexp kernel tangent "
            f"kernel.sketch={size}"
        )


# --- A survey: a forward pass on two examples. The shapes of its tensors determine the
# memory of the run, and the sizes of blocks.


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A problem (data and network), its memory plan, and the tape of a forward pass on
    two examples. `points` are cut into blocks that fit into memory."""

    # the experiment, with `all` or `trace` in place of `path.kernels=auto`
    experiment: Experiment
    chose_traces: bool  # True if `trace` has replaced `path.kernels=auto`
    problem: Problem
    points: Points
    # like `points`, but with the explained measure instead of the outputs
    explained: Points
    measured: MeasuredPoints | None
    memory: RunMemory
    tape: Tape  # recorded forward pass of the outputs, on two examples
    # recorded forward pass of the explained measure, on two examples
    explained_tape: Tape

    @property
    def operations(self) -> float:
        """The approximate number of operations to compute the kernel
        of all points once."""
        pair = (len(self.points.inputs), self.points.train)
        return work(self.tape).of_kernel(pair, self.problem.outputs)


def refuse_other_outputs(
    experiment: Experiment, problem: Problem, shape: list[int]
) -> None:
    """Raise if the outputs of the network for two examples have an unexpected shape."""
    expected = [len(problem.inputs[:2]), problem.outputs]
    if shape != expected:
        raise Mistake(
            f"model={experiment.model.option}: the network returns outputs of shape {shape} "
            f"for {expected[0]} examples, but data and loss need {expected}; let it return "
            f"{counted(problem.outputs, 'output')} for each example"
        )


def survey(experiment: Experiment) -> Survey:
    """Draw data and initial weights, and record a forward pass on two examples.

    Raise if the run needs more memory than its budget."""
    refuse_sketch(experiment)
    least_memory(experiment).require()
    problem = draw_problem(experiment)
    kernels = chosen_kernels(experiment, problem)
    chose_traces = kernels == "trace" != experiment.path.kernels
    path = experiment.path.model_copy(update={"kernels": kernels})
    experiment = experiment.model_copy(update={"path": path})
    refuse_unlike_loss(experiment, problem)

    # record the forward pass of the network on two examples
    function = with_casts(function_of(problem.module), experiment.path.casts)
    reader = Reader(function, point(problem.weights).trained, programs=ProgramCache())
    tape = reader.record(problem.weights, problem.inputs[:2])
    tape_bytes = tape.bytes_per_example
    refuse_other_outputs(experiment, problem, list(tape.outputs.shape))

    # record the explained measure on the same examples
    measured = explained_measure(experiment, problem)
    explained_reader = reader
    explained_tape = tape
    if measured is not None:
        explained_function = measured.measured.of(function)
        explained_reader = Reader(
            explained_function, reader.trained, programs=ProgramCache()
        )
        examples = (problem.inputs[:2], problem.targets[:2])
        explained_tape = explained_reader.record(problem.weights, examples)
        tape_bytes += explained_tape.bytes_per_example

    # cut the points into blocks that fit into memory
    memory = memory_of_run(experiment, problem, tape_bytes)
    outputs = experiment.path.chosen_outputs(problem.outputs)
    chooses_outputs = measured is None and len(outputs) < problem.outputs
    points = Points(
        reader=reader,
        inputs=problem.inputs,
        train=problem.train,
        block=memory.block,
        keeps_tapes=memory.keeps_tapes,
        chosen=outputs if chooses_outputs else None,
        kernels=kernels,
    )
    explained = points
    if measured is not None:
        explained = replace(
            points, reader=explained_reader, targets=problem.targets, cache=[]
        )
    return Survey(
        experiment=experiment,
        chose_traces=chose_traces,
        problem=problem,
        points=points,
        explained=explained,
        measured=measured,
        memory=memory,
        tape=tape,
        explained_tape=explained_tape,
    )


def refuse_unlike_loss(experiment: Experiment, problem: Problem) -> None:
    """Raise if the derivatives of the loss are wrong at the targets, or if the loss
    does not fit the classes."""
    loss = experiment.loss
    loss.refuse_unlike_differences(problem.targets)
    if len(problem.data.classes) > 1:
        loss.refuse_other_classes(len(problem.data.classes))
    if experiment.path.effects:
        loss.refuse_unlike_second_differences(problem.targets)


def chosen_kernels(experiment: Experiment, problem: Problem) -> Kernels:
    """Return the kind of kernels that the run computes.

    `path.kernels=auto` means `all` if these kernels are small, or if the optimizer, a
    diagnostic or `path.every=snapshots` needs them. Otherwise it means `trace`."""
    diagnostics_need_all = any(one.needs_kernel for one in experiment.diagnostics)
    needs_all = experiment.optimizer.needs_kernels or diagnostics_need_all
    return experiment.path.chosen_kernels(
        problem.train, problem.outputs, needs_all=needs_all
    )


def explained_measure(
    experiment: Experiment, problem: Problem
) -> MeasuredPoints | None:
    """Return `measured_points` of the measure `path.measure`."""
    measure = experiment.path.measure
    try:
        return measured_points(experiment.loss, problem, measure)
    except Mistake as mistake:
        raise Mistake(f"path.measure={measure.option}: {mistake}") from None


def measured_points(
    loss: Objective, problem: Problem, measure: AbstractMeasure
) -> MeasuredPoints | None:
    """Return the explained measure, with the targets of all points. Return None if the
    run explains the outputs themselves.

    Raise if the measure is not defined for the loss.
    """
    measured = measure.of_run(loss, problem.targets, len(problem.data.classes))
    return None if measured is None else MeasuredPoints(measured, problem.targets)


def least_memory(experiment: Experiment) -> RunMemory:
    """Return a lower bound of a run's memory: the plan of a run with one weight and one
    output.

    It depends only on the numbers of examples and on the settings.
    """
    source = experiment.data
    costs = experiment.integration.costs
    kernels = experiment.path.chosen_kernels(source.train, outputs=1)
    counts = {"train": source.train, "query": source.query, "test": source.test or 0}
    read = sum(counts[name] for name in experiment.path.queries)
    return RunMemory(
        budget=experiment.budget,
        parameters=1,
        points=read if "train" in experiment.path.queries else counts["train"] + read,
        summed_points=read,
        train=counts["train"],
        outputs=1,
        integrated=1,
        rules=costs.rules,
        tangents=experiment.path.tangents,
        path_kernels=costs.kernels,
        errors=costs.errors,
        tapes=costs.tapes,
        tape_bytes=0.0,
        number_bytes=getattr(torch, experiment.dtype).itemsize,
        copies=experiment.optimizer.copies,
        kernels=kernels,
        steps=experiment.steps,
        phases=len(experiment.switches) + 1,
        doubled=costs.doubled,
        disk=experiment.device == "cpu",
        records_weights="weights" in experiment.path.record,
    )


def memory_of_run(
    experiment: Experiment, problem: Problem, tape_bytes: float
) -> RunMemory:
    """Return the memory plan of a run. A tape of one point takes `tape_bytes`."""
    return replace(
        least_memory(experiment),
        parameters=sum(weight.numel() for weight in problem.weights.values()),
        points=len(problem.inputs),
        summed_points=sum(
            split.stop - split.start for split in problem.split_slices.values()
        ),
        train=problem.train,
        outputs=problem.outputs,
        integrated=len(experiment.path.chosen_outputs(problem.outputs)),
        tape_bytes=tape_bytes,
        components=len(components_of_run(experiment, problem)),
    )


def components_of_run(experiment: Experiment, problem: Problem) -> Components:
    """Return the components into which contributions are split, or an empty dict."""
    by = experiment.path.by
    if by is None:
        return {}
    trained = point(problem.weights).trained
    return components_of(
        by, [name for name in problem.weights if name in trained], "path.by"
    )


# --- The leave-out effects. They are computed at the first points of each split, at no
# more than `path.attributed` points in total.


RETRAININGS = 2
"""The minimum cost of a backward pass through training for one output, in
retrainings."""


@dataclass(frozen=True, kw_only=True)
class SweepSetting:
    """The points at which leave-out effects are computed, and the plan of the backward
    passes (`effects.sweep`)."""

    points: Int[Tensor, " attributed"]
    plan: SweepMemory
    kinks: tuple[str, ...]  # operations that are not differentiable everywhere
    # True: retrain without each example, instead of a backward pass
    retrains: bool = False
    # True if the derivative of the optimizer's update is known
    differentiated: bool = True

    @property
    def costs_more(self) -> bool:
        """True if the backward passes are estimated to take longer than retraining
        without each example."""
        return self.plan.train <= RETRAININGS * self.plan.points * self.plan.outputs

    @property
    def remark(self) -> str:
        """The reason for retraining instead of a backward pass, or an empty text."""
        if not self.retrains:
            return ""
        return self.plan.retraining_remark(has_sweep=self.differentiated)


def sweep_setting(experiment: Experiment, survey: Survey) -> SweepSetting:
    """Return the plan of the leave-out effects: backward passes, or retraining if that
    is cheaper and the settings `path` allow it.

    Raise if neither is possible.
    """
    optimizer = experiment.optimizer
    path = experiment.path
    memory = survey.memory
    train = survey.problem.train
    splits = list(survey.problem.split_slices.values())
    sizes = [split.stop - split.start for split in splits]
    points = first_points(splits, fair_counts(path.attributed, sizes))

    # estimate the cost of a backward pass
    batch = optimizer.batch_indices(0, train, experiment.seed)
    rows = train if batch is None else len(batch)
    plan = SweepMemory(
        budget=experiment.budget.holding(memory.fixed),
        points=len(points),
        outputs=memory.integrated,
        parameters=memory.parameters,
        train=train,
        rows=rows,
        single_rows=rows if path.effects == "one_step" else 0,
        adjoints=1 + optimizer.needs_backward_sum + len(optimizer.differentiated),
        tape_bytes=memory.tape_bytes,
        number_bytes=memory.number_bytes,
    )

    kinked = kinks(survey.tape)
    if not experiment.loss.smooth:
        kinked = [*kinked, f"loss={experiment.loss.option}"]
    sweep = SweepSetting(
        points=points.to(experiment.device),
        plan=plan,
        kinks=tuple(kinked),
        differentiated=experiment.knows_derivative,
    )
    sweep = replace(sweep, retrains=path.may_retrain and sweep.costs_more)
    if not (sweep.differentiated or sweep.retrains):
        outputs = plan.points * plan.outputs
        raise Mistake(
            f"path.effects=true: the derivative of optimizer={optimizer.option} is not known, and "
            f"{train} trainings, each without one example, are more than the limit of "
            f"{RETRAININGS * outputs} for effects on {outputs} outputs; lower data.train, raise "
            "path.attributed, or use one of ntkexp's optimizers"
        )
    return sweep


def first_points(
    splits: Sequence[slice], counts: Sequence[int]
) -> Int[Tensor, " point"]:
    """Return the first `counts[k]` points of each split k.

    >>> first_points([slice(0, 3), slice(5, 9)], [1, 2]).tolist()
    [0, 5, 6]
    """
    return torch.cat(
        [
            torch.arange(split.start, split.start + n)
            for split, n in zip(splits, counts, strict=True)
        ]
    )


# --- The setting of a run: the problem, the network
# and its kernel before training, the step size.


@dataclass(frozen=True, kw_only=True)
class Start:
    """The network before training, at all points."""

    outputs: Float[Tensor, "point out"]
    kernel: Float[Tensor, "point kept train kept_"]
    limit: LimitKernels | DoesNotApply  # the kernels at infinite width
    largest_stable_step: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All data of a run that are known before its first training step."""

    experiment: Experiment
    problem: Problem
    start: Start
    descent: Descent
    domain: Domain  # the points and outputs of the path integrals
    rounding: Rounding
    # the explained measure, if it is not the outputs
    measured: MeasuredPoints | None = None
    sweep: SweepSetting | None = None  # the plan of the leave-out effects
    remarks: tuple[str, ...] = ()  # caveats for readers of the results

    @property
    def points(self) -> Points:
        return self.descent.points


def prepare(experiment: Experiment) -> Setting:
    """Return the setting of a run. Draw its data and its initial weights."""
    return setting_of(survey(experiment))


def setting_of(survey: Survey) -> Setting:
    """Return the setting of a surveyed experiment.
    Raise if training would take years."""
    experiment = survey.experiment
    if experiment.stop_at_loss is None:
        seconds = core_seconds(survey.memory, experiment.integration.passes)
        refuse_endless(seconds, experiment.steps, experiment.device)
    problem = survey.problem
    points = survey.points
    # without phases, one phase contains all examples
    slices = problem.phases.get("train", (slice(0, problem.train),))
    phases = phases_of(
        experiment.data.phase_steps(experiment.steps),
        [part.stop - part.start for part in slices],
    )
    start = start_of(experiment, problem, points, phases)
    if experiment.path.closing_rule is not None:
        survey.explained.refuse_without_rules(survey.explained_tape)
    domain = domain_of(experiment, survey, like=start.kernel)
    descent = Descent(
        points=points,
        targets=problem.targets[: points.train],
        loss=experiment.loss,
        scale=experiment.loss_scale,
        optimizer=experiment.optimizer,
        factors=experiment.optimizer.factors(problem.weights),
        schedule=experiment.schedule,
        step_size=experiment.optimizer.chosen_step(start.largest_stable_step),
        steps=experiment.steps,
        seed=experiment.seed,
        phases=phases,
    )
    sweep = None
    if experiment.path.effects:
        sweep = sweep_setting(experiment, survey)
    return Setting(
        experiment=experiment,
        problem=problem,
        start=start,
        descent=descent,
        domain=domain,
        measured=survey.measured,
        sweep=sweep,
        rounding=rounding_of(survey, start, domain.attributed),
        remarks=setting_remarks(experiment, survey),
    )


def rounding_of(
    survey: Survey, start: Start, attributed: Int[Tensor, " attributed"]
) -> Rounding:
    """Return the data that bound rounding errors, which are proportional to the terms
    that add up to the outputs."""
    problem = survey.problem
    inputs = problem.inputs[attributed]
    sizes = problem.module.term_norms(problem.weights, inputs).norm(dim=1)
    if survey.measured is not None:
        sizes = sizes * survey.measured.slopes(start.outputs)[attributed].max()
    return Rounding(terms=float(sizes.sum()), eps=survey.tape.eps)


def start_of(
    experiment: Experiment, problem: Problem, points: Points, phases: tuple[Phase, ...]
) -> Start:
    """Return the outputs and the kernel before training.
    Raise if the network cannot be trained.

    `largest_stable_step` is the minimum over the phases. The value of a phase follows
    from the kernel among the examples of the phase."""
    view = NetworkView(points, problem.weights)
    finite = view.outputs.isfinite().all(1)
    if not finite.all():
        raise Mistake(
            f"the network's outputs are not finite before training, at {int((~finite).sum())} of "
            f"{len(finite)} points; {experiment.model.remedy}"
        )

    kernel = view.stored_kernel()
    if not kernel.isfinite().all():
        raise Mistake(
            "the tangent kernel is not finite before training; "
            f"{experiment.model.remedy}"
        )

    # the curvature of the objective is at most w λ_max ℓ″, and η = 2/curvature
    weights = [
        experiment.loss.weight(phase.count) * experiment.loss_scale for phase in phases
    ]
    eigenvalues = largest_eigenvalues(experiment, view, kernel, phases)
    steepest = max(
        weight * top for weight, top in zip(weights, eigenvalues, strict=True)
    )
    return Start(
        outputs=view.outputs,
        kernel=kernel,
        limit=limit_kernels(
            experiment, problem.inputs, points.train, problem.data.vocabulary
        ),
        largest_stable_step=2 / (steepest * experiment.loss.curvature),
    )


def largest_eigenvalues(
    experiment: Experiment,
    view: NetworkView,
    kernel: Float[Tensor, "point kept train kept_"],
    phases: tuple[Phase, ...],
) -> list[float]:
    """Return λ_max of the kernel among the examples of each phase.
    Raise if all outputs have gradients of zero."""
    if experiment.path.keeps_kernels:
        eigenvalues = [
            largest_kernel_eigenvalue(kernel[phase.examples, :, phase.examples])
            for phase in phases
        ]
        train = view.points.train
        trains = bool(kernel[:train].any()) and 0 not in eigenvalues
    else:
        eigenvalues = [view.largest_eigenvalue(phase.examples) for phase in phases]
        trains = min(eigenvalues) > 0
    if not trains:
        raise Mistake(
            "no weight moves an output at any training example, so there is nothing to train: are "
            "all units dead?"
        )
    return eigenvalues


def domain_of(experiment: Experiment, survey: Survey, like: Tensor) -> Domain:
    """Return the points and outputs of the path integrals.

    If the integration needs a backward pass, only `path.attributed` points are
    integrated, one chunk at a time: the first points of each split and phase.
    Otherwise all points of the evaluated splits are integrated."""
    problem = survey.problem
    path = experiment.path
    splits = [
        part
        for name, split in problem.split_slices.items()
        for part in problem.phases.get(name, (split,))
    ]
    counts = [split.stop - split.start for split in splits]
    backwards = experiment.integration.passes > 1
    if backwards:
        counts = fair_counts(path.attributed, counts)
    attributed = first_points(splits, counts)
    chunk = len(attributed)
    if backwards:
        chunk = survey.memory.chunk(len(attributed))
    return Domain(
        points=survey.points,
        explained=survey.explained,
        sums_train="train" in problem.split_slices,
        attributed=attributed.to(experiment.device),
        integrated=path.chosen_outputs(problem.outputs),
        outputs=problem.outputs,
        steps=experiment.steps,
        switches=experiment.switches,
        chunk=chunk,
        like=like,
        spills=survey.memory.spills,
        components=components_of_run(experiment, problem),
    )


def setting_remarks(experiment: Experiment, survey: Survey) -> tuple[str, ...]:
    """Return remarks on kernels that are not stored, on casts, and on operations whose
    Jacobians need one pass per example.

    If there is a closing rule, the run has already raised an error for such an
    operation, so this remark is omitted. (The contributions of a closing rule add up to
    the change of the outputs, as for the secant rule.)"""
    remarks = []
    if survey.chose_traces:
        remarks.append(
            f"kernels between all {survey.problem.outputs} outputs would be large, so the run "
            "stores their traces over outputs; path.kernels=all stores all"
        )
    casts = remark(
        function_of(survey.problem.module), survey.tape, experiment.path.casts
    )
    if casts is not None:
        remarks.append(casts)
    if experiment.path.closing_rule is None:
        obstacle = survey.points.reader.obstacle(survey.tape)
        if obstacle is not None:
            remarks.append(obstacle)
    return tuple(remarks)
