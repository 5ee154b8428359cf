"""An experiment is prepared: a problem, a network at its start, how it is read, a step size, and what no run is begun
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.diagnostics import kinks, largest_kernel_eigenvalue
from ntkexp.effects.plan import SweepPlan
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem, limit_kernels
from ntkexp.kernel.read.plan import work
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Cost, Reader, costs
from ntkexp.kernel.record.casts import remark, with_casts
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.segment import point
from ntkexp.machine.base import DoesNotApply, LimitKernels
from ntkexp.measure import AbstractMeasure, MeasuredPoints, Objective
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.path.budget import Budget, core_seconds, refuse_endless
from ntkexp.path.components import Components, components_of
from ntkexp.path.domain import Domain
from ntkexp.path.integrals import Rounding
from ntkexp.path.integration import fair_counts
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.step import Descent, Phase, phases_of

# --- What no run is begun for: kernels beyond the memory, steps beyond a lifetime, networks that cannot learn.


LEAST_ROWS = 8  # of a block of two points, four times


def refuse_sketch(experiment: Experiment) -> None:
    """Refuse sketched kernels, which only kernel files have."""
    if (size := experiment.kernel.sketch) is not None:
        raise Mistake(
            f"kernel.sketch={size}: kernels along a path are exact; for large networks use path.kernels=none or "
            f"trace, or sketch one kernel by ntkexp kernel tangent kernel.sketch={size}"
        )


def refuse_vast(experiment: Experiment) -> None:
    """Refuse kernels that are too large by the numbers of examples alone, before any is drawn."""
    source, size = experiment.data, torch.finfo(getattr(torch, experiment.dtype)).bits // 8
    others = (source.probe if "probe" in experiment.path.probes else 0) + (
        (source.test or 0) if "test" in experiment.path.probes else 0
    )
    points, path = source.train + others, experiment.path
    read = points if "train" in path.probes else others
    costs = experiment.integration.costs
    rows = path.tangents * points + (costs.kernels + costs.rules) * read
    if path.kernels == "none" and experiment.device == "cpu":
        rows = min(rows, LEAST_ROWS)  # the rest lies on disk
    least = float(source.train) * size * rows
    if least > experiment.room_gb * 1e9:
        raise Mistake(
            f"memory_gb={experiment.room_gb:g}: the kernels of {points} points with "
            f"data.train={source.train} of them take {least / 1e9:.4g} GB or more; lower data.train, data.probe or "
            "data.test, or raise memory_gb"
        )


def run_seconds(experiment: Experiment, budget: Budget) -> float:
    """How many seconds a core takes for it."""
    return core_seconds(budget, experiment.steps, experiment.integration.passes)


# --- How a problem would be read, found out from shapes and from two of its points: in which blocks, with what
# memory.


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The problem, its points in blocks that the memory allows, that memory, and what the network does with two."""

    problem: Problem
    points: Points
    explained: Points  # the same, as a measure of their outputs where one is explained
    measured: MeasuredPoints | None
    budget: Budget
    tape: Tape
    explained_tape: Tape  # of two of the points read so

    @property
    def operations(self) -> float:
        """About how many operations the kernel of all points with the training examples takes."""
        return work(self.tape).of_kernel(
            (len(self.points.inputs), self.points.train), self.problem.outputs
        )

    @property
    def costs(self) -> list[Cost]:
        """What the kernel of a block of points with the training examples takes, by groups of parameters."""
        return costs(self.points.reader, self.tape, self.points.block, self.points.train)


def survey(experiment: Experiment) -> Survey:
    """Draw the problem, unless its kernels alone are too large, and look at two of its points."""
    refuse_sketch(experiment)
    refuse_vast(experiment)
    problem = draw_problem(experiment)
    experiment.loss.refuse_unlike_differences(problem.targets)
    if experiment.path.effects:
        experiment.loss.refuse_unlike_second_differences(problem.targets)
    function = with_casts(function_of(problem.module), experiment.path.casts)
    # what the network does with two points decides how many are read at once
    reader = Reader(function, point(problem.weights).trained, programs=ProgramCache())
    tape = reader.record(problem.weights, problem.inputs[:2])
    try:
        measured = measured_points(experiment.loss, problem, experiment.path.measure)
    except Mistake as mistake:
        raise Mistake(f"path.measure={experiment.path.measure.option}: {mistake}") from None
    explained_reader, explained_tape = reader, tape
    if measured is not None:
        explained_reader = Reader(
            measured.measured.of(function), reader.trained, programs=ProgramCache()
        )
        explained_tape = explained_reader.record(
            problem.weights, (problem.inputs[:2], problem.targets[:2])
        )
    read = tape.bytes_per_example + (explained_tape.bytes_per_example if measured else 0.0)
    budget, outputs = (
        budget_of(experiment, problem, read),
        experiment.path.chosen_outputs(problem.outputs),
    )
    points = Points(
        reader=reader,
        inputs=problem.inputs,
        train=problem.train,
        block=budget.block,
        keep=budget.keep,
        chosen=outputs if measured is None and len(outputs) < problem.outputs else None,
        kernels=experiment.path.kernels,
    )
    explained = (
        points
        if measured is None
        else replace(points, reader=explained_reader, targets=problem.targets, cache=[])
    )
    return Survey(
        problem=problem,
        points=points,
        explained=explained,
        measured=measured,
        budget=budget,
        tape=tape,
        explained_tape=explained_tape,
    )


def measured_points(
    loss: Objective, problem: Problem, measure: AbstractMeasure
) -> MeasuredPoints | None:
    """A measure at all points, none if it is the outputs themselves; refused where there is none under this loss."""
    found = measure.of_run(loss, problem.targets, len(problem.data.classes))
    return None if found is None else MeasuredPoints(found, problem.targets)


def budget_of(experiment: Experiment, problem: Problem, tape_bytes: float) -> Budget:
    """The memory of a run, given how much is recorded of a point."""
    costs = experiment.integration.costs
    return Budget(
        memory_gb=experiment.room_gb,
        parameters=sum(weight.numel() for weight in problem.weights.values()),
        points=len(problem.inputs),
        read=sum(split.stop - split.start for split in problem.places.values()),
        train=problem.train,
        outputs=problem.outputs,
        integrated=len(experiment.path.chosen_outputs(problem.outputs)),
        rules=costs.rules,
        tangents=experiment.path.tangents,
        path_kernels=costs.kernels,
        errors=costs.errors,
        tapes=costs.tapes,
        tape_bytes=tape_bytes,
        number_bytes=problem.inputs.element_size(),
        copies=experiment.optimizer.copies,
        kernels=experiment.path.kernels,
        steps=experiment.steps,
        phases=len(experiment.switches) + 1,
        doubled=costs.doubled,
        disk=experiment.device == "cpu",
        components=len(components_of_run(experiment, problem)),
    )


def components_of_run(experiment: Experiment, problem: Problem) -> Components:
    """The components by which contributions are told apart; none, where they are not."""
    by = experiment.path.by
    if by is None:
        return {}
    trained = point(problem.weights).trained
    return components_of(by, [name for name in problem.weights if name in trained], "path.by")


# --- Where effects are found: at the first points of every split, `path.attributed` in all, whatever the optimizer.


RETRAININGS = 2
"""The least cost of a reverse pass for one output, in trainings."""


@dataclass(frozen=True, kw_only=True)
class SweepSetting:
    """The points, what the sweep takes, what has kinks, and whether trainings without examples take its place."""

    points: Int[Tensor, " attributed"]
    plan: SweepPlan
    kinks: tuple[str, ...]
    retrains: bool = False
    differentiated: bool = True  # whether a sweep could be made

    @property
    def costs_more(self) -> bool:
        """Whether the sweep takes longer than training without each example in turn."""
        return self.plan.train <= RETRAININGS * self.plan.points * self.plan.outputs

    @property
    def sentence(self) -> str:
        """What effects cost, said before they are begun."""
        return self.plan.spared(swept=self.differentiated) if self.retrains else self.plan.sentence


def sweep_setting(experiment: Experiment, survey: Survey) -> SweepSetting:
    """The sweep that an experiment asks for, or trainings in its place where these take less."""
    optimizer, path, budget = experiment.optimizer, experiment.path, survey.budget
    splits, train = list(survey.problem.places.values()), survey.problem.train
    points = first_points(
        splits, fair_counts(path.attributed, [split.stop - split.start for split in splits])
    )
    # what a reverse pass takes
    batch = optimizer.batch_indices(0, train, experiment.seed)
    rows = train if batch is None else len(batch)
    plan = SweepPlan(
        free=experiment.room_gb * 1e9 - budget.fixed,
        points=len(points),
        outputs=budget.integrated,
        steps=experiment.steps,
        parameters=budget.parameters,
        train=train,
        rows=rows,
        taken_out=rows if path.effects == "one_step" else 0,
        adjoints=1 + optimizer.remembers + len(optimizer.differentiated),
        tape_bytes=budget.tape_bytes,
        number_bytes=budget.number_bytes,
    )
    # what may spoil its derivatives, and whether trainings without each example take less
    kinked = kinks(survey.tape) + (
        [] if experiment.loss.smooth else [f"loss={experiment.loss.option}"]
    )
    differentiated = experiment.knows_derivative
    sweep = SweepSetting(
        points=points.to(experiment.device),
        plan=plan,
        kinks=tuple(kinked),
        differentiated=differentiated,
    )
    sweep = replace(sweep, retrains=path.may_retrain and sweep.costs_more)
    if not (differentiated or sweep.retrains):
        outputs = plan.points * plan.outputs
        raise Mistake(
            f"path.effects=true: there is no rule for the derivative of what optimizer={optimizer.option} does to a "
            "gradient, "
            f"and {train} trainings, each without one example, are more than the {RETRAININGS * outputs} that effects "
            f"on {outputs} outputs are worth; lower data.train, raise path.attributed, or use one of ntkexp's "
            "optimizers"
        )
    return sweep


def first_points(splits: Sequence[slice], counts: Sequence[int]) -> Int[Tensor, " point"]:
    """The first points of each place, as many of each as `counts` says.

    >>> first_points([slice(0, 3), slice(5, 9)], [1, 2]).tolist()
    [0, 5, 6]
    """
    return torch.cat(
        [
            torch.arange(split.start, split.start + n)
            for split, n in zip(splits, counts, strict=True)
        ]
    )


# --- An experiment is prepared: a problem, a network at its start, its kernel there, a step size.


@dataclass(frozen=True, kw_only=True)
class Start:
    """The network before training, at all points."""

    outputs: Float[Tensor, "point out"]
    kernel: Float[Tensor, "point kept train kept_"]
    limit: LimitKernels | DoesNotApply  # the kernels at infinite width
    largest_stable_step: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything at the start of training."""

    experiment: Experiment
    problem: Problem
    start: Start
    descent: Descent
    domain: Domain  # where the path is integrated
    rounding: Rounding
    measured: MeasuredPoints | None = (
        None  # what is explained of the outputs, if not they themselves
    )
    sweep: SweepSetting | None = None  # where effects are found, if they are
    remarks: tuple[str, ...] = ()  # what a reader of the results should know

    @property
    def points(self) -> Points:
        return self.descent.points


def prepare(experiment: Experiment) -> Setting:
    """Draw the data and the network, and look at them once."""
    return setting_of(experiment, survey(experiment))


def setting_of(experiment: Experiment, survey: Survey) -> Setting:
    """Look once at what was drawn, unless training would outlast its user."""
    if experiment.stop_at_loss is None:
        refuse_endless(run_seconds(experiment, survey.budget), experiment.steps, experiment.device)
    problem, points = survey.problem, survey.points
    # what is learned when; most data have one phase, of all examples
    slices = problem.phases.get("train", (slice(0, problem.train),))
    phases = phases_of(
        experiment.data.phase_steps(experiment.steps), [part.stop - part.start for part in slices]
    )
    start = start_of(experiment, problem, points, phases)
    if experiment.path.closing is not None:
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
    sizes = problem.module.sizes(problem.weights, problem.inputs[domain.attributed]).norm(dim=1)
    if survey.measured is not None:
        sizes = sizes * survey.measured.slopes(start.outputs)[domain.attributed].max()
    return Setting(
        experiment=experiment,
        problem=problem,
        start=start,
        descent=descent,
        domain=domain,
        measured=survey.measured,
        sweep=sweep_setting(experiment, survey) if experiment.path.effects else None,
        rounding=Rounding(terms=float(sizes.sum()), eps=survey.tape.eps),
        remarks=setting_remarks(experiment, survey),
    )


def start_of(
    experiment: Experiment, problem: Problem, points: Points, phases: tuple[Phase, ...]
) -> Start:
    """The network at its start, unless it cannot be trained.

    The largest stable step is the smallest one over all phases, each from the kernel among its own examples.
    """
    view = NetworkView(points, problem.weights)
    finite = view.outputs.isfinite().all(1)
    if not finite.all():
        raise Mistake(
            f"the network's outputs are not finite before training, at {int((~finite).sum())} of {len(finite)} points; "
            f"{experiment.model.remedy}"
        )

    # λ_max of the kernel among the examples of each phase
    kernel, keeps = view.kept_kernel(), experiment.path.keeps_kernels
    tops = [
        largest_kernel_eigenvalue(kernel[phase.examples, :, phase.examples])
        if keeps
        else view.largest_eigenvalue(phase.examples)
        for phase in phases
    ]
    moves = bool(kernel[: points.train].any()) and 0 not in tops if keeps else min(tops) > 0
    if not moves:
        raise Mistake(
            "no weight moves an output at any training example, so there is nothing to train: are all units dead?"
        )

    # the curvature of the objective is at most w λ_max ℓ″
    weights = [experiment.loss.weight(phase.count) * experiment.loss_scale for phase in phases]
    steepest = max(weight * top for weight, top in zip(weights, tops, strict=True))
    return Start(
        outputs=view.outputs,
        kernel=kernel,
        limit=limit_kernels(experiment, problem.inputs, points.train, problem.data.vocabulary),
        largest_stable_step=2 / (steepest * experiment.loss.curvature),
    )


def domain_of(experiment: Experiment, survey: Survey, like: Tensor) -> Domain:
    """Where the path is integrated, by the settings of the path and the memory that there is: at the first ones of the
    points of every split, and there of every phase: as many of them as `path.attributed` says, a chunk at a time, where
    each costs a pass backwards.
    """
    problem, path = survey.problem, experiment.path
    splits = [
        part
        for name, split in problem.places.items()
        for part in problem.phases.get(name, (split,))
    ]
    sizes, backwards = (
        [split.stop - split.start for split in splits],
        experiment.integration.passes > 1,
    )
    attributed = first_points(splits, fair_counts(path.attributed, sizes) if backwards else sizes)
    return Domain(
        points=survey.points,
        explained=survey.explained,
        reads_train="train" in problem.places,
        attributed=attributed.to(experiment.device),
        integrated=path.chosen_outputs(problem.outputs),
        outputs=problem.outputs,
        steps=experiment.steps,
        switches=experiment.switches,
        chunk=survey.budget.chunk(len(attributed)) if backwards else len(attributed),
        like=like,
        spills=survey.budget.spills,
        components=components_of_run(experiment, problem),
    )


def setting_remarks(experiment: Experiment, survey: Survey) -> tuple[str, ...]:
    """Return what casts do to the numbers, and why Jacobians are read example by example, if they are.

    A rule that closes every step needs no such remark: it refuses what it has no difference rule for.
    """
    points, path = survey.points, experiment.path
    casts = remark(function_of(survey.problem.module), survey.tape, path.casts)
    obstacle = points.reader.obstacle(survey.tape) if path.closing is None else None
    return tuple(each for each in (casts, obstacle) if each is not None)
