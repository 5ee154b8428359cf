"""What a run will cost, from shapes alone: the same experiment is estimated the same on every machine and day.

seconds   on one core of an ordinary processor: START + steps · (BASE + positions · points · work · RATE)
work      of one point: its weights, and for every number on its tape what the features cost
bytes     of `ntkexp.path.budget`
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ntkexp.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.prepare import glimpsed

START, BASE, RATE = 3.0, 0.01, 8e-11
PER_NUMBER = 64  # of a tape, in weights: rows of the features are multiplied with those of the training examples


@dataclass(frozen=True)
class Cost:
    """Core seconds and bytes; where they cannot be known, why."""

    seconds: float
    bytes: float
    mistake: str = ""


@dataclass
class Estimator:
    """Remembers what it has looked at: seeds, scales and step sizes cost nothing."""

    known: dict[str, Cost] = field(default_factory=dict)

    def __call__(self, experiment: Experiment) -> Cost:
        """The cost of a run."""
        parts = (experiment.data, experiment.model, experiment.loss, experiment.path, experiment.optimizer.remembers)
        shape = (experiment.init.antisymmetric, experiment.steps, experiment.dtype, experiment.memory_gb)
        key = repr((*parts, *shape))
        if key not in self.known:
            self.known[key] = estimated(experiment)
        return self.known[key]


def estimated(experiment: Experiment) -> Cost:
    """The cost of a run, from one look at its data and its network on the processor."""
    try:
        here = experiment.model_copy(update={"device": "cpu"})
        _, budget, _ = glimpsed(here)
        return Cost(seconds(here, budget), needed(budget))
    except Mistake as mistake:
        return Cost(0.0, 0.0, str(mistake))


def seconds(experiment: Experiment, budget: Budget) -> float:
    """Core seconds."""
    work = budget.points * (budget.parameters + PER_NUMBER * budget.tape_bytes / budget.number_bytes)
    passes = budget.tapes * (2 if experiment.optimizer.remembers else 1)
    return START + experiment.steps * (BASE + passes * work * RATE)


def needed(budget: Budget) -> float:
    """Bytes."""
    tapes = 2 * budget.points * budget.tape_bytes if budget.keep else 0.0
    return budget.fixed + budget.block * budget.per_point + tapes
