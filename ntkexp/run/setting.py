"""An experiment is prepared: a problem, a network at its start, its kernel there, a step size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.diagnostics.spectrum import largest
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.infinite_width import limit_kernels
from ntkexp.experiment.problem import Problem
from ntkexp.kernel.record.casts import remark
from ntkexp.machine.evidence import DoesNotApply, LimitKernels
from ntkexp.model.functional import function_of
from ntkexp.path.accumulate.tally import Rounding
from ntkexp.path.descent import Descent
from ntkexp.path.domain import Domain
from ntkexp.path.network_view import NetworkView
from ntkexp.path.phase import Phase, phases_of
from ntkexp.path.points import Points
from ntkexp.run.refusals import refuse_dead, refuse_infinite, refuse_long
from ntkexp.run.survey import Survey, survey
from ntkexp.run.sweep_setting import SweepSetting, sweep_setting
from ntkexp.shapes import Weights


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
    sweep: SweepSetting | None = None  # where effects are found, if they are
    remarks: tuple[str, ...] = ()  # what a reader of the results should know

    @property
    def points(self) -> Points:
        """Where the network is read."""
        return self.descent.points


def prepare(experiment: Experiment) -> Setting:
    """Draw the data and the network, and look at them once."""
    return setting_of(experiment, survey(experiment))


def setting_of(experiment: Experiment, found: Survey) -> Setting:
    """Look once at what was drawn, unless training would outlast its user."""
    refuse_long(experiment, found.budget)
    problem, points = found.problem, found.points
    start = look(experiment, problem, points)
    if experiment.path.closing is not None:
        points.refuse_without_rules(found.tape)
    domain = domain_of(experiment, found, like=start.kernel)
    sizes = problem.module.sizes(problem.weights, problem.inputs[domain.attributed])
    return Setting(
        experiment=experiment,
        problem=problem,
        start=start,
        descent=descent_from(experiment, problem, points, start.largest_stable_step),
        domain=domain,
        sweep=sweep_setting(experiment, found) if experiment.path.effects else None,
        rounding=Rounding(terms=float(sizes.norm(dim=1).sum()), eps=found.tape.eps),
        remarks=(*remarks(experiment, found), *sketch_remarks(experiment, points, problem.weights, start)),
    )


def look(experiment: Experiment, problem: Problem, points: Points) -> Start:
    """The network at its start, unless it cannot be trained.

    The largest stable step is the least of those of all phases, each by the kernel among its own examples, which no
    sketch stands for: what is trained does not depend on how it is read.
    """
    view = NetworkView(points, problem.weights)
    refuse_infinite(view.outputs, experiment)
    keeps = experiment.path.keeps_kernels
    kernel = view.kept_kernel()
    exact = keeps and points.sketch is None
    turns = phases(experiment, problem)
    tops = [
        largest(kernel[phase.examples, :, phase.examples]) if exact else view.largest_among(phase.examples)
        for phase in turns
    ]
    refuse_dead(moves=bool(kernel[: points.train].any()) and 0 not in tops if keeps else min(tops) > 0)
    weights = [experiment.loss.weight(phase.count) * scale(experiment) for phase in turns]
    steepest = max(weight * top for weight, top in zip(weights, tops, strict=True))
    return Start(
        outputs=view.outputs,
        kernel=kernel,
        limit=limit_kernels(experiment, problem.inputs, points.train, problem.data.vocabulary),
        largest_stable_step=2 / (steepest * experiment.loss.curvature),
    )


def phases(experiment: Experiment, problem: Problem) -> tuple[Phase, ...]:
    """What is learned when; most data have one phase, of all examples."""
    places = problem.phases.get("train", (slice(0, problem.train),))
    counts = [place.stop - place.start for place in places]
    return phases_of(experiment.data.phase_steps(experiment.steps), counts)


def scale(experiment: Experiment) -> float:
    """What the loss is multiplied with."""
    return experiment.init.alpha**-2 if experiment.init.centred else 1.0


def descent_from(experiment: Experiment, problem: Problem, points: Points, largest_stable: float) -> Descent:
    """How training will go, once it begins."""
    return Descent(
        points=points,
        targets=problem.targets[: points.train],
        loss=experiment.loss,
        scale=scale(experiment),
        optimizer=experiment.optimizer,
        factors=experiment.optimizer.factors(problem.weights),
        schedule=experiment.schedule,
        step_size=experiment.optimizer.chosen_step(largest_stable),
        steps=experiment.steps,
        seed=experiment.seed,
        phases=phases(experiment, problem),
    )


def domain_of(experiment: Experiment, found: Survey, like: Tensor) -> Domain:
    """Where the path is integrated, by the settings of the path and the memory that there is."""
    problem, chosen = found.problem, attributed_points(experiment, found.problem)
    return Domain(
        points=found.points,
        reads_train="train" in problem.places,
        attributed=chosen,
        integrated=experiment.path.chosen_outputs(problem.outputs),
        outputs=problem.outputs,
        steps=experiment.steps,
        switches=experiment.switches,
        chunk=experiment.integration.chunk(found.budget, len(chosen)),
        like=like,
        spills=found.budget.spills,
    )


def attributed_points(experiment: Experiment, problem: Problem) -> Int[Tensor, " attributed"]:
    """The first ones of the points of every split, and there of every phase, as many as the integration attributes."""
    places = [part for name, place in problem.places.items() for part in problem.phases.get(name, (place,))]
    counts = experiment.integration.counts([place.stop - place.start for place in places])
    parts = [torch.arange(place.start, place.start + n) for place, n in zip(places, counts, strict=True)]
    return torch.cat(parts).to(experiment.device)


def remarks(experiment: Experiment, found: Survey) -> tuple[str, ...]:
    """What the network's numbers cost, and why its kernels do; a rule that closes says itself what it cannot."""
    casts = remark(function_of(found.problem.module), found.tape, experiment.path.casts)
    obstacle = found.points.reader.obstacle(found.tape) if experiment.path.closing is None else None
    return tuple(each for each in (casts, obstacle) if each is not None)


def sketch_remarks(experiment: Experiment, points: Points, weights: Weights, start: Start) -> tuple[str, ...]:
    """How far sketched kernels are from kernels, and what they are good for."""
    if points.sketch is None:
        return ()
    asked = f"kernel.sketch={experiment.kernel.sketch}"
    many = sum(shape.numel() for shape in points.sketch.shapes.values())
    said = (
        (f"{asked} is no less than the {many:,} weights: without it kernels are exact, and take less",)
        if points.sketch.size >= many
        else ()
    )
    if not experiment.path.keeps_kernels:
        return (f"contributions are from sketches ({asked}): only their sums are exact", *said)
    share = NetworkView(points, weights).sketch_error(start.kernel[: points.train])
    return (
        f"kernels are sketches ({asked}), the first within {share:.1%} of its norm: they tell drift, spectra and "
        "alignment, and sums that close, but no single parts; machines that are made of kernels err as these do",
        *said,
    )
