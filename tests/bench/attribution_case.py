"""One training of the attribution bench: what is asked of it, what scores say, and what is handed to other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from time import process_time
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_network, draw_problem
from ntkexp.model.functional import weights_of
from ntkexp.removal.rerun import Rerun, again, retrain
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.bench.attribution_asked import AbstractAsked
from tests.bench.attribution_effects import effects
from tests.bench.attribution_scores import damping_of, end_of, influence, last_product, tracin
from tests.bench.backward import Deaf

DAMPING = 0.1  # of influence functions, in mean eigenvalues; .01 did worse
MODELS = 5  # that TRAK, and `5 effects`, average over
DIMENSION = 32  # that TRAK projects to; 8 and 16 do a little better, 64 does worse
BETWEEN = 1000  # from the seed of a training to that of the next one on the same data


class Size(NamedTuple):
    """How much is trained and read, how many leave, and how many trainings start afresh."""

    train: int
    read: int
    steps: int
    batch: int
    groups: int  # of every larger removal
    alone: int  # examples that are left out one by one
    fresh: int


@dataclass(frozen=True)
class Case:
    """A training, and what is asked at points that are read. Other trainings on its data have numbers from 1 on."""

    words: tuple[str, ...]
    size: Size
    asked: AbstractAsked
    seed: int

    @cached_property
    def experiment(self) -> Experiment:
        """The training in the words of `ntkexp train`."""
        size = self.size
        sizes = (f"data.train={size.train}", f"data.probe={size.read}", "data.test=0", f"optimizer.batch={size.batch}")
        path = (f"path.attributed={size.read}", "path.probes=[probe]", "path.rule=[secant]", "path.error_samples=0")
        less = ("ladder.machine=[]", "path.count=2", f"threads={torch.get_num_threads()}")
        return compose((*sizes, *path, *less, f"steps={size.steps}", f"seed={self.seed}", *self.words))

    @cached_property
    def problem(self) -> Problem:
        """Its data, and its network at the start."""
        return draw_problem(self.experiment)

    @cached_property
    def rerun(self) -> Rerun:
        """What trains again."""
        experiment = self.experiment
        step_size = experiment.optimizer.chosen_step(nan)  # which is given in its words
        return again(experiment, self.problem, step_size, experiment.steps)

    def rerun_from(self, other: int) -> Rerun:
        """The same data, from another start and in another order."""
        seed = self.seed + BETWEEN * other
        experiment = self.experiment.model_copy(update={"seed": seed})
        module = draw_network(experiment, self.problem.data, self.problem.outputs)
        return replace(self.rerun, start=weights_of(module), seed=seed)

    @property
    def read(self) -> Float[Tensor, "point *shape"]:
        """The points that are asked about."""
        return self.problem.inputs[self.size.train :]

    @property
    def targets(self) -> Float[Tensor, "point out"]:
        """What outputs there should be."""
        return self.problem.targets[self.size.train :]

    def of(self, vector: Float[Tensor, " weight"]) -> Float[Tensor, " point"]:
        """What is asked, at these weights."""
        return self.asked.of(self.rerun.outputs(vector, self.read), self.targets)

    def contributions(self) -> Float[Tensor, "point train"]:
        """What examples added to outputs by exact secants, taken off, times the slope of what is asked at the end."""
        with tempfile.TemporaryDirectory() as folder:
            state = begin(prepare(self.experiment), Deaf(folder).trajectory)
            train_steps(state, Deaf(folder))
            for _ in state.steps_back():
                pass
            added = state.accumulator.integrals["secant"].parts[1][-self.size.read :]
        outputs = self.rerun.function(state.weights, self.read).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.asked.of(outputs, self.targets).sum(), outputs)
        return -torch.einsum("qci,qc->qi", added, slope)

    def mean_effects(self) -> Float[Tensor, "point train"]:
        """The mean of effects in several trainings on the same data."""
        reruns = [self.rerun, *(self.rerun_from(other) for other in range(1, MODELS))]
        return torch.stack([effects(rerun, self.of, one_step=False) for rerun in reruns]).mean(0)

    @property
    def scores(self) -> dict[str, Callable[[], Float[Tensor, "point train"]]]:
        """Every score of this project's, by its name."""
        return {
            "effect": lambda: effects(self.rerun, self.of, one_step=False),
            "one step": lambda: effects(self.rerun, self.of, one_step=True),
            "contrib.": self.contributions,
            "TracIn": lambda: tracin(self.rerun, self.of),
            "last": lambda: last_product(self.rerun, self.of),
            "infl.": lambda: influence(self.rerun, self.of, DAMPING),
            "5 effects": self.mean_effects,
        }

    @cached_property
    def handed(self) -> dict[str, Any]:
        """What other programs need: network, weights along the way and at the end, and data; with seconds for that."""
        rerun, start = self.rerun, process_time()
        steps = [taken.found["weights"][0] for taken in retrain(rerun, rerun.everyone[None])]
        seconds = process_time() - start
        ends = [end_of(rerun), *(end_of(self.rerun_from(k)) for k in range(1, MODELS))]
        return {
            "network": self.problem.module,
            "checkpoints": [rerun.flat.weights(each) for each in steps],
            "sizes": [rerun.size(step) for step in range(rerun.length)],
            "ends": [rerun.flat.weights(end) for end in ends],
            "inputs": rerun.inputs,
            "targets": rerun.targets,
            "read": self.read,
            "read_targets": self.targets,
            "loss": rerun.loss,
            "asked": self.asked,
            "damping": damping_of(rerun, ends[0], DAMPING),
            "dimension": DIMENSION,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        }
