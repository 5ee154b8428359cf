"""What a run will cost, from shapes alone: seconds of `ntkexp.path.effort`, bytes of `ntkexp.path.budget`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.run.refusals import effort
from ntkexp.run.survey import survey


@dataclass(frozen=True)
class RunCost:
    """What a run takes: core seconds and bytes; where they cannot be known, why."""

    seconds: float
    bytes: float
    mistake: str = ""


@dataclass
class Estimator:
    """An estimator remembers what it has looked at: seeds, scales and step sizes cost nothing."""

    known: dict[str, RunCost] = field(default_factory=dict)

    def __call__(self, experiment: Experiment) -> RunCost:
        """The cost of a run."""
        parts = (experiment.data, experiment.model, experiment.loss, experiment.path, experiment.integration.passes)
        shape = (experiment.init.antisymmetric, experiment.steps, experiment.dtype, experiment.memory_gb)
        key = repr((*parts, *shape))
        if key not in self.known:
            self.known[key] = estimate(experiment)
        return self.known[key]


def estimate(experiment: Experiment) -> RunCost:
    """Estimate the cost of a run, from one look at its data and its network on the processor."""
    try:
        here = experiment.model_copy(update={"device": "cpu"})
        budget = survey(here).budget
        return RunCost(effort(here, budget), bytes_held(budget))
    except Mistake as mistake:
        return RunCost(0.0, 0.0, str(mistake))


def bytes_held(budget: Budget) -> float:
    """Count the bytes that a run holds."""
    tapes = 2 * budget.points * budget.tape_bytes if budget.keep else 0.0
    return budget.fixed + budget.block * budget.per_point + tapes
