"""Validate scores of training examples by retraining without some of the examples.

    ground truth     the outputs at the queries after many retrainings, each without k examples
    LDS, QLD         two measures of agreement, defined in `report.validation`
    metasmoothness   a property of the training, defined in `removal.retraining`

The original training is a run of this package or a followed loop. Finished retrainings
are stored in the folder of the run (`records.ground_truth`), so an interrupted
validation can continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import numpy as np
import torch

from ntkexp.config.build import admit, load_function
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Ending,
    ReportEvent,
    Stepped,
    Task,
    Unfinished,
    reason_of_loss,
    run_jobs,
)
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem
from ntkexp.foreign_loop.again import Again, LoopAgain, trained_again
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.mistake import (
    Mistake,
    WrongArgument,
    checked_count,
    checked_number,
    in_short,
)
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import explained_rule
from ntkexp.records.folder import DONE, RunFolder
from ntkexp.records.ground_truth import (
    GroundTruth,
    Outputs,
    TrainingStore,
    TrainingWithout,
)
from ntkexp.removal.rerun import RerunAt, rerun_of
from ntkexp.removal.retraining import (
    LARGEST_REPEATED_ERROR,
    AbstractRetraining,
    metasmoothness,
)
from ntkexp.report.analysis.estimate import mean_of
from ntkexp.report.known_effects import effects_of_run
from ntkexp.report.loaded_run import load_run
from ntkexp.report.parts import attributed_in_blocks
from ntkexp.report.progress import Announced, in_place
from ntkexp.report.run import Run, outputs_of, slice_of_split
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

Group: TypeAlias = tuple[int, ...]
"""The indices of a group of examples, in ascending order."""


# --- The design of a validation.


@dataclass(frozen=True, kw_only=True)
class Design:
    """The design of the ground truth.

    Attributes:
        leave_out: The number of examples that each retraining leaves out. A value
            below 1 is their share of all examples.
        trainings: The number of random groups of examples to leave out.
        fresh: The number of new seeds for each group; 0 uses the seed of the run.
        top: The number or share of the top examples that QLD removes for each query.
        seed: The seed of the random groups.
    """

    leave_out: float = 0.01
    trainings: int = 100
    fresh: int = 0
    top: float | None = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        checked_number("leave_out", self.leave_out)
        if checked_count("trainings", self.trainings, 0) < 3:
            raise Mistake(
                f"trainings={self.trainings}: correlations of ranks need at least 3; take 100"
            )
        checked_count("fresh", self.fresh, 0)
        checked_count("seed", self.seed, -(2**63), 2**64 - 1)
        if self.top is not None:
            checked_number("top", self.top)

    def removals(self, examples: int) -> list[Group]:
        """Draw the groups of examples that are left out."""
        count = number_of(self.leave_out, examples, "leave_out")
        generator = stream("left out", self.seed, examples)
        drawn = (
            torch.randperm(examples, generator=generator)[:count]
            for _ in range(self.trainings)
        )
        return [tuple(sorted(group.tolist())) for group in drawn]


def number_of(given: float, examples: int, name: str) -> int:
    """Convert a share below 1 to a number of examples.
    Raise unless it is in 1 … examples − 1.

    >>> [number_of(given, 600, "leave_out") for given in (0.01, 0.5, 3)]
    [6, 300, 3]
    """
    if 0 < given < 1:
        count = max(1, round(given * examples + 1e-9))
    else:
        count = int(given)
    if not 1 <= count < examples:
        raise Mistake(
            f"{name}={given:g} of {examples} examples: it takes a share below 1, "
            f"or from 1 to {examples - 1}"
        )
    return count


# --- The original training: a run of this package, or a followed loop.


TRAININGS_PER_BATCH = 8
"""The number of retrainings that one job computes together."""


class AbstractSubject(ABC):
    """A training that can be repeated without some examples. `query` holds the indices
    of the queries, and `at_once` the number of retrainings that run together."""

    query: tuple[int, ...]
    at_once: ClassVar[int] = 1

    @property
    @abstractmethod
    def training(self) -> AbstractRetraining:
        """The training with the original initial weights and order of examples."""

    @abstractmethod
    def from_seed(self, seed: int) -> AbstractRetraining:
        """Return the training with initial weights and an order
        of examples drawn from `seed`."""

    def outputs(
        self, trainings: Sequence[TrainingWithout]
    ) -> Iterator[tuple[TrainingWithout, Outputs]]:
        """Retrain, and yield each training with its outputs. Trainings with the same
        seed run in batches.

        A batch always has `at_once` rows, because the number of rows affects rounding
        errors.
        """
        for seed in dict.fromkeys(training.seed for training in trainings):
            retraining = self.training if seed is None else self.from_seed(seed)
            same = [training for training in trainings if training.seed == seed]
            for first in range(0, len(same), self.at_once):
                batch = same[first : first + self.at_once]
                weights = retraining.unit_weights.repeat(self.at_once, 1)
                for row, training in zip(weights, batch, strict=False):
                    row[list(training.left_out)] = 0.0
                for training, end in zip(
                    batch, retraining.final_weights(weights), strict=False
                ):
                    yield training, retraining.outputs_at(end).double().cpu().numpy()


@dataclass(frozen=True)
class RunSubject(AbstractSubject):
    """A finished run in a folder."""

    at_once = TRAININGS_PER_BATCH
    path: Path
    query: tuple[int, ...]
    trusted: tuple[str, ...] = ()

    @cached_property
    def experiment(self) -> Experiment:
        experiment = rebuild_experiment(RunFolder(self.path), self.trusted)
        # one thread, for bitwise equal results in every process
        fix_circumstances(experiment, 1)
        return experiment

    @cached_property
    def problem(self) -> Problem:
        return draw_problem(self.experiment)

    @cached_property
    def training(self) -> RerunAt:
        return self.rerun(self.experiment, self.problem)

    def from_seed(self, seed: int) -> RerunAt:
        experiment = self.experiment
        data_seed = experiment.data.seed
        if data_seed is None:
            data_seed = experiment.seed
        data = experiment.data.model_copy(update={"seed": data_seed})
        other = experiment.model_copy(update={"seed": seed, "data": data})
        problem = draw_problem(other)
        if not torch.equal(problem.inputs, self.problem.inputs):
            raise Mistake(
                f"the seed draws data={experiment.data.option}, so a fresh seed would change the "
                "examples; use fresh=0"
            )
        return self.rerun(other, problem)

    def rerun(self, experiment: Experiment, problem: Problem) -> RerunAt:
        """Return the training of an experiment,
        with the number and size of steps of the run."""
        facts = RunFolder(self.path).sealed_facts
        if facts["diverged"]:
            raise Mistake(
                f"{self.path} diverged, so no score predicts its outputs; "
                "choose a smaller step size"
            )
        training = rerun_of(experiment, problem, *RunFolder(self.path).steps_taken)
        first = 0 if "train" in problem.split_slices else problem.train
        inputs = problem.inputs[[first + point for point in self.query]]
        return RerunAt(
            training, inputs, experiment.path.chosen_outputs(problem.outputs)
        )


@dataclass(frozen=True)
class LoopSubject(AbstractSubject):
    """A followed loop, and a function that runs it again."""

    trace: Trace
    loop: Again
    query: tuple[int, ...]

    @cached_property
    def training(self) -> LoopAgain:
        return LoopAgain(self.loop, self.trace, "renormalised")

    def from_seed(self, seed: int) -> AbstractRetraining:
        raise Mistake(
            f"fresh seeds (here {seed}): a followed loop sets its own seed, and again= repeats "
            "this seed; follow and validate the loop once for each seed"
        )

    def outputs(
        self, trainings: Sequence[TrainingWithout]
    ) -> Iterator[tuple[TrainingWithout, Outputs]]:
        for training, outputs in super().outputs(trainings):
            yield training, outputs[list(self.query)]


def subject_of(
    path: Path, query: tuple[int, ...], loop: Again | str | None, trust: Sequence[str]
) -> AbstractSubject:
    """Return the run or the followed loop in a folder. `loop` is the function that runs a
    followed loop again, or its name FILE.py:FUNCTION."""
    if loop is None:
        return RunSubject(path, query, admit(trust))
    if isinstance(loop, str):
        loop = load_function(loop, "again", trust)
    return loop_subject(path, loop, query)


def loop_subject(path: Path, loop: Again, query: tuple[int, ...]) -> LoopSubject:
    """Load the trace of a followed loop from a folder. Run the loop once, because a
    folder does not contain its module, measure, optimizer rules and loss."""
    first = trained_again(loop, Weighing())
    trace = load_trace(
        find_trace(path),
        first.module,
        first.measure,
        [known.rule for known in first.steps.known],
    )
    trace.loss = first.loss
    return LoopSubject(trace, loop, query)


# --- Jobs for workers. They store each finished retraining.


@dataclass(frozen=True)
class TrainingJob(AbstractJob):
    """A job that computes and stores retrainings,
    except those that are already stored."""

    run: str
    query: tuple[int, ...]
    trust: tuple[str, ...]
    again: str | None
    trainings: tuple[TrainingWithout, ...]

    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        path = Path(self.run)
        if not (path / DONE).is_file():
            raise Mistake(
                f"a worker does not see {path}; put it on a file system that all machines share"
            )
        store = TrainingStore(path, self.query)
        missing = store.missing(self.trainings)
        if not missing:
            return "found"
        subject = subject_of(path, self.query, self.again, self.trust)
        for done, (training, outputs) in enumerate(subject.outputs(missing), start=1):
            store.write(training, outputs)
            report_event(Stepped(name, done, len(missing)))
        return "done"


def in_this_process(
    store: TrainingStore, finished: Iterator[tuple[TrainingWithout, Outputs]]
) -> Iterator[None]:
    """Store each retraining when it finishes, then yield."""
    for training, outputs in finished:
        store.write(training, outputs)
        yield


def by_workers(
    engine: AbstractEngine,
    job: TrainingJob,
    store: TrainingStore,
    trainings: Sequence[TrainingWithout],
) -> Iterator[None]:
    """Let workers compute and store the retrainings. Yield after each one. Raise if
    some are missing at the end."""
    size = TRAININGS_PER_BATCH
    parts = [
        tuple(trainings[first : first + size])
        for first in range(0, len(trainings), size)
    ]
    tasks = (
        Task(f"trainings-{number}", replace(job, trainings=part), str(store.run))
        for number, part in enumerate(parts)
    )
    lost = ""
    with closing(run_jobs(engine, tasks)) as events:
        for event in events:
            lost = reason_of_loss(event, store.run) or lost
            if isinstance(event, Stepped):
                yield
    if missing := store.missing(trainings):
        raise Unfinished(
            f"{store.run}: {counted(len(missing), 'training')} of {len(trainings)} are missing: "
            f"{lost or 'this machine does not see the files of the workers'}; the same command continues"
        )


# --- A case: a training, scores of its examples, and a function that repeats the
# training.


@dataclass(frozen=True, kw_only=True)
class ValidationCase:
    """A training with scores to validate.

    Attributes:
        scores: Arrays [row, example] by name. A row is one output at one point of
            `query`. A score is positive if the example increases the output.
        whole: The outputs [point, out] after the original training.
        examples: The names of the training examples.
        query: The indices of the points at which scores are validated.
        identity: The identity of the run; empty for a trace in memory.
        subject: The training that is repeated.
        carried_out: A function that repeats the training without some examples,
            and returns the outputs.
    """

    scores: Mapping[str, Scores]
    whole: Outputs
    examples: tuple[str, ...]
    query: tuple[int, ...]
    identity: str
    subject: AbstractSubject
    carried_out: Callable[[Sequence[TrainingWithout]], list[Outputs]]

    def with_scores(self, scores: Mapping[str, object]) -> ValidationCase:
        """Add the scores of other methods. Raise if their shapes are wrong."""
        points, outs = self.whole.shape
        shape = (points, outs, len(self.examples))
        checked = {
            name: checked_scores(array, shape, f"scores {name}")
            for name, array in scores.items()
        }
        return replace(self, scores={**self.scores, **checked})


def case_of_run(
    run: Run,
    query: Sequence[int],
    loop: Again | str | None,
    engine: AbstractEngine | None,
    trust: Sequence[str],
    progress: AbstractProgress,
) -> ValidationCase:
    """Return the case of a run in a folder. Retrainings are stored in the folder.

    Workers of the engine compute them. If there is no engine, or if the loop is a
    function that workers cannot import by name, this process computes them."""
    points = tuple(query)
    store = TrainingStore(run.path, points)
    loop_name = loop if isinstance(loop, str) else None
    job = TrainingJob(str(run.path.absolute()), points, tuple(trust), loop_name, ())
    subject = subject_of(run.path, points, loop, trust)
    if callable(loop):
        engine = None

    def carried_out(trainings: Sequence[TrainingWithout]) -> list[Outputs]:
        with RunFolder(run.path).claim():
            missing = store.missing(trainings)
            if engine is None:
                finished = in_this_process(store, subject.outputs(missing))
            else:
                finished = by_workers(engine, job, store, missing)
            report_each(finished, len(missing), progress)
        outputs = [store.read(training) for training in trainings]
        return [stored for stored in outputs if stored is not None]

    names = run.contributions.coords["example"].to_numpy()
    return ValidationCase(
        scores=scores_of_run(run, list(points)),
        whole=outputs_of(run, "f_T")[list(points)][:, list(run.outs)],
        examples=tuple(map(str, names.tolist())),
        query=points,
        identity=RunFolder(run.path).identity,
        subject=subject,
        carried_out=carried_out,
    )


def report_each(
    finished: Iterator[None], count: int, progress: AbstractProgress
) -> None:
    """Wait for `count` retrainings, and report each of them."""
    # the first training is not timed, because it includes the start of workers
    next(finished, None)
    announced = Announced("ntkexp: validation", count - 1, progress, unit="training")
    for _ in finished:
        announced.step()
    announced.stop()


def scores_of_run(run: Run, points: list[int]) -> dict[str, Scores]:
    """Return the run's contributions, and its leave-out effects
    with reversed sign, at `points`, [row, example]."""
    scores = {}
    if (rule := explained_rule(run.rules)) is not None:
        scores["contribution"] = run.parts(rule).isel(query=points).to_numpy()
    effect = effects_of_run(run)
    if effect is not None and np.isfinite(effect[points]).all():
        # a score is minus the change of the output without the example
        scores["effect"] = -effect[points]
    return {name: array.reshape(-1, array.shape[-1]) for name, array in scores.items()}


def case_of_trace(
    trace: Trace, contributions: xr.Dataset, loop: Again, queries: int
) -> ValidationCase:
    """Return the case of a loop followed in memory. Its retrainings are not stored."""
    count = min(queries, contributions.sizes["query"])
    subject = LoopSubject(trace, loop, tuple(range(count)))
    scores = scores_of_attribution(contributions, count)
    return ValidationCase(
        scores={
            name: array.reshape(-1, array.shape[-1]) for name, array in scores.items()
        },
        whole=(contributions["start"] + contributions["change"]).to_numpy()[:count],
        examples=tuple(trace.examples),
        query=subject.query,
        identity="",
        subject=subject,
        carried_out=lambda trainings: [
            outputs for _, outputs in subject.outputs(trainings)
        ],
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
    """Compare scores of training examples with retraining without some of them.

    The ground truth consists of `trainings` retrainings, each without `leave_out`
    random examples. By default, retrainings have the same initial weights and order of
    examples as the original training, and test scores of this network. If `fresh` > 0,
    retrainings use `fresh` new seeds, and their mean outputs test scores of the
    training algorithm. Retrainings are stored in the folder of the run and reused.

    Args:
        source: A finished run, its folder, or the trace of a followed loop.
        scores: Scores of other methods: an array [point, out, example], positive if an
            example increases the output, or several arrays by name. The run's own
            contributions and leave-out effects are always included. For a trace, also
            the result of `trace.attribute(effects=True)`: its contributions, and its
            effects with reversed sign.
        again: The function that runs a followed loop again.
            Required for followed loops.
        leave_out: The number of examples that each retraining leaves out,
            or their share below 1.
        trainings: The number of random groups of examples to leave out.
        top: The number or share of the top examples that QLD removes
            for each query, or None to omit QLD.
        fresh: The number of new seeds per group of examples;
            0 uses the seed of the run.
        seed: The seed of the random groups.
        queries: The maximum number of points at which scores are validated.
        split: The split of these points. By default, the first of query, test
            and train that the run has.
        lower_is_better: True if the outputs are losses.
        engine: The engine whose workers retrain. By default, retrain in this process.
        trust: Packages or files whose code may run.
        quiet: True to show no progress.

    Returns:
        The LDS and QLD of each method, with the ground truth.

    Raises:
        Mistake: if `again` is missing or trains another model,
            or if scores have another shape.
    """
    refuse_arguments(again, split, engine, trust)
    queries = checked_count("queries", queries, 1)
    design = Design(
        leave_out=leave_out, trainings=trainings, top=top, fresh=fresh, seed=seed
    )
    given = as_attribution(scores)
    if isinstance(source, Trace):
        loop = function_again(again)
        if given is not None:
            refuse_other_examples(given, source)
    if isinstance(source, Trace) and source.folder is None:
        attribution = source.attribute(quiet=True) if given is None else given
        case = case_of_trace(source, attribution, loop, queries)
    else:
        run = finished_run(source)
        refuse_again(run, again)
        points = asked_points(run, split, queries)
        case = case_of_run(run, points, again, engine, trust, in_place(quiet))
    if given is not None:
        case = case.with_scores(scores_of_attribution(given, len(case.query)))
    elif scores is not None:
        case = case.with_scores(
            scores if isinstance(scores, Mapping) else {"scores": scores}
        )
    if not case.scores:
        raise Mistake(
            "validate: there are no scores; attribute the run (path.rule=[secant]), "
            "or give your own"
        )
    return validated(case, design, lower_is_better=lower_is_better)


def function_again(again: Again | str | None) -> Again:
    """Return the function that runs a followed loop again. Raise if it is missing."""
    if again is None or isinstance(again, str):
        raise Mistake(
            "validate: give the function that runs the followed loop again, again=, as for effects"
        )
    return again


def finished_run(source: Run | Trace | Path | str) -> Run:
    """Return the run of a source. Attribute a followed loop only if its folder has no
    attribution yet, because `attribute` would replace the effects in the folder."""
    if isinstance(source, Run):
        return source
    if not isinstance(source, Trace):
        return load_run(source)
    assert source.folder is not None
    if not source.folder.done:
        source.attribute(quiet=True)
    return load_run(source.folder.path)


def as_attribution(scores: object) -> xr.Dataset | None:
    """Return `scores` if it is the attribution of a loop, or else None."""
    if not hasattr(scores, "data_vars") or "contribution" not in scores.data_vars:
        return None
    return cast("xr.Dataset", scores)


def scores_of_attribution(attribution: xr.Dataset, count: int) -> dict[str, Scores]:
    """Return the contributions, and the leave-out effects with reversed sign, at the
    first `count` queries, as arrays [point, out, example]."""
    scores = {"contribution": attribution["contribution"].to_numpy()[:count]}
    if "effect" in attribution:
        scores["effect"] = -attribution["effect"].to_numpy()[:count]
    return scores


def refuse_other_examples(attribution: xr.Dataset, trace: Trace) -> None:
    """Raise if the attribution is of another loop."""
    names = attribution.coords["example"].to_numpy().tolist()
    if list(map(str, names)) != list(trace.examples):
        raise WrongArgument(
            "scores= is the attribution of other examples; give trace.attribute() of this trace",
            "scores",
        )


def refuse_arguments(
    again: object, split: object, engine: object, trust: object
) -> None:
    """Raise if an argument of `validate` has the wrong type."""
    names = (
        trust
        if isinstance(trust, Sequence) and not isinstance(trust, str | bytes)
        else [None]
    )
    if not all(isinstance(name, str) for name in names):
        raise WrongArgument(
            f"trust={in_short(trust)}: give a list of packages, or of files such as my_net.py",
            "trust",
        )
    if not (split is None or isinstance(split, str)):
        raise WrongArgument(
            f"split={in_short(split)}: give the name of a split, such as 'query'",
            "split",
        )
    if not (engine is None or isinstance(engine, AbstractEngine)):
        raise WrongArgument(
            f"engine= is a {type(engine).__name__}; give an engine of ntkexp.engine",
            "engine",
        )
    if not (again is None or isinstance(again, str) or callable(again)):
        raise WrongArgument(
            f"again= is a {type(again).__name__}; give a function, or its module:name",
            "again",
        )


def refuse_again(run: Run, again: object) -> None:
    """Raise if `again` is missing for a followed loop,
    or is given for any other run."""
    if "follow" in run.config and again is None:
        raise WrongArgument(
            f"again=: {run.path} holds a followed loop; give the function that runs it again",
            "again",
        )
    if "follow" not in run.config and again is not None:
        raise WrongArgument(
            f"again= is for followed loops; {run.path} is a run of an experiment; leave it out",
            "again",
        )


def asked_points(run: Run, split: str | None, queries: int) -> list[int]:
    """Return the indices of the first `queries` attributed points of a split."""
    default = "query" if "query" in run.points else main_split(run.ladder)
    place = slice_of_split(run, split or default)
    rule = explained_rule(run.rules)
    points = list(range(place.start, place.stop))
    if rule is not None:
        known = np.all(attributed_in_blocks(run.parts(rule)), axis=1)
        points = [point for point in points if known[point]]
    if not points:
        raise Mistake(
            f"no point of {run.name} was attributed in that split; choose another with split="
        )
    return points[:queries]


def validated(
    case: ValidationCase, design: Design, *, lower_is_better: bool
) -> Validation:
    """Retrain without groups of examples, and compare all scores with the outputs after
    retraining."""
    count = len(case.examples)
    shape = case.whole.shape
    removals = design.removals(count)
    # QLD explains one output per point: the largest, which belongs to the predicted class
    top = None if design.top is None else number_of(design.top, count, "top")
    rows = np.ravel_multi_index((np.arange(shape[0]), case.whole.argmax(1)), shape)
    top_groups: dict[str, list[Group]] = {}
    for name, scores in case.scores.items():
        top_groups[name] = []
        if top:
            top_groups[name] = top_examples(
                scores[rows], top, lower_is_better=lower_is_better
            )
    every_top_group = [group for groups in top_groups.values() for group in groups]
    after = outputs_without(case, design, [(), *removals, *every_top_group])
    truth = ground_truth(case, design, removals, after)
    outputs = truth.outputs.reshape(len(removals), -1)

    # the harm of a removal is the decrease of the explained output, or its increase if
    # lower outputs are better
    sign = -1.0 if lower_is_better else 1.0
    validated_scores = []
    for name, scores in case.scores.items():
        lds = linear_datamodeling_score(scores, truth.left_out, outputs)
        harm = [
            sign * (after[()][row] - after[group][row])
            for row, group in zip(rows, top_groups[name], strict=False)
        ]
        qld = mean_of(harm) if harm else None
        validated_scores.append(ValidatedScore(name, lds, qld))
    harm_by_chance = None
    if top == len(removals[0]):
        mean_harm = sign * (after[()] - outputs.mean(0))[rows]
        harm_by_chance = mean_of(mean_harm.tolist())
    return Validation(
        truth=truth,
        scores=tuple(validated_scores),
        harm_by_chance=harm_by_chance,
        top=top,
        metasmoothness=metasmoothness(case.subject.training),
        lower_is_better=lower_is_better,
        doubts=() if design.fresh else doubts_of(case.whole, truth),
    )


def ground_truth(
    case: ValidationCase,
    design: Design,
    removals: Sequence[Group],
    after: Mapping[Group, Outputs],
) -> GroundTruth:
    """Return the outputs after the removals, and after the training with all examples,
    as arrays [point, out]."""
    shape = case.whole.shape
    indices = np.arange(len(case.examples))
    return GroundTruth(
        left_out=np.array([np.isin(indices, group) for group in removals]),
        outputs=np.stack([after[group] for group in removals]).reshape(-1, *shape),
        whole=after[()].reshape(shape),
        examples=case.examples,
        query=case.query,
        identity=case.identity,
        fresh=design.fresh,
    )


def outputs_without(
    case: ValidationCase, design: Design, groups: Sequence[Group]
) -> dict[Group, Outputs]:
    """Retrain without each group of examples. Return the outputs [row] by group,
    averaged over seeds."""
    seeds: list[int | None] = [None]
    if design.fresh:
        seeds = [design.seed + 1 + index for index in range(design.fresh)]
    distinct = dict.fromkeys(groups)
    trainings = [TrainingWithout(group, seed) for group in distinct for seed in seeds]
    outputs_of = dict(zip(trainings, case.carried_out(trainings), strict=True))
    after = {}
    for group in distinct:
        of_seeds = [outputs_of[TrainingWithout(group, seed)] for seed in seeds]
        after[group] = np.mean(of_seeds, axis=0).reshape(-1)
    return after


def doubts_of(whole: Outputs, truth: GroundTruth) -> tuple[str, ...]:
    """Return a warning if repeating the original training gives different outputs."""
    missed = float(np.sqrt(np.mean((truth.whole - whole) ** 2)))
    changed = float(np.sqrt(np.mean((truth.outputs - truth.whole) ** 2)))
    if missed <= LARGEST_REPEATED_ERROR * changed:
        return ()
    return (
        f"repeating the training itself changes outputs by {short(missed)}, "
        f"and leaving out examples by {short(changed)}: its steps amplify rounding, "
        "so do not trust scores; choose a smaller step size",
    )
