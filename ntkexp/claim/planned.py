"""What there is to carry out for a claim: the runs and the trials of all its looks, each of them once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ntkexp.claim.claim import Claim, Look
from ntkexp.claim.trial_job import TrialJob
from ntkexp.config.compose import Composer
from ntkexp.records.claim import WHOLE
from ntkexp.records.timings import Took, took
from ntkexp.sweep.definition import Definition
from ntkexp.sweep.plan import Plan, plan


@dataclass(frozen=True)
class PlannedLook:
    """The runs of a look by name, and its trials."""

    look: Look
    plans: Mapping[str, Plan]
    trials: tuple[TrialJob, ...]

    @property
    def took(self) -> Took:
        """What its runs and trials took, one after the other."""
        runs = {plan.folder(run).path: None for plan in self.plans.values() for run in plan.distinct}
        return added([*(path / "timings.csv" for path in runs), *(job.timings for job in self.trials)])

    def shares_all(self, other: PlannedLook) -> bool:
        """Whether another look is at the same runs and trials."""
        mine, theirs = ([(name, id(plan)) for name, plan in look.plans.items()] for look in (self, other))
        return mine == theirs and self.trials == other.trials


@dataclass(frozen=True)
class PlannedClaim:
    """A claim whose runs are all known to be valid."""

    claim: Claim
    out: Path
    looks: Mapping[str, PlannedLook]
    options: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> Plan:
        """All runs of all looks."""
        everything = Definition(self.claim.name, {}, (), (), (), (self.claim.name,), self.options)
        runs = (run for look in self.looks.values() for plan in look.plans.values() for run in plan.runs)
        return Plan(everything, self.out, tuple(runs))

    @property
    def trials(self) -> tuple[TrialJob, ...]:
        """All trials, each once."""
        return tuple({job.name: job for look in self.looks.values() for job in look.trials}.values())

    @property
    def folder(self) -> Path:
        """What was found lies here."""
        return self.out / self.claim.folder

    @property
    def took(self) -> Took:
        """What its runs and trials took, one after the other."""
        runs = [self.whole.folder(run).path / "timings.csv" for run in self.whole.distinct]
        return added([*runs, *(job.timings for job in self.trials)])

    @property
    def parts_took(self) -> dict[str, Took]:
        """What all of it took, and each look; runs of several looks are counted for each."""
        return {WHOLE: self.took} | {name: look.took for name, look in self.looks.items()}


def added(files: Sequence[Path]) -> Took:
    """Add up what these files tell."""
    return sum(map(took, files), start=Took(0.0, 0.0))


def plan_claim(
    claim: Claim, composer: Composer, out: Path, trust: Sequence[str] = (), options: Sequence[str] = ()
) -> PlannedClaim:
    """Compose all runs of a claim."""
    known: list[Plan] = []  # most controls look at the runs of the claim itself

    def once(definition: Definition) -> Plan:
        found = next((one for one in known if one.sweep == definition), None)
        if found is None:
            known.append(found := plan(definition, composer, out))
        return found

    looks = {
        name: PlannedLook(
            look, {run: once(definition) for run, definition in look.runs.items()}, trials(look, out, tuple(trust))
        )
        for name, look in claim.looks.items()
    }
    for look in claim.looks.values():
        if look.trial is None:
            look.quantity.refuse_early()
    return PlannedClaim(claim, out, looks, tuple(options))


def trials(look: Look, out: Path, trust: tuple[str, ...]) -> tuple[TrialJob, ...]:
    """Make a job of every seed of a trial."""
    if look.trial is None:
        return ()
    return tuple(TrialJob(look.trial.fields(), seed, str(out), trust) for seed in look.seeds)
