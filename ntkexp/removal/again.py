"""The training of an experiment, to be carried out again."""

from __future__ import annotations

from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem
from ntkexp.kernel.record.casts import with_casts
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.removal.rerun import Rerun


def again(experiment: Experiment, problem: Problem, step_size: float, length: int) -> Rerun:
    """The training that took so many steps of this size, before its schedule."""
    if experiment.switches:
        raise Mistake(
            f"data={experiment.data.option} is learned in phases, and nobody knows how to train again without some "
            "examples of one; its contributions are known by phase: load_run(RUN).contributions.by_phase"
        )
    train = problem.train
    return Rerun(
        function=with_casts(function_of(problem.module), experiment.path.casts),
        start=problem.weights,
        inputs=problem.inputs[:train],
        targets=problem.targets[:train],
        loss=experiment.loss,
        scale=experiment.init.alpha**-2 if experiment.init.centred else 1.0,
        optimizer=experiment.optimizer,
        factors=experiment.optimizer.factors(problem.weights),
        schedule=experiment.schedule,
        step_size=step_size,
        steps=experiment.steps,
        length=length,
        seed=experiment.seed,
        memory_gb=experiment.room_gb,
        renormalises=experiment.path.mean == "renormalised",
    )
