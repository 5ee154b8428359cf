"""Which score of training examples predicts what training without them does: rank correlations with such trainings.

Networks learn two digits, and again without one example, without 5 % and without half of them. A score predicts the
change of an output as the sum over who left. Shown are Spearman's correlations over who left, averaged over test
points, with the 95 % interval of their mean over seeds, and the seconds of a processor for a score with the trainings
that it reads.
With `--peers` dattri and traker tell their scores as well, of the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from time import process_time
from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.claim.trial.datamodel_score import score
from ntkexp.report.analysis.estimate import mean_of
from tests.bench.attribution_case import MODELS, Case, Size
from tests.bench.peers import answered
from tests.bench.stopwatch import table

PEERS = {"dattri": ("TracIn", "infl.", "TRAK"), "traker": ("TRAK",)}
READS = {"TRAK": MODELS}
"""How many trainings a score of theirs reads, if not one."""

TRUTH = "retrained"


Training: TypeAlias = tuple[tuple[str, ...], int]
"""Its words, and how many times as many steps it takes."""


class Network(NamedTuple):
    """What learns, and by which steps; their sizes leave a loss near 0.12 after 40 of them."""

    words: tuple[str, ...]
    sgd: float
    momentum: float
    adam: float
    far: float | None = None  # by Adam for twice as many steps

    @property
    def trainings(self) -> dict[str, Training]:
        """One by every optimizer."""
        found: dict[str, Training] = {
            "SGD": (("optimizer=sgd", f"optimizer.step_size={self.sgd}"), 1),
            "momentum": (("optimizer=momentum", f"optimizer.step_size={self.momentum}"), 1),
            "Adam": (("optimizer=adam", f"optimizer.step_size={self.adam}"), 1),
            "AdamW": (("optimizer=adamw", f"optimizer.step_size={self.adam}", "optimizer.weight_decay=1"), 1),
        }
        if self.far is not None:
            found["far"] = (("optimizer=adam", f"optimizer.step_size={self.far}"), 2)
        return {name: ((*self.words, *words), longer) for name, (words, longer) in found.items()}


MLP, CNN = ("model=mlp", "model.width=32"), ("model=cnn", "model.width=8")
NETWORKS = {
    "MLP, tanh": Network((*MLP, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "MLP, relu": Network((*MLP, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "CNN, tanh": Network((*CNN, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.006),
    "CNN, relu": Network((*CNN, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.006),
    "transformer": Network(("model=transformer", "model.width=8"), sgd=0.1, momentum=0.02, adam=0.007),
}
FULL, QUICK = Size(train=60, read=12, steps=40, seeds=3), Size(train=12, read=3, steps=3, seeds=1)
BRIEF = ("SGD", "AdamW")  # the trainings of `--quick`


@dataclass(frozen=True)
class Judged:
    """The correlations of a score by who left, and how long it took."""

    correlations: Mapping[str, float]
    seconds: float


def report(quick: bool = False, peers: Path | None = None) -> str:
    """Four lines for every training: the correlations by who left, and seconds."""
    size = QUICK if quick else FULL
    trainings = trainings_of(quick)
    cases = [case for training in trainings.values() for case in cases_of(training, size)]
    found = judged(cases, peers)
    several = [found[k : k + size.seeds] for k in range(0, len(found), size.seeds)]
    rows = [row for name, seeds in zip(trainings, several, strict=True) for row in lines(name, seeds)]
    return shown(size, list(found[0]), rows)


def trainings_of(quick: bool) -> dict[str, Training]:
    """All of them, or few."""
    return {
        f"{network}, {name}": training
        for network, kind in NETWORKS.items()
        for name, training in kind.trainings.items()
        if not quick or name in BRIEF
    }


def cases_of(training: Training, size: Size) -> list[Case]:
    """The training from every seed."""
    words, longer = training
    return [Case(words, size._replace(steps=size.steps * longer), seed) for seed in range(size.seeds)]


def shown(size: Size, scores: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of all trainings, under their title."""
    title = (
        f"Attribution: {size.train} digits of two classes, {size.steps} steps of 16, {size.read} test points, "
        f"seeds: {size.seeds}; rank correlations with retraining, ± the 95 % interval of the mean over seeds"
    )
    return table(title, ("training", "left out", *scores), rows)


def judged(cases: Sequence[Case], peers: Path | None) -> list[dict[str, Judged]]:
    """Hold every score against trainings, seed by seed; those take part as well, for their time."""
    cases[0].effects("true")  # so that what torch loads late is there
    told = [own(case) for case in cases]
    if peers is not None:
        for found, more in zip(told, others(cases, peers), strict=True):
            found.update(more)
    return [held(case, found) for case, found in zip(cases, told, strict=True)]


Told: TypeAlias = tuple[Float[Tensor, "point train"], float]
"""What a score says, and its seconds."""


def own(case: Case) -> dict[str, Told]:
    """The scores of this project."""
    found = {}
    for name, tell in case.scores.items():
        start = process_time()
        told = tell()
        found[name] = (told, process_time() - start)
    return found


def others(cases: Sequence[Case], peers: Path) -> list[dict[str, Told]]:
    """The scores of other programs."""
    handed = [case.handed() for case in cases]
    found: list[dict[str, Told]] = [{} for _ in cases]
    for program, scores in PEERS.items():
        answers = answered(peers, program, "scores", handed)
        for case, given, answer in zip(found, handed, answers, strict=True):
            for name in scores:
                told, seconds = answer[name]
                case[f"{program[0]}.{name}"] = (told, seconds + READS.get(name, 1) * given["seconds"])
    return found


def held(case: Case, told: Mapping[str, Told]) -> dict[str, Judged]:
    """Hold scores against trainings without somebody."""
    groups, start = case.groups(), process_time()
    actual = {name: case.changes(left) for name, left in groups.items()}
    truth = Judged({}, process_time() - start)
    found = {
        name: Judged({who: score(left @ says.t(), actual[who]) for who, left in groups.items()}, seconds)
        for name, (says, seconds) in told.items()
    }
    return found | {TRUTH: truth}


def lines(training: str, seeds: Sequence[Mapping[str, Judged]]) -> list[list[str]]:
    """The four lines of a training."""
    scores, whos = seeds[0], list(next(iter(seeds[0].values())).correlations)
    found = []
    for who in whos:
        values = ([seed[name].correlations[who] for seed in seeds if seed[name].correlations] for name in scores)
        found.append([training, who, *(cell(each) for each in values)])
    seconds = ([seed[name].seconds for seed in seeds] for name in scores)
    return [*found, [training, "s", *(f"{mean_of(each).value:.2f}" for each in seconds)]]


def cell(values: Sequence[float]) -> str:
    """The mean and how far its interval reaches; nothing of trainings, which need not be held against themselves.

    >>> cell([0.5, 0.6, 0.7]), cell([-1.0]), cell([])
    ('.60±.25', '-1.00', '')
    """
    if not values:
        return ""
    found = mean_of(values)
    reach = "" if isnan(found.reach) else f"±{short(found.reach)}"
    return short(found.value) + reach


def short(value: float) -> str:
    """Two digits, without a zero in front."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
