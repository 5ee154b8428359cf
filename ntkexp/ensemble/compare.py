"""An ensemble beside both processes: could its networks be draws of them?

    mean        √mean_x ((f̄(x) − μ(x)) √n/σ(x))²    about 1 where n networks follow the process: standard errors
    worst       max_x |f̄(x) − μ(x)| √n/σ(x)         the same at the worst point
    deviation   mean_x s(x)/σ(x)                     about 1
    covariance  √(Σ_xx′ ((S − C)(x, x′)/σ(x)σ(x′))² (n − 1)/(p² + Σ_xx′ (C(x, x′)/σ(x)σ(x′))²))    about 1 over p points
    chance      how often n draws of the process are as far off, by mean or by covariance (the rarer, counted twice)

Two kinds of networks, those that train all layers and those that train the readout alone, are held against two
processes, the one of the tangent kernel and the one of the NNGP. They are compared where the process has kept a tenth
of the deviation that it had before training: next to what was learned it has hardly any, and in standard errors of
next to nothing the least that a finite width changes is as large as one likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.closed_form.ensemble import Ensemble, Kernels
from ntkexp.closed_form.gain import DescentGain
from ntkexp.closed_form.modes import Modes, modes_of
from ntkexp.ensemble.problem import EnsembleProblem
from ntkexp.ensemble.train import EnsembleTraining
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.infinite_width import kernels
from ntkexp.experiment.problem import draw_network
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.limit.network import Network
from ntkexp.machine.evidence import LimitKernels
from ntkexp.model.learning_task import LearningTask
from ntkexp.stream import stream

SPREAD = 0.1  # of the deviation before training: a process that has kept no more is pinned by what was learned
DRAWS = 999  # of as many networks: chances are known to a thousandth
LEVEL = 0.05  # chances below say that networks are no draws of a process
TOGETHER = 1 << 21  # numbers that are drawn at once
NOTHING = 1e-5  # of a covariance: what an axis has that need not be drawn


@dataclass(frozen=True)
class Band:
    """A mean and a deviation are known at every point."""

    mean: Float[Tensor, " point"]
    deviation: Float[Tensor, " point"]


@dataclass(frozen=True)
class Process:
    """A Gaussian process is known at every point."""

    mean: Float[Tensor, " point"]
    covariance: Float[Tensor, "point point"]
    before: Float[Tensor, " point"]  # the deviation before training

    @cached_property
    def deviation(self) -> Float[Tensor, " point"]:
        """The deviation at every point."""
        return self.covariance.diagonal().clamp(min=0).sqrt()


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind were trained, and should be this process."""

    name: str  # all layers, readout
    process: str  # ntk, nngp
    outputs: Float[Tensor, "network point"]
    theory: Process
    step_size: float

    @property
    def observed(self) -> Band:
        """The mean and the deviation of the networks' outputs."""
        return Band(self.outputs.mean(0), self.outputs.std(0))


@dataclass(frozen=True)
class Comparison:
    """One kind of networks held against one process, at so many of the points that were not learned; NaN where not all
    networks are finite.
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
    count: int  # networks that are held against it

    @cached_property
    def where(self) -> Int[Tensor, " kept"]:
        """Which points these are; a deviation that is no number must be heard of."""
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
        squares = n * mean.square().sum(-1) / points, (n - 1) * (covariance - expected).square().sum((-2, -1)) / usual
        return torch.stack(squares, dim=-1).sqrt()

    @cached_property
    def drawn(self) -> Float[Tensor, "draw 2"]:
        """Both distances of as many draws of the process as there are networks."""
        values = torch.linalg.eigvalsh(self.correlation)
        values = values[values > NOTHING * values.sum()]
        chance, found = stream("process", self.count, len(self.where)), []
        at_once = max(1, TOGETHER // (self.count * len(values)))
        for first in range(0, DRAWS, at_once):
            shape = (min(at_once, DRAWS - first), self.count, len(values))
            normal = torch.randn(shape, generator=chance, dtype=values.dtype)
            found.append(self.distances(normal * values.sqrt(), values.diag()))
        return torch.cat(found)

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
    limit, own = kernels(wide, inputs, given.train, experiment), start_covariance(wide, inputs, experiment)
    data = experiment.draw()
    seeds = range(experiment.seed, experiment.seed + count)
    modules = [draw_network(experiment.model_copy(update={"seed": seed}), data, 1) for seed in seeds]
    found = []
    for name, process, kernel in (("all layers", "ntk", limit.tangent), ("readout", "nngp", limit.start)):
        modes = modes_of(kernel[: given.train])
        size = experiment.optimizer.chosen_step(2 * given.divisor / float(modes.values[-1]))
        training = EnsembleTraining(
            inputs, targets, size, experiment.steps, divisor=given.divisor, readout=process == "nngp"
        )
        outputs = training.outputs(modules, partial(tell, name))
        theory = process_of(kernel, limit, own, modes, DescentGain(size / given.divisor, experiment.steps), targets)
        found.append(TrainedNetworks(name, process, outputs[..., 0].cpu(), theory, size))
    return found


def process_of(
    kernel: Float[Tensor, "point train"],
    limit: LimitKernels,
    own: Float[Tensor, "point point"],
    modes: Modes,
    gain: DescentGain,
    targets: Float[Tensor, "train 1"],
) -> Process:
    """Find the process of networks that train with this kernel."""
    prior = Kernels(limit.start[: len(targets)], limit.start)
    process = Ensemble(kernel, prior, modes.at(gain))
    found = (process.mean(targets)[:, 0], process.covariance(own), own.diagonal().sqrt())
    return Process(*(each.cpu().double() for each in found))


def start_covariance(
    network: Network, inputs: Float[Tensor, "point *shape"], experiment: Experiment
) -> Float[Tensor, "point point"]:
    """Find the covariances α²𝒢(x, x′) of outputs before training."""
    everywhere = slice(0, len(inputs))
    found = compute(network, BlockPlace(everywhere, everywhere, same=True), inputs, memory_gb=experiment.room_gb / 4)
    return experiment.init.alpha**2 * found.nngp


def comparisons(kinds: Sequence[TrainedNetworks], train: int) -> list[Comparison]:
    """Hold every kind of networks against every process, at the points behind the first `train`."""
    references = [Reference(process, train, len(process.outputs)) for process in kinds]
    return [comparison(networks, reference) for networks in kinds for reference in references]


def comparison(networks: TrainedNetworks, reference: Reference) -> Comparison:
    """Hold networks against a process, over points where the process has kept a spread."""
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
