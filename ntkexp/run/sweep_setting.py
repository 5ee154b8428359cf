"""Where effects are found: at the first points of every split, `path.attributed` in all, whatever the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ntkexp.diagnostics.kinks import kinks
from ntkexp.effects.sweep_plan import SweepPlan
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.path.attributed_points import shares
from ntkexp.run.survey import Survey

RETRAININGS = 2
"""A sweep back for one output takes as long as so many trainings, or longer."""


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


def sweep_setting(experiment: Experiment, found: Survey) -> SweepSetting:
    """The sweep that an experiment asks for."""
    places = list(found.problem.places.values())
    counts = shares(experiment.path.attributed, [place.stop - place.start for place in places])
    points = torch.cat([torch.arange(place.start, place.start + n) for place, n in zip(places, counts, strict=True)])
    kinked = kinks(found.tape) + ([] if experiment.loss.smooth else [f"loss={experiment.loss.option}"])
    asked = SweepSetting(
        points=points.to(experiment.device),
        plan=plan(experiment, found, len(points)),
        kinks=tuple(kinked),
        differentiated=experiment.knows_derivative,
    )
    asked = replace(asked, retrains=experiment.path.may_retrain and asked.costs_more)
    if not (experiment.knows_derivative or asked.retrains):
        raise Mistake(undifferentiated(experiment, asked))
    return asked


def undifferentiated(experiment: Experiment, asked: SweepSetting) -> str:
    """Say why there are no effects, where steps have no derivative and trainings are many."""
    most = RETRAININGS * asked.plan.points * asked.plan.outputs
    return (
        f"path.effects=true: nobody knows the derivative of what optimizer={experiment.optimizer.option} does to a "
        f"gradient, and {asked.plan.train} trainings, each without one example, are more than the {most} that effects "
        f"on {asked.plan.points * asked.plan.outputs} outputs are worth; lower data.train, raise path.attributed, or "
        "use one of ntkexp's optimizers"
    )


def plan(experiment: Experiment, found: Survey, points: int) -> SweepPlan:
    """What the sweep takes, given the memory that there is."""
    train, optimizer = found.problem.train, experiment.optimizer
    batch = optimizer.batch_indices(0, train, experiment.seed)
    return SweepPlan(
        free=experiment.room_gb * 1e9 - found.budget.fixed,
        points=points,
        outputs=found.budget.integrated,
        steps=experiment.steps,
        parameters=found.budget.parameters,
        train=train,
        rows=(rows := train if batch is None else len(batch)),
        taken_out=rows if experiment.path.effects == "one_step" else 0,
        adjoints=1 + optimizer.remembers + len(optimizer.differentiated),
        tape_bytes=found.budget.tape_bytes,
        number_bytes=found.budget.number_bytes,
    )
