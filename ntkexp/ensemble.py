"""Many networks from random starts on a one-dimensional problem, compared with both processes of infinite width."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ntkexp.closed_form import DescentGain, Ensemble, Kernels, modes_of
from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import draw_network, infinite_kernels
from ntkexp.init import NTK
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockSlices, compute
from ntkexp.loss import AbstractLoss
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask
from ntkexp.optimizer.descent import GD
from ntkexp.shapes import Weights
from ntkexp.stream import stream

# --- A one-dimensional problem for an ensemble: what is learned at which places along a line or a circle.


ROUND = 1e-6  # how far from 1 a norm may be on the unit circle


@dataclass(frozen=True)
class EnsembleProblem:
    """Points, the training examples first, then others in the order of their places."""

    inputs: Float[Tensor, "point *shape"]
    places: Float[Tensor, " point"]
    targets: Float[Tensor, "point out"]
    train: int
    axis: str  # what the places are
    divisor: float  # training makes the sum of ½(f − y)² over examples small, divided by this


def problem(experiment: Experiment) -> EnsembleProblem:
    """Draw the problem of an experiment that the processes are about; any other experiment is refused."""
    refuse_other(experiment)
    data = experiment.draw()
    encoded = targets(data, experiment.loss)
    everything = torch.cat([getattr(data, name).inputs for name in ("train", "probe", "test")])
    # The one dimension that the points have: a line, or the unit circle.
    flat = everything.flatten(1)
    if flat.shape[1] == 1:
        positions, axis = flat[:, 0], "input"
    elif flat.shape[1] == 2 and bool(((flat.norm(dim=1) - 1).abs() < ROUND).all()):
        positions, axis = torch.atan2(flat[:, 1], flat[:, 0]), "angle"
    else:
        raise Mistake(
            f"an ensemble is drawn over one dimension, and the data has inputs of {flat.shape[1]} numbers; choose "
            "data=circle, or data=table with one column beside the target"
        )
    train = len(data.train.inputs)
    order = torch.cat([torch.arange(train), train + positions[train:].argsort()])
    divisor = experiment.loss.divisor(train) / experiment.loss.curvature
    return EnsembleProblem(
        everything[order], positions[order], encoded[order], train, axis, divisor
    )


def targets(data: Data, loss: AbstractLoss) -> Float[Tensor, "point 1"]:
    """The targets as the loss compares outputs with them, in one column."""
    target = torch.cat([getattr(data, name).target for name in ("train", "probe", "test")])
    encoded = loss.targets(target, len(data.classes))
    if encoded.shape[1] != 1:
        raise Mistake(
            f"an ensemble is of networks with one output, and the data has {encoded.shape[1]}; choose data=circle"
        )
    return encoded


def refuse_other(experiment: Experiment) -> None:
    """Outputs before training must be random, and training plain."""
    if not experiment.loss.is_quadratic or type(experiment.optimizer) is not GD:
        raise Mistake("the processes are those of loss=squared and optimizer=gd; choose them")
    if (
        experiment.optimizer.weight_decay
        or experiment.optimizer.clip_norm
        or experiment.optimizer.layers
    ):
        raise Mistake(
            "the processes are those of plain gradient descent; leave out decay, clipping and layers' steps"
        )
    if experiment.stop_at_loss is not None or any(
        experiment.schedule.factor(step, experiment.steps) != 1.0
        for step in range(experiment.steps)
    ):
        raise Mistake(
            "the processes are those of equal steps; leave out stop_at_loss, schedule and warm-up"
        )
    if experiment.switches:
        raise Mistake("the processes are those of one data set; leave out data=sequence")
    init = experiment.init
    if not isinstance(init, NTK) or init.antisymmetric or init.centred:
        raise Mistake(
            "the processes start from random outputs; choose init=ntk, neither antisymmetric nor centred"
        )


@dataclass(frozen=True)
class StackedNetworks:
    """Networks of one shape with their weights stacked, so that all of them are run at once: the first axis of every
    weight counts networks; the module is one of them, and lends its shape.

    >>> layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    >>> for k, layer in enumerate(layers):
    ...     _ = nn.init.constant_(layer.weight, k + 2.0)
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> together = stacked(layers)
    >>> together.outputs(x)[..., 0].tolist(), together.tangent_kernels(x)[1].tolist()
    ([[2.0, 6.0], [3.0, 9.0]], [[1.0, 3.0], [3.0, 9.0]])
    """

    module: nn.Module
    weights: Weights
    buffers: Weights

    def outputs(self, x: Float[Tensor, "point *shape"]) -> Float[Tensor, "network point out"]:
        run = vmap(lambda w, b: functional_call(self.module, (w, b), (x,)), in_dims=(0, 0))
        outputs: Tensor = run(self.weights, self.buffers)
        return outputs

    def tangent_kernels(
        self, x: Float[Tensor, "point *shape"]
    ) -> Float[Tensor, "network point point_"]:
        """The tangent kernel of every network of one output, among the points."""
        count = len(next(iter(self.weights.values())))
        each = ({name: weight[k] for name, weight in self.weights.items()} for k in range(count))
        return torch.stack(
            [tangent_kernel(self.module, x, weights=weights)[:, 0, :, 0] for weights in each]
        )


def stacked(modules: Sequence[nn.Module]) -> StackedNetworks:
    """Stack the weights of modules that differ in nothing else."""
    weights, buffers = stack_module_state(list(modules))
    return StackedNetworks(
        modules[0], {name: weight.detach() for name, weight in weights.items()}, buffers
    )


# --- Networks that differ by their seeds alone, trained side by side by gradient descent, with all layers or the
# last.


TOGETHER = 1 << 22  # weights that are trained at once


@dataclass(frozen=True)
class EnsembleTraining:
    """So many steps are taken on the sum of ½(f − y)² over the first of the points, divided by `divisor`, by all layers
    or by the last alone.
    """

    inputs: Float[Tensor, "point *shape"]
    targets: Float[Tensor, "train out"]
    size: float
    steps: int
    divisor: float
    readout: bool

    def outputs(
        self, modules: Sequence[nn.Module], tell: Callable[[int], None] = lambda networks: None
    ) -> Float[Tensor, "network point out"]:
        """Train each module, and give its outputs at all points; `tell` hears how many are trained."""
        return self.outputs_at((self.steps,), modules, tell)[self.steps]

    def outputs_at(
        self,
        times: Sequence[int],
        modules: Sequence[nn.Module],
        tell: Callable[[int], None] = lambda networks: None,
    ) -> dict[int, Float[Tensor, "network point out"]]:
        """The same after each of these numbers of steps; some networks at once are trained together."""
        each = sum(weight.numel() for weight in modules[0].parameters())
        count, parts = max(1, TOGETHER // each), {time: list[Tensor]() for time in times}
        for start in range(0, len(modules), count):
            few = modules[start : start + count]
            for time, networks in enumerate(self.course(stacked(few))):
                if time in parts:
                    with torch.no_grad():
                        parts[time].append(networks.outputs(self.inputs))
            tell(start + len(few))
        return {time: torch.cat(found) for time, found in parts.items()}

    def trained(self, networks: StackedNetworks) -> StackedNetworks:
        """The networks after the last step; those of earlier steps are let go as it goes."""
        return deque(self.course(networks), maxlen=1).pop()

    def course(self, networks: StackedNetworks) -> Iterator[StackedNetworks]:
        """Go through training: the networks before it, and after every step. None knows of another, so their losses
        are added up.
        """
        weights, train = networks.weights, len(self.targets)
        moving = list(weights)
        if self.readout:  # the parameters of the last layer, such as net.3.weight and net.3.bias
            moving = [
                name for name in moving if name.rpartition(".")[0] == moving[-1].rpartition(".")[0]
            ]
        yield networks
        for _ in range(self.steps):
            free = {name: weights[name].detach().requires_grad_() for name in moving}
            missed = (
                replace(networks, weights={**weights, **free}).outputs(self.inputs[:train])
                - self.targets
            )
            gradients = torch.autograd.grad(
                missed.square().sum() / (2 * self.divisor), list(free.values())
            )
            moved = zip(moving, gradients, strict=True)
            weights = {
                **weights,
                **{name: weights[name] - self.size * gradient for name, gradient in moved},
            }
            yield replace(networks, weights=weights)


# --- An ensemble beside both processes: could its networks be draws of them?
#
#     mean        √mean_x ((f̄(x) − μ(x)) √n/σ(x))²    about 1 where n networks follow the process: standard errors
#     worst       max_x |f̄(x) − μ(x)| √n/σ(x)         the same at the worst point
#     deviation   mean_x s(x)/σ(x)                     about 1
#     covariance  √(Σ_xx′ ((S − C)(x, x′)/σ(x)σ(x′))² (n − 1)/(p² + Σ_xx′ (C(x, x′)/σ(x)σ(x′))²))    about 1 over p
#                 points
#     chance      how often n draws of the process are as far off, by mean or by covariance (the rarer, counted twice)
#
# Two kinds of networks, those that train all layers and those that train the readout alone, are compared with two
# processes, the one of the tangent kernel and the one of the NNGP. They are compared where the process has kept a
# tenth of the deviation that it had before training: next to what was learned it has hardly any, and in standard
# errors of next to nothing the least that a finite width changes is as large as one likes.


SPREAD = 0.1  # of the deviation before training: a process that has kept no more is pinned by what was learned
DRAWS = 999  # of as many networks: chances are known to a thousandth
LEVEL = 0.05  # chances below say that networks are no draws of a process
DRAWN_AT_ONCE = 1 << 21  # numbers that are drawn at once
NOTHING = 1e-5  # of a covariance: what an axis has that need not be drawn


@dataclass(frozen=True)
class Band:
    """A mean and a deviation at every point."""

    mean: Float[Tensor, " point"]
    deviation: Float[Tensor, " point"]


@dataclass(frozen=True)
class Process:
    """A Gaussian process at every point."""

    mean: Float[Tensor, " point"]
    covariance: Float[Tensor, "point point"]
    before: Float[Tensor, " point"]  # the deviation before training

    @cached_property
    def deviation(self) -> Float[Tensor, " point"]:
        return self.covariance.diagonal().clamp(min=0).sqrt()


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind after training, and the process that they should be."""

    name: str  # all layers, readout
    process: str  # ntk, nngp
    outputs: Float[Tensor, "network point"]
    theory: Process
    step_size: float

    @property
    def observed(self) -> Band:
        return Band(self.outputs.mean(0), self.outputs.std(0))


@dataclass(frozen=True)
class Comparison:
    """One kind of networks compared with one process, at the first `points` that were not learned; NaN where not
    all networks are finite.
    """

    networks: str
    process: str
    count: int
    mean: float
    deviation: float
    worst: float
    points: int
    among: int  # points that were not learned
    covariance: float
    chance: float

    @property
    def follows(self) -> bool:
        """Whether the networks could be draws of the process."""
        return self.chance >= LEVEL


@dataclass(frozen=True)
class Reference:
    """A process in units of its own deviation, at the points that were not learned and where it has kept some."""

    process: TrainedNetworks
    train: int
    count: int  # networks that are compared with it

    @cached_property
    def where(self) -> Int[Tensor, " kept"]:
        """Which points these are; a deviation that is not a number must be heard of."""
        theory = self.process.theory
        pinned = theory.deviation <= SPREAD * theory.before
        return self.train + (~pinned[self.train :]).nonzero()[:, 0]

    @cached_property
    def correlation(self) -> Float[Tensor, "kept kept"]:
        """C(x, x′)/σ(x)σ(x′)."""
        scale = 1 / self.process.theory.deviation[self.where]
        return self.process.theory.covariance[self.where][:, self.where] * scale * scale[:, None]

    def errors(self, outputs: Float[Tensor, "network point"]) -> Float[Tensor, "network kept"]:
        """How far each network is from the mean, in deviations."""
        theory = self.process.theory
        return (outputs[:, self.where] - theory.mean[self.where]) / theory.deviation[self.where]

    def distances(
        self, errors: Float[Tensor, "*draw network axis"], expected: Float[Tensor, "axis axis"]
    ) -> Float[Tensor, "*draw 2"]:
        """How far mean and covariance of these errors are from nothing and from what is expected, about 1 by chance;
        along whichever orthogonal axes.
        """
        n, points = errors.shape[-2], len(self.where)
        mean = errors.mean(-2)
        apart = errors - mean[..., None, :]
        covariance = apart.mT @ apart / (n - 1)
        usual = points**2 + self.correlation.square().sum()
        squares = (
            n * mean.square().sum(-1) / points,
            (n - 1) * (covariance - expected).square().sum((-2, -1)) / usual,
        )
        return torch.stack(squares, dim=-1).sqrt()

    @cached_property
    def drawn(self) -> Float[Tensor, "draw 2"]:
        """Both distances of as many draws of the process as there are networks."""
        values = torch.linalg.eigvalsh(self.correlation)
        values = values[values > NOTHING * values.sum()]
        chance, parts = stream("process", self.count, len(self.where)), []
        at_once = max(1, DRAWN_AT_ONCE // (self.count * len(values)))
        for first in range(0, DRAWS, at_once):
            shape = (min(at_once, DRAWS - first), self.count, len(values))
            normal = torch.randn(shape, generator=chance, dtype=values.dtype)
            parts.append(self.distances(normal * values.sqrt(), values.diag()))
        return torch.cat(parts)

    def chance(self, distances: Float[Tensor, "2"]) -> float:
        """How often draws of the process are so far off, by the distance that is the rarer."""
        if not distances.isfinite().all():
            return math.nan
        farther = (self.drawn >= distances).sum(0)
        return min(1.0, 2 * (1 + int(farther.min())) / (1 + DRAWS))


def ensemble(
    experiment: Experiment, given: EnsembleProblem, count: int, tell: Callable[[str, int], None]
) -> list[TrainedNetworks]:
    """Train `count` networks of both kinds, each with the step size that suits its kernel; `tell` hears which and how
    many.
    """
    task = LearningTask(tuple(given.inputs.shape[1:]), 1)
    wide = experiment.model.limit(experiment.init, task)
    kind = {"device": experiment.device, "dtype": getattr(torch, experiment.dtype)}
    inputs, targets = given.inputs.to(**kind), given.targets[: given.train].to(**kind)
    limit, everywhere = (
        infinite_kernels(wide, inputs, given.train, experiment),
        slice(0, len(inputs)),
    )
    whole = BlockSlices(everywhere, everywhere, same=True)
    own = (
        experiment.init.alpha**2
        * compute(wide, whole, inputs, memory_gb=experiment.room_gb / 4).nngp
    )  # α²𝒢(x, x′)
    prior = Kernels(limit.start[: given.train], limit.start)
    data = experiment.draw()
    seeds = range(experiment.seed, experiment.seed + count)
    modules = [
        draw_network(experiment.model_copy(update={"seed": seed}), data, 1) for seed in seeds
    ]
    found = []
    for name, process, kernel in (
        ("all layers", "ntk", limit.tangent),
        ("readout", "nngp", limit.start),
    ):
        modes = modes_of(kernel[: given.train])
        size = experiment.optimizer.chosen_step(2 * given.divisor / float(modes.values[-1]))
        training = EnsembleTraining(
            inputs,
            targets,
            size,
            experiment.steps,
            divisor=given.divisor,
            readout=process == "nngp",
        )
        outputs = training.outputs(modules, partial(tell, name))
        trained = Ensemble(
            kernel, prior, modes.at(DescentGain(size / given.divisor, experiment.steps))
        )
        theory = trained.mean(targets)[:, 0], trained.covariance(own), own.diagonal().sqrt()
        expected = Process(*(each.cpu().double() for each in theory))
        found.append(TrainedNetworks(name, process, outputs[..., 0].cpu(), expected, size))
    return found


def comparisons(kinds: Sequence[TrainedNetworks], train: int) -> list[Comparison]:
    """Compare every kind of networks with every process, at the points behind the first `train`."""
    references = [Reference(process, train, len(process.outputs)) for process in kinds]
    return [comparison(networks, reference) for networks in kinds for reference in references]


def comparison(networks: TrainedNetworks, reference: Reference) -> Comparison:
    """Compare networks with a process, over points where the process has kept a spread."""
    errors = reference.errors(networks.outputs.to(reference.correlation))
    distances, count = reference.distances(errors, reference.correlation), len(errors)
    points, worst = len(reference.where), errors.mean(0).abs() * count**0.5
    ratio = (networks.observed.deviation / reference.process.theory.deviation)[reference.where]
    return Comparison(
        networks=networks.name,
        process=reference.process.process,
        count=count,
        mean=float(distances[0]),
        deviation=float(ratio.mean()),
        worst=float(worst.max()) if points else math.nan,
        points=points,
        among=networks.outputs.shape[1] - reference.train,
        covariance=float(distances[1]),
        chance=reference.chance(distances),
    )
