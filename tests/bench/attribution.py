"""Which score of training examples predicts what training without them does: rank correlations with such trainings.

A small network learns two digits. Examples are left out, one, 5 % or half of them, and the same start and order of
batches is trained again: means are over what is left of a batch. A score predicts the change of an output as the sum
over who left. Shown are Spearman's correlations over groups, means over test points and seeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import mean, stdev
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.claim.trial.datamodel_score import score
from ntkexp.config.compose import compose
from ntkexp.mistake import Mistake
from ntkexp.removal.again import again
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import trained
from ntkexp.run.loop import go
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import begin
from ntkexp.stream import stream
from tests.bench.attribution_scores import influence, last_product, tracin
from tests.bench.backward import Deaf
from tests.bench.stopwatch import table

ACTIVATIONS = ("tanh", "relu")
GROUPS = 32  # of the larger removals


class Size(NamedTuple):
    """How much is trained, and how often."""

    train: int
    read: int
    width: int
    steps: int
    seeds: int


class Trained(NamedTuple):
    """By which optimizer, and for how many times as many steps."""

    words: tuple[str, ...]
    longer: int = 1


TRAININGS = {
    "SGD": Trained(("optimizer=sgd", "optimizer.step_size=0.3")),
    "momentum": Trained(("optimizer=momentum", "optimizer.step_size=0.03")),
    "Adam": Trained(("optimizer=adam", "optimizer.step_size=0.003")),
    "far": Trained(("optimizer=adam", "optimizer.step_size=0.01"), longer=2),  # by Adam, each step three times as large
}
FULL, QUICK = Size(train=100, read=20, width=32, steps=40, seeds=3), Size(train=12, read=3, width=4, steps=3, seeds=1)


@dataclass(frozen=True)
class Case:
    """A training, and what is read of it."""

    words: tuple[str, ...]
    size: Size
    seed: int

    def setting(self, *more: str) -> Setting:
        """The training, ready to begin; effects are those of the points that are read, and of no others."""
        size = self.size
        sizes = (f"data.train={size.train}", f"data.probe={size.read}", f"model.width={size.width}", "data.test=0")
        path = (f"path.attributed={size.read}", "path.probes=[probe]", "path.rule=[secant]", "path.error_samples=0")
        rest = (f"steps={size.steps}", f"seed={self.seed}", f"threads={torch.get_num_threads()}", "ladder.machine=[]")
        words = ("data=digits", "optimizer.batch=16", *sizes, *path, *rest, *self.words, *more)
        setting = prepare(compose(words))
        if setting.sweep is None:
            return setting
        return replace(setting, sweep=replace(setting.sweep, points=size.train + torch.arange(size.read)))

    @cached_property
    def rerun(self) -> Rerun:
        """What trains again."""
        setting = self.setting()
        return again(setting.experiment, setting.problem, setting.descent.step_size, self.size.steps)

    @cached_property
    def read(self) -> Float[Tensor, "point *shape"]:
        """The points whose outputs are predicted."""
        return self.setting().problem.inputs[self.size.train :]

    def contributions(self) -> Float[Tensor, "point train"]:
        """What examples added by exact secants, taken off."""
        with tempfile.TemporaryDirectory() as folder:
            state = begin(self.setting(), Deaf(folder).trajectory)
            go(state, Deaf(folder))
            for _ in state.steps_back():
                pass
            return -state.accumulator.integrals["secant"].parts[1][self.size.train :, 0]

    def effects(self, kind: str) -> Float[Tensor, "point train"]:
        """What the sweep back says; the path is not integrated."""
        with tempfile.TemporaryDirectory() as folder:
            state = begin(self.setting(f"path.effects={kind}", "path.rule=[left]"), Deaf(folder).trajectory)
            go(state, Deaf(folder))
            if state.effects is None:
                raise Mistake("no effects were asked for")
            state.effects.recording.close(state.step, state.weights)  # which integrating the path would have done
            for _ in state.sweeps_back():
                pass
            return state.effects.effects[:, 0]

    @property
    def scores(self) -> dict[str, Callable[[], Float[Tensor, "point train"]]]:
        """Every score, by its name."""
        given = (self.rerun, self.read)
        return {
            "effect": partial(self.effects, "true"),
            "one step": partial(self.effects, "one_step"),
            "contribution": self.contributions,
            "TracIn, every step": partial(tracin, *given),
            "last gradients": partial(last_product, *given),
            "influence, .1": partial(influence, *given, 0.1),
            "influence, .01": partial(influence, *given, 0.01),
        }

    def groups(self) -> dict[str, Float[Tensor, "group train"]]:
        """Who leaves: 1 for those, 0 for the others."""
        train, generator = self.size.train, stream("left out", self.seed)
        drawn = torch.rand(GROUPS, train, generator=generator, dtype=torch.float64).argsort(1).argsort(1)
        shares = {"5 %": max(1, train // 20), "50 %": train // 2}
        return {"one": torch.eye(train).double()} | {name: (drawn < many).double() for name, many in shares.items()}

    def changes(self, left: Float[Tensor, "group train"]) -> Float[Tensor, "group point"]:
        """What the outputs change by when groups are left out."""
        everyone = self.rerun.everyone
        ends = trained(self.rerun, torch.cat([everyone[None], everyone - left]))
        with torch.no_grad():
            outputs = torch.stack([self.rerun.outputs(end, self.read)[:, 0] for end in ends])
        return outputs[1:] - outputs[0]


@dataclass(frozen=True)
class Judged:
    """The correlations of a score by who left, and how long it took."""

    correlations: Mapping[str, float]
    seconds: float


def judged(case: Case) -> dict[str, Judged]:
    """Hold every score against trainings; those take part as well, for their time."""
    start = perf_counter()
    groups = case.groups()
    actual = {name: case.changes(left) for name, left in groups.items()}
    truth = Judged({}, perf_counter() - start)
    found = {}
    for name, tell in case.scores.items():
        start = perf_counter()
        told = tell()
        taken = perf_counter() - start
        found[name] = Judged({who: score(left @ told.t(), actual[who]) for who, left in groups.items()}, taken)
    return found | {"retraining": truth}


def report(quick: bool = False) -> str:
    """A line for every score of every training."""
    size, rows, spread = (QUICK if quick else FULL), [], 0.0
    for activation in ACTIVATIONS:
        for name, (words, longer) in TRAININGS.items():
            taken = size._replace(steps=size.steps * longer)
            cases = [Case((*words, f"model.activation={activation}"), taken, seed) for seed in range(size.seeds)]
            several = [judged(case) for case in cases]
            for kind in several[0]:
                each = [one[kind] for one in several]
                rows.append([f"{activation}, {name}", kind, *line(each)])
                spread = max([spread, *(deviation(each, who) for who in each[0].correlations)])
    title = (
        f"Attribution: {size.train} digits of two classes, MLP of width {size.width}, {size.steps} steps of 16, "
        f"{size.read} test points, seeds: {size.seeds}; largest deviation between seeds {spread:.2f}"
    )
    return table(title, ("training", "score", "one", "5 %", "50 %", "s"), rows)


def line(each: list[Judged]) -> list[str]:
    """The means over seeds; trainings need not be correlated with themselves."""
    whos = ("one", "5 %", "50 %")
    means = [f"{mean(one.correlations[who] for one in each):.2f}" if each[0].correlations else "" for who in whos]
    return [*means, f"{mean(one.seconds for one in each):.2f}"]


def deviation(each: list[Judged], who: str) -> float:
    """The standard deviation between seeds, of one correlation."""
    return stdev([one.correlations[who] for one in each]) if len(each) > 1 else 0.0
