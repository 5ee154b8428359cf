"""How a problem would be read, found out from shapes and from two of its points: in which blocks, with what memory."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem
from ntkexp.kernel.read.cost import Cost, costs
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.read.threads import work
from ntkexp.kernel.record.casts import with_casts
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.segment import point
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.model.functional import function_of
from ntkexp.path.budget import Budget
from ntkexp.path.points import Points
from ntkexp.run.refusals import refuse_vast


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The problem, its points in blocks that the memory allows, that memory, and what the network does with two."""

    problem: Problem
    points: Points
    budget: Budget
    tape: Tape

    @property
    def operations(self) -> float:
        """About how many operations the kernel of all points with the training examples takes."""
        return work(self.tape).of_kernel((len(self.points.inputs), self.points.train), self.problem.outputs)

    @property
    def costs(self) -> list[Cost]:
        """What the kernel of a block of points with the training examples takes, by groups of parameters."""
        return costs(self.points.reader, self.tape, self.points.block, self.points.train)


def survey(experiment: Experiment) -> Survey:
    """Draw the problem, unless its kernels alone are too large, and look at two of its points."""
    refuse_vast(experiment)
    problem = draw_problem(experiment)
    experiment.loss.refuse_unlike_differences(problem.targets)
    if experiment.path.effects:
        experiment.loss.refuse_unlike_second_differences(problem.targets)
    function = with_casts(function_of(problem.module), experiment.path.casts)
    reader = Reader(function, point(problem.weights).trained, programs=ProgramCache())
    tape = reader.record(problem.weights, problem.inputs[:2])
    budget, wanted = budget_of(experiment, problem, tape), experiment.path.chosen_outputs(problem.outputs)
    points = Points(
        reader=reader,
        inputs=problem.inputs,
        train=problem.train,
        block=budget.block,
        keep=budget.keep,
        chosen=wanted if len(wanted) < problem.outputs else None,
        sketch=sketch_of(experiment, problem, reader),
        kernels=experiment.path.kernels,
    )
    return Survey(problem=problem, points=points, budget=budget, tape=tape)


def sketch_of(experiment: Experiment, problem: Problem, reader: Reader) -> Sketch | None:
    """The sketch by which kernels are made, if they are made by one."""
    if experiment.kernel.sketch is None:
        return None
    shapes = {name: weight.shape for name, weight in problem.weights.items() if name in reader.trained}
    return Sketch(experiment.kernel.sketch, experiment.seed, shapes)


def budget_of(experiment: Experiment, problem: Problem, tape: Tape) -> Budget:
    """The memory of a run, given what is recorded of two points."""
    return Budget(
        memory_gb=experiment.room_gb,
        parameters=sum(weight.numel() for weight in problem.weights.values()),
        points=len(problem.inputs),
        read=sum(place.stop - place.start for place in problem.places.values()),
        train=problem.train,
        outputs=problem.outputs,
        integrated=len(experiment.path.chosen_outputs(problem.outputs)),
        rules=experiment.integration.rules,
        tangents=experiment.path.tangents,
        path_kernels=experiment.integration.kernels,
        errors=experiment.integration.errors,
        tapes=experiment.integration.tapes,
        tape_bytes=tape.bytes_per_example,
        number_bytes=problem.inputs.element_size(),
        copies=experiment.optimizer.copies,
        kernels=experiment.path.kernels,
        steps=experiment.steps,
        phases=len(experiment.switches) + 1,
        doubled=experiment.integration.doubles,
        disk=experiment.device == "cpu",
    )
