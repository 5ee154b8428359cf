"""One training of the attribution bench: its scores, its true changes, and the inputs of other programs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import nan
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from ntkexp.config.compose import compose
from ntkexp.data.images import Digits
from ntkexp.effects.curvature import batched_map
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_network, draw_problem
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.model.functional import weights_of
from ntkexp.optimizer.base import Memory
from ntkexp.removal.rerun import TRAININGS_AT_ONCE, Rerun, gradient, next_state, rerun_of, retrain, trained
from ntkexp.run.loop import SilentListener, train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from ntkexp.stream import stream
from tests.bench.attribution_asked import AbstractAsked, OneOutput, OwnLoss
from tests.bench.attribution_scores import damping_of, effects, end_of, influence, last_product, tracin
from tests.bench.peers import PACKAGES

DAMPING = 0.1  # of influence functions, relative to the mean eigenvalue; 0.01 was worse
MODELS = 5  # trainings that TRAK and `5 effects` average over
DIMENSION = 32  # of TRAK's projection; 8 and 16 are slightly better, 64 is worse
SEED_DISTANCE = 1000  # distance of the seeds of trainings on the same data


class Size(NamedTuple):
    """The sizes of a training, its removals, and the number of fresh trainings."""

    train: int
    read: int
    steps: int
    batch: int
    groups: int  # of every larger removal
    alone: int  # examples, each left out alone
    fresh: int


@dataclass(frozen=True)
class Case:
    """A training, and the quantity F at the read points. Other trainings on the same data are numbered from 1."""

    words: tuple[str, ...]
    size: Size
    asked: AbstractAsked
    seed: int

    @cached_property
    def experiment(self) -> Experiment:
        """The training, composed as by `ntkexp train`."""
        size = self.size
        sizes = (f"data.train={size.train}", f"data.query={size.read}", "data.test=0", f"optimizer.batch={size.batch}")
        path = (f"path.attributed={size.read}", "path.queries=[query]", "path.rule=[secant]", "path.error_samples=0")
        less = ("ladder.machine=[]", "path.count=2", f"threads={torch.get_num_threads()}")
        return compose((*sizes, *path, *less, f"steps={size.steps}", f"seed={self.seed}", *self.words))

    @cached_property
    def problem(self) -> Problem:
        """The data, and the initial network."""
        return draw_problem(self.experiment)

    @cached_property
    def rerun(self) -> Rerun:
        """The training, which can be repeated."""
        experiment = self.experiment
        step_size = experiment.optimizer.chosen_step(nan)  # its words give the step size
        return rerun_of(experiment, self.problem, step_size, experiment.steps)

    def rerun_from(self, other: int) -> Rerun:
        """Return a training on the same data, with another start and order."""
        seed = self.seed + SEED_DISTANCE * other
        experiment = self.experiment.model_copy(update={"seed": seed})
        module = draw_network(experiment, self.problem.data, self.problem.outputs)
        return replace(self.rerun, start=weights_of(module), seed=seed)

    @property
    def read(self) -> Float[Tensor, " point *shape"]:
        """The points where F is read."""
        return self.problem.inputs[self.size.train :]

    @property
    def targets(self) -> Float[Tensor, "point out"]:
        """The targets of the read points."""
        return self.problem.targets[self.size.train :]

    def of(self, vector: Float[Tensor, " weight"]) -> Float[Tensor, " point"]:
        """Return F at these weights."""
        return self.asked.of(self.rerun.outputs(vector, self.read), self.targets)

    def contributions(self) -> Float[Tensor, "point train"]:
        """Return minus the exact contributions to outputs, times ∂F/∂f at the end."""
        with tempfile.TemporaryDirectory() as folder:
            listener = SilentListener(Path(folder))
            state = begin(prepare(self.experiment), listener.trajectory)
            train_steps(state, listener)
            for _ in state.steps_back():
                pass
            added = state.accumulator.integrals["secant"].parts[1][-self.size.read :]
        outputs = self.rerun.function(state.weights, self.read).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.asked.of(outputs, self.targets).sum(), outputs)
        return -torch.einsum("qci,qc->qi", added, slope)

    def mean_effects(self) -> Float[Tensor, "point train"]:
        """Return the mean effects of several trainings on the same data."""
        reruns = [self.rerun, *(self.rerun_from(other) for other in range(1, MODELS))]
        return torch.stack([effects(rerun, self.of, one_step=False) for rerun in reruns]).mean(0)

    @property
    def scores(self) -> dict[str, Callable[[], Float[Tensor, "point train"]]]:
        """The scores of ntkexp, by name."""
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
        """The inputs of other programs: network, checkpoints, final weights and data, and the CPU seconds of the
        training.
        """
        rerun, start = self.rerun, process_time()
        steps = [taken.recorded["weights"][0] for taken in retrain(rerun, rerun.unit_weights[None])]
        seconds = process_time() - start
        ends = [end_of(rerun), *(end_of(self.rerun_from(k)) for k in range(1, MODELS))]
        return {
            "network": self.problem.module,
            "checkpoints": [rerun.flat.weights(each) for each in steps],
            "sizes": [rerun.step_size_at(step) for step in range(rerun.length)],
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


# Kept results. The name of a file is a digest of words, sizes, seed and the versions of other programs. Raise `VERSION`
# if a score or a true change is computed in another way.


VERSION = 1
PEERS = {"dattri": ("TracIn", "infl.", "TRAK"), "traker": ("TRAK",)}
"""Other programs, and their scores."""


class Result(NamedTuple):
    """A result, and its CPU seconds."""

    found: Any
    seconds: float


@dataclass(frozen=True)
class Cells:
    """The kept results in a folder."""

    folder: Path

    def path(self, case: Case, name: str) -> Path:
        """Return the file of a cell."""
        made_by = (VERSION, torch.__version__, {program: PACKAGES[program][-1] for program in PEERS})
        digest = sha256(repr((made_by, case, name)).encode()).hexdigest()[:16]
        return self.folder / f"{name.replace(' ', '_')}-{digest}.pt"

    def read(self, case: Case, name: str) -> Result | None:
        """Return a cell, or None if it is missing."""
        path = self.path(case, name)
        if not path.exists():
            return None
        kept = torch.load(path)
        return Result(kept["found"], kept["seconds"])

    def whole(self, case: Case, names: tuple[str, ...]) -> Mapping[str, Result] | None:
        """Return the cells of a training, or None if one is missing."""
        found = {name: result for name in names if (result := self.read(case, name)) is not None}
        return found if len(found) == len(names) else None

    def keep(self, case: Case, name: str, result: Result) -> None:
        """Write a cell atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(case, name)
        part = path.with_suffix(".part")
        torch.save(result._asdict(), part)
        os.replace(part, path)


# The true changes: trainings without some examples.
#
#     one run     the same start, order and step sizes; the mean of a batch is over the remaining examples
#     fresh       random halves of the examples, each with its own start and order


FIRST_FRESH = 100 * MODELS  # number of the first fresh training; no score uses its seed


def removed_groups(case: Case) -> dict[str, Float[Tensor, "group train"]]:
    """Return the removed groups: 1 for removed examples, 0 for others."""
    size, generator = case.size, stream("left out", case.seed)
    order = torch.randperm(size.train, generator=generator)[: size.alone]
    alone = torch.eye(size.train, dtype=torch.float64)[order.sort().values]
    shares = {f"{share} %": max(1, size.train * share // 100) for share in (5, 50)} if size.groups else {}
    return {"one": alone} | {name: drawn(size.groups, many, size.train, generator) for name, many in shares.items()}


def halves(case: Case) -> Float[Tensor, "training train"]:
    """Return the examples that each fresh training leaves out."""
    size = case.size
    return drawn(size.fresh, size.train // 2, size.train, stream("left out", case.seed, 1))


def drawn(groups: int, many: int, train: int, generator: torch.Generator) -> Float[Tensor, "group train"]:
    """Draw random groups of one size."""
    return (torch.rand(groups, train, generator=generator, dtype=torch.float64).argsort(1).argsort(1) < many).double()


def changes(case: Case) -> dict[str, Tensor]:
    """Return the change of F caused by each removal, and the original outputs as `end`."""
    rerun, found = case.rerun, dict[str, Tensor]()
    for who, left in removed_groups(case).items():
        ends = trained(rerun, torch.cat([rerun.unit_weights[None], rerun.unit_weights - left]))
        with torch.no_grad():
            asked = torch.stack([case.of(end) for end in ends])
            found["end"] = rerun.outputs(ends[0], case.read)
        found[who] = asked[1:] - asked[0]
    return found


def fresh(case: Case) -> dict[str, Tensor]:
    """Return the outputs and −ℓ of trainings on halves, [training, point]."""
    ends = fresh_ends(case, 1 - halves(case))
    with torch.no_grad():
        outputs = [case.rerun.outputs(end, case.read) for end in ends]
        losses = [case.rerun.loss.value(each, case.targets) for each in outputs]
    return {"output": torch.stack(outputs)[:, :, 0], "-loss": -torch.stack(losses)}


def fresh_ends(case: Case, weight: Float[Tensor, "training train"]) -> Float[Tensor, "training weight"]:
    """Train several times, each with its own start, order and example weights. Return the final weights."""
    rerun, others = case.rerun, [case.rerun_from(FIRST_FRESH + k) for k in range(len(weight))]
    weights = torch.stack([rerun.flat.vector(other.start) for other in others])
    memory: Memory = {}
    for step in range(rerun.length):
        rows = torch.stack([other.batch(step).rows for other in others])
        left = weight.gather(1, rows)
        share = left * (rerun.scale / left.sum(1, keepdim=True).clamp(min=1.0))  # an empty batch has gradient 0
        with torch.no_grad(), plain_kernels():
            found = batched_map(
                lambda one, of, these: gradient(rerun, one, of, these),
                weights,
                share,
                rows,
                chunk_size=TRAININGS_AT_ONCE,
            )
        weights, memory = next_state(rerun, step, weights, found, memory)
    return weights


# The trainings of the attribution bench.
#
# two_digits    networks that distinguish two digits; for `one run` and `fresh seeds`
# tsloo         the protocol of arXiv:2605.18814: an MLP 784-16-16-10 that sees images of 28 × 28 pixels once


SEEDS = 3
Words: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Training:
    """A row of the tables."""

    name: str
    words: Words
    size: Size
    asked: AbstractAsked

    def case(self, seed: int) -> Case:
        """Return the training with this seed."""
        return Case(self.words, self.size, self.asked, seed)


class Network(NamedTuple):
    """A network, and step sizes that lead to a loss near 0.12 after 40 steps."""

    words: Words
    sgd: float
    momentum: float
    adam: float
    far: float | None = None  # of Adam, with twice as many steps; so large that effects fail

    @property
    def optimizers(self) -> dict[str, tuple[Words, int]]:
        """The words of each optimizer, and the factor of its number of steps."""
        found: dict[str, tuple[Words, int]] = {
            "SGD": (("optimizer=sgd", f"optimizer.step_size={self.sgd}"), 1),
            "momentum": (("optimizer=momentum", f"optimizer.step_size={self.momentum}"), 1),
            "Adam": (("optimizer=adam", f"optimizer.step_size={self.adam}"), 1),
            "AdamW": (("optimizer=adamw", f"optimizer.step_size={self.adam}", "optimizer.weight_decay=1"), 1),
        }
        if self.far is not None:
            found["far"] = (("optimizer=adam", f"optimizer.step_size={self.far}"), 2)
        return found


MLP, CNN = ("model=mlp", "model.width=32"), ("model=cnn", "model.width=8")
NETWORKS = {
    "MLP, tanh": Network((*MLP, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "MLP, relu": Network((*MLP, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "CNN, tanh": Network((*CNN, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.006),
    "CNN, relu": Network((*CNN, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.006),
    "transformer": Network(("model=transformer", "model.width=8"), sgd=0.1, momentum=0.02, adam=0.007),
}
BRIEF = ("MLP, relu, SGD", "CNN, tanh, momentum", "transformer, AdamW")  # the trainings of `--quick`
FEW = Size(train=60, read=12, steps=40, batch=16, groups=32, alone=60, fresh=100)
QUICK = Size(train=12, read=3, steps=3, batch=16, groups=4, alone=12, fresh=4)


def two_digits(*, quick: bool) -> list[Training]:
    """Return the trainings of all networks and optimizers, or a few of them."""
    size, found = QUICK if quick else FEW, list[Training]()
    for network, kind in NETWORKS.items():
        for optimizer, (words, longer) in kind.optimizers.items():
            name = f"{network}, {optimizer}"
            if not quick or name in BRIEF:
                steps = size._replace(steps=size.steps * longer)
                every = ("data=digits", *kind.words, *words)
                found.append(Training(name, every, steps, OneOutput()))
    return found


STANDARD = ("init=standard", "init.W_std=0.57735")  # the variance of PyTorch's initialization
ADAMW = ("optimizer=adamw", "optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0")
IMAGES = ("data=mnist", "data.classes=all", "data.standardise=none")  # between 0 and 1
ONCE = Size(train=960, read=30, steps=15, batch=64, groups=0, alone=200, fresh=0)
PAPER = Size(train=6000, read=500, steps=94, batch=64, groups=0, alone=200, fresh=0)
QUICK_ONCE = Size(train=64, read=3, steps=2, batch=32, groups=0, alone=8, fresh=0)


def tsloo(images: Path, size: Size, step_sizes: Sequence[float] = (1e-3, 1e-4, 1e-5)) -> list[Training]:
    """Return the trainings with both activations and every step size, on the images of a folder."""
    found = []
    for step in step_sizes:
        for activation in ("tanh", "relu"):
            network = ("model=mlp", "model.width=16", "model.depth=2", f"model.activation={activation}", *STANDARD)
            rest = ("loss=cross_entropy", *ADAMW, f"optimizer.step_size={step}", *IMAGES, f"data.path={images}")
            found.append(Training(f"{activation}, {step:.0e}", (*network, *rest), size, OwnLoss()))
    return found


def enlarged_digits(folder: Path) -> Path:
    """Write the digits, enlarged from 8 × 8 to 28 × 28 pixels, in the format of MNIST. Return the folder."""
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    if not (images.exists() and labels.exists()):
        pictures, classes = Digits(classes="all").pictures()
        large = interpolate(pictures.double() * (255 / Digits.white), size=(28, 28), mode="bilinear")
        folder.mkdir(parents=True, exist_ok=True)
        images.write_bytes(idx(large[:, 0].round()))
        labels.write_bytes(idx(classes))
    return folder


def idx(numbers: Tensor) -> bytes:
    """Return an array of bytes in the format of MNIST.

    >>> import torch
    >>> idx(torch.tensor([7, 9])).hex(" ")
    '00 00 08 01 00 00 00 02 07 09'
    """
    head = bytes([0, 0, 8, numbers.dim()]) + b"".join(length.to_bytes(4, "big") for length in numbers.shape)
    return head + numbers.byte().numpy().tobytes()
