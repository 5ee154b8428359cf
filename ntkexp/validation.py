"""Validation of scores of training examples, by training again without some of them.

A run of this package, or a loop that was followed, is carried out again without groups of its examples:

    ground truth     trainings without k examples each, drawn by chance: outputs at the queries
    LDS, QLD         `report.validation`
    metasmoothness   `removal.retraining`

Trainings are kept beside the run (`records.ground_truth`), so whatever ends a validation costs those under way at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ntkexp.config.build import admit, load_function
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Ended,
    Ending,
    Stepped,
    Task,
    Tell,
    Unfinished,
    run_jobs,
)
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem
from ntkexp.foreign_loop.again import Again, LoopAgain, trained_again
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.mistake import Mistake, WrongArgument, checked_count, checked_number, in_short
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import explained_rule
from ntkexp.records.folder import DONE, RunFolder
from ntkexp.records.ground_truth import GroundTruth, Outputs, TrainingStore, TrainingWithout
from ntkexp.removal.rerun import RerunAt, again
from ntkexp.removal.retraining import AbstractRetraining, metasmoothness
from ntkexp.report.analysis.estimate import mean_of
from ntkexp.report.known_effects import effects_of_run
from ntkexp.report.loaded_run import load_run
from ntkexp.report.parts import attributed_in_blocks
from ntkexp.report.progress import Announced, in_place
from ntkexp.report.run import Run, slice_of_split
from ntkexp.report.sentence import main_split
from ntkexp.report.validation import (
    Scores,
    ValidatedScore,
    Validation,
    checked_scores,
    linear_datamodeling_score,
    top_examples,
)
from ntkexp.run.environment import fix_circumstances
from ntkexp.run.execute import rebuild_experiment
from ntkexp.stream import stream
from ntkexp.text import counted, short

if TYPE_CHECKING:
    import xarray as xr

# --- What is asked.


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which trainings are the ground truth: `trainings` of them without `leave_out` examples each, a number of them or
    a share; of `fresh` seeds each, or 0 for those of the run. QLD leaves the `top` examples of each query out."""

    leave_out: float = 0.01
    trainings: int = 100
    fresh: int = 0
    top: float | None = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        checked_number("leave_out", self.leave_out)
        if checked_count("trainings", self.trainings, 0) < 3:
            raise Mistake(
                f"trainings={self.trainings}: ranks of fewer than 3 say nothing; take 100"
            )
        checked_count("fresh", self.fresh, 0)
        checked_count("seed", self.seed, -(2**63), 2**64 - 1)
        if self.top is not None:
            checked_number("top", self.top)

    def removals(self, examples: int) -> list[tuple[int, ...]]:
        """Who is left out of each training, drawn from the seed."""
        count, generator = (
            number_of(self.leave_out, examples, "leave_out"),
            stream("left out", self.seed, examples),
        )
        drawn = (
            torch.randperm(examples, generator=generator)[:count] for _ in range(self.trainings)
        )
        return [tuple(sorted(each.tolist())) for each in drawn]


def number_of(given: float, examples: int, name: str) -> int:
    """A number of examples, given as such or as a share below 1.

    >>> number_of(0.01, 600, "leave_out"), number_of(0.5, 7, "leave_out"), number_of(3, 7, "leave_out")
    (6, 4, 3)
    """
    count = round(given * examples + 1e-9) if 0 < given < 1 else int(given)
    if not 1 <= max(count, 0 < given < 1) < examples:
        raise Mistake(
            f"{name}={given:g} of {examples} examples: it takes a share below 1, or from 1 to {examples - 1}"
        )
    return max(1, count)


# --- Whose training it is: a run of this package, or a loop that a user's function carries out anew.


AT_ONCE = 8
"""Trainings that are carried out together, and by one job: a worker that is lost costs those that it is at."""


class AbstractSubject(ABC):
    """A training that can be carried out again without some examples, asked at `probe`, places of the axis `probe`."""

    probe: tuple[int, ...]
    at_once: ClassVar[int] = 1

    @property
    @abstractmethod
    def training(self) -> AbstractRetraining:
        """The training itself, from its own start and in its own order."""

    @abstractmethod
    def from_seed(self, seed: int) -> AbstractRetraining:
        """The training from other weights, in another order."""

    def outputs(
        self, trainings: Sequence[TrainingWithout]
    ) -> Iterator[tuple[TrainingWithout, Outputs]]:
        """Carry trainings out, those of one seed together, always as many: their number decides about rounding."""
        for seed in dict.fromkeys(training.seed for training in trainings):
            retraining = self.training if seed is None else self.from_seed(seed)
            same = [training for training in trainings if training.seed == seed]
            for begun in range(0, len(same), self.at_once):
                some = same[begun : begun + self.at_once]
                weights = retraining.everyone.repeat(self.at_once, 1)
                for row, training in zip(weights, some, strict=False):
                    row[list(training.left_out)] = 0.0
                for training, end in zip(some, retraining.ends(weights), strict=False):
                    yield training, retraining.at(end).double().cpu().numpy()


@dataclass(frozen=True)
class RunSubject(AbstractSubject):
    """A finished run, from its folder."""

    at_once = AT_ONCE
    path: Path
    probe: tuple[int, ...]
    trusted: tuple[str, ...] = ()

    @cached_property
    def experiment(self) -> Experiment:
        experiment = rebuild_experiment(RunFolder(self.path), self.trusted)
        fix_circumstances(experiment, 1)  # so that a training gives the same bits in any process
        return experiment

    @cached_property
    def problem(self) -> Problem:
        return draw_problem(self.experiment)

    @cached_property
    def training(self) -> RerunAt:
        return self.rerun(self.experiment, self.problem)

    def from_seed(self, seed: int) -> RerunAt:
        own = self.experiment
        data = own.data.model_copy(
            update={"seed": own.seed if own.data.seed is None else own.data.seed}
        )
        other = own.model_copy(update={"seed": seed, "data": data})
        problem = draw_problem(other)
        if not torch.equal(problem.inputs, self.problem.inputs):
            raise Mistake(
                f"data={own.data.option} are drawn by the seed, so a fresh seed has other examples"
            )
        return self.rerun(other, problem)

    def rerun(self, experiment: Experiment, problem: Problem) -> RerunAt:
        """The training of an experiment, of as many steps of the same size as the run took."""
        facts = RunFolder(self.path).sealed_facts
        if facts["diverged"]:
            raise Mistake(
                f"{self.path} diverged, so no score predicts its outputs; choose a smaller step size"
            )
        training = again(experiment, problem, *RunFolder(self.path).steps_taken)
        first = 0 if "train" in problem.places else problem.train
        inputs = problem.inputs[[first + point for point in self.probe]]
        return RerunAt(training, inputs, experiment.path.chosen_outputs(problem.outputs))


@dataclass(frozen=True)
class LoopSubject(AbstractSubject):
    """A loop that was followed, and a function that carries it out anew."""

    trace: Trace
    loop: Again
    probe: tuple[int, ...]

    @cached_property
    def training(self) -> LoopAgain:
        return LoopAgain(self.loop, self.trace, "renormalised")

    def from_seed(self, seed: int) -> AbstractRetraining:
        raise Mistake(
            f"fresh seeds (here {seed}): a followed loop seeds itself, and again= runs that one; "
            "follow and validate it once for each seed"
        )

    def outputs(
        self, trainings: Sequence[TrainingWithout]
    ) -> Iterator[tuple[TrainingWithout, Outputs]]:
        for training, outputs in super().outputs(trainings):
            yield training, outputs[list(self.probe)]


def loop_subject(path: Path, loop: Again, probe: tuple[int, ...]) -> LoopSubject:
    """The loop whose trace lies in a folder; the module is the one that the loop itself follows."""
    first = trained_again(loop, Weighing())
    trace = load_trace(
        find_trace(path), first.module, first.measure, [each.rule for each in first.steps.known]
    )
    trace.loss = first.loss
    return LoopSubject(trace, loop, probe)


# --- Trainings are carried out by workers, each of which keeps what it has done, one at a time.


@dataclass(frozen=True)
class TrainingJob(AbstractJob):
    """Some trainings of a run; what is kept already is passed over."""

    run: str
    probe: tuple[int, ...]
    trust: tuple[str, ...]
    again: str | None
    trainings: tuple[TrainingWithout, ...]

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        path = Path(self.run)
        if not (path / DONE).is_file():
            raise Mistake(
                f"a worker does not see {path}; put it on a file system that all machines share"
            )
        store = TrainingStore(path, self.probe)
        left = store.missing(self.trainings)
        if not left:
            return "found"
        for done, (training, outputs) in enumerate(self.subject().outputs(left), start=1):
            store.write(training, outputs)
            tell(Stepped(name, done, len(left)))
        return "done"

    def subject(self) -> AbstractSubject:
        path = Path(self.run)
        if self.again is None:
            return RunSubject(path, self.probe, admit(self.trust))
        return loop_subject(path, load_function(self.again, "again", self.trust), self.probe)


def kept(
    store: TrainingStore, outputs: Iterator[tuple[TrainingWithout, Outputs]]
) -> Iterator[None]:
    """Keep trainings as they are done."""
    for training, each in outputs:
        store.write(training, each)
        yield


def by_workers(
    engine: AbstractEngine,
    job: TrainingJob,
    store: TrainingStore,
    trainings: Sequence[TrainingWithout],
) -> Iterator[None]:
    """Let workers carry out what is missing, one after another."""
    parts = [tuple(trainings[at : at + AT_ONCE]) for at in range(0, len(trainings), AT_ONCE)]
    tasks = (
        Task(f"trainings-{number}", replace(job, trainings=part), str(Path.cwd()), str(store.run))
        for number, part in enumerate(parts)
    )
    lost = ""
    with closing(run_jobs(engine, tasks)) as events:
        for event in events:
            match event:
                case Ended(how="failed" | "broken"):  # others would meet it as well
                    raise Unfinished(f"{store.run}: {event.reason}")
                case Ended(how="killed" | "stopped"):
                    lost = event.reason or "it was told to stop"
                case Stepped():
                    yield
    if missing := store.missing(trainings):
        raise Unfinished(
            f"{store.run}: {counted(len(missing), 'training')} of {len(trainings)} are missing: "
            f"{lost or 'what workers wrote is not to be seen here'}; the same command continues"
        )


# --- What is validated: a training, its own scores at some points, and how it is carried out again.


@dataclass(frozen=True, kw_only=True)
class ValidationCase:
    """The queries are the outputs at these points; `scores` by name are [query, example], positive where they raise."""

    scores: Mapping[str, Scores]
    whole: Outputs  # after the training itself
    examples: tuple[str, ...]
    probe: tuple[int, ...]
    identity: str
    subject: AbstractSubject
    carried_out: Callable[[Sequence[TrainingWithout]], list[Outputs]]

    def with_given(self, given: Mapping[str, object]) -> ValidationCase:
        """Ask of scores of other methods as well."""
        points, outs = self.whole.shape
        shape = (points, outs, len(self.examples))
        others = {
            name: checked_scores(each, shape, f"scores {name}") for name, each in given.items()
        }
        return replace(self, scores={**self.scores, **others})


def case_of_run(
    run: Run,
    probe: Sequence[int],
    loop: Again | str | None,
    engine: AbstractEngine | None,
    trust: Sequence[str],
    progress: AbstractProgress,
) -> ValidationCase:
    """A run's own scores, and its trainings: kept beside it, and carried out by workers if there is an engine."""
    rule, effect, points = explained_rule(run.rules), effects_of_run(run), tuple(probe)
    parts = (
        {}
        if rule is None
        else {"contribution": run.parts(rule).isel(probe=list(points)).to_numpy()}
    )
    if effect is not None and np.isfinite(effect[list(points)]).all():
        parts["effect"] = -effect[
            list(points)
        ]  # what is changed without an example, which added the opposite
    store = TrainingStore(run.path, points)
    subject: AbstractSubject
    if loop is None:
        subject = RunSubject(run.path, points, admit(trust))
    else:
        subject = loop_subject(
            run.path, load_function(loop, "again", trust) if isinstance(loop, str) else loop, points
        )
    named = loop if isinstance(loop, str) else None
    job = TrainingJob(str(run.path.absolute()), points, tuple(trust), named, ())

    def carried_out(trainings: Sequence[TrainingWithout]) -> list[Outputs]:
        with RunFolder(run.path).claim():
            missing = store.missing(trainings)
            if engine is None or not (loop is None or named):
                done = kept(store, subject.outputs(missing))
            else:
                done = by_workers(engine, job, store, missing)
            next(done, None)  # which a worker's start takes longer
            announced = Announced("ntkexp: validation", len(missing) - 1, progress)
            for _ in done:
                announced.step()
            announced.stop()
        return [found for training in trainings if (found := store.read(training)) is not None]

    names = run.contributions.coords["example"].to_numpy()
    return ValidationCase(
        scores={name: part.reshape(-1, part.shape[-1]) for name, part in parts.items()},
        whole=run.predictions.sel(machine="f_T").to_numpy()[list(points)][:, list(run.outs)],
        examples=tuple(map(str, names.tolist())),
        probe=points,
        identity=RunFolder(run.path).identity,
        subject=subject,
        carried_out=carried_out,
    )


def case_of_trace(trace: Trace, found: xr.Dataset, loop: Again, queries: int) -> ValidationCase:
    """A loop that is followed in memory: nothing is kept of its trainings."""
    count = min(queries, found.sizes["probe"])
    subject = LoopSubject(trace, loop, tuple(range(count)))
    parts = {"contribution": found["contribution"].to_numpy()[:count]}
    if "effect" in found:
        parts["effect"] = -found["effect"].to_numpy()[:count]
    return ValidationCase(
        scores={name: part.reshape(-1, part.shape[-1]) for name, part in parts.items()},
        whole=(found["start"] + found["change"]).to_numpy()[:count],
        examples=tuple(trace.examples),
        probe=subject.probe,
        identity="",
        subject=subject,
        carried_out=lambda trainings: [outputs for _, outputs in subject.outputs(trainings)],
    )


# --- Validation.


def validate(
    source: Run | Trace | Path | str,
    scores: Mapping[str, object] | object = None,
    *,
    again: Again | str | None = None,
    leave_out: float = 0.01,
    trainings: int = 100,
    top: float | None = 0.01,
    fresh: int = 0,
    seed: int = 0,
    queries: int = 50,
    split: str | None = None,
    lower_is_better: bool = False,
    engine: AbstractEngine | None = None,
    trust: Sequence[str] = (),
    quiet: bool = False,
) -> Validation:
    """Compare scores of training examples with trainings without some of them.

    `source` is a finished run (or its folder), or a trace of a followed loop with `again`, the function that carries it
    out anew. Beside its own contributions and effects, `scores` are those of other methods: an array [point, out,
    example], positive where an example raises the output, or several by their names.

    The ground truth is `trainings` trainings, each without `leave_out` of the examples (a share below 1, or a number).
    They begin at the same weights and take the same order, or have `fresh` other seeds each, over which outputs are
    averaged: the first asks about this very network, the second about the algorithm that made it. QLD leaves out the
    `top` examples of each query; `lower_is_better` if the outputs are losses.

    Trainings are kept beside a run, and are not repeated.
    """
    known = isinstance(trust, Sequence) and not isinstance(trust, str | bytes)
    if not known or not all(isinstance(each, str) for each in trust):
        raise WrongArgument(
            f"trust={in_short(trust)}: give a list of packages, or of files such as my_net.py",
            "trust",
        )
    if not (split is None or isinstance(split, str)):
        raise WrongArgument(
            f"split={in_short(split)}: give the name of a split, such as 'probe'", "split"
        )
    if not (engine is None or isinstance(engine, AbstractEngine)):
        raise WrongArgument(
            f"engine= is a {type(engine).__name__}; give an engine of ntkexp.engine", "engine"
        )
    if not (again is None or isinstance(again, str) or callable(again)):
        raise WrongArgument(
            f"again= is a {type(again).__name__}; give a function, or where it lies", "again"
        )
    queries = checked_count("queries", queries, 1)
    design = Design(leave_out=leave_out, trainings=trainings, top=top, fresh=fresh, seed=seed)
    if isinstance(source, Trace):
        if again is None or isinstance(again, str):
            raise Mistake(
                "validate: a followed loop is run again by a function; give again=, as for effects"
            )
        case = case_of_trace(source, source.attribute(quiet=True), again, queries)
    else:
        run = source if isinstance(source, Run) else load_run(source)
        if "follow" in run.config and again is None:
            raise WrongArgument(
                f"again=: {run.path} is of a loop of your own; give the function that runs it again",
                "again",
            )
        if "follow" not in run.config and again is not None:
            raise WrongArgument(
                f"again= is for loops that were followed; {run.path} is an experiment, trained as it is",
                "again",
            )
        case = case_of_run(
            run, asked_points(run, split, queries), again, engine, trust, in_place(quiet)
        )
    if scores is not None:
        case = case.with_given(scores if isinstance(scores, Mapping) else {"scores": scores})
    if not case.scores:
        raise Mistake(
            "validate: there are no scores; attribute the run (path.rule=[secant]), or give your own"
        )
    return validated(case, design, lower_is_better=lower_is_better)


def asked_points(run: Run, split: str | None, queries: int) -> list[int]:
    """The first points of a split whose contributions are known, as places on the axis `probe`."""
    place = slice_of_split(
        run, split or ("probe" if "probe" in run.points else main_split(run.ladder))
    )
    rule, points = explained_rule(run.rules), list(range(place.start, place.stop))
    if rule is not None:
        known = np.all(attributed_in_blocks(run.parts(rule)), axis=1)
        points = [point for point in points if known[point]]
    if not points:
        raise Mistake(
            f"no point of {run.name} was attributed in that split; choose another with split="
        )
    return points[:queries]


def validated(case: ValidationCase, design: Design, *, lower_is_better: bool) -> Validation:
    """Carry the trainings out, and compare every kind of scores with them."""
    count, whole = len(case.examples), case.whole
    removals = design.removals(count)
    seeds: list[int | None] = [design.seed + 1 + each for each in range(design.fresh)] or [None]

    # of each point one query for QLD: its output, or the largest of several, which is the class that it is given
    top = None if design.top is None else number_of(design.top, count, "top")
    chosen = np.ravel_multi_index((np.arange(len(whole)), whole.argmax(1)), whole.shape)
    without_top = {
        name: top_examples(scores[chosen], top, lower_is_better=lower_is_better) if top else []
        for name, scores in case.scores.items()
    }

    # all trainings together, so that no worker waits: with everyone, without chance groups, without top examples
    groups = dict.fromkeys(
        [(), *removals, *(group for each in without_top.values() for group in each)]
    )
    trainings = [TrainingWithout(group, seed) for group in groups for seed in seeds]
    found = dict(zip(trainings, case.carried_out(trainings), strict=True))
    after = {
        group: np.mean([found[TrainingWithout(group, seed)] for seed in seeds], axis=0).reshape(-1)
        for group in groups
    }

    outputs = np.stack([after[group] for group in removals])
    truth = GroundTruth(
        left_out=np.array([np.isin(np.arange(count), group) for group in removals]),
        outputs=outputs.reshape(-1, *whole.shape),
        whole=after[()].reshape(whole.shape),
        examples=case.examples,
        probe=case.probe,
        identity=case.identity,
        fresh=design.fresh,
    )
    sign = -1.0 if lower_is_better else 1.0
    fared = []
    for name, scores in case.scores.items():
        harm = [
            sign * (after[()][q] - after[group][q])
            for q, group in zip(chosen, without_top[name], strict=False)
        ]
        lds = linear_datamodeling_score(scores, truth.left_out, outputs)
        fared.append(ValidatedScore(name, lds, mean_of(harm) if harm else None))
    by_chance = sign * (after[()] - outputs.mean(0))[chosen]
    return Validation(
        truth=truth,
        scores=tuple(fared),
        harm_by_chance=mean_of(by_chance.tolist()) if top == len(removals[0]) else None,
        top=top,
        metasmoothness=metasmoothness(case.subject.training),
        lower_is_better=lower_is_better,
        doubts=() if design.fresh else repeats(whole, truth),
    )


REPEATED = 0.01
"""The training as it was must end where it did, to this share of what removals change."""


def repeats(whole: Outputs, truth: GroundTruth) -> tuple[str, ...]:
    """Why ground truth is not to be believed: trained again as it was, the network is another."""
    missed = float(np.sqrt(np.mean((truth.whole - whole) ** 2)))
    changed = float(np.sqrt(np.mean((truth.outputs - truth.whole) ** 2)))
    if missed <= REPEATED * changed:
        return ()
    return (
        f"trained again as it was, it ends {short(missed)} from where it did, without some examples {short(changed)}: "
        "its steps amplify rounding, so do not trust scores; choose a smaller step size",
    )
