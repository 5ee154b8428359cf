"""An ensemble beside both processes: how far its mean and its spread are from theirs.

    mean        √mean_x ((f̄(x) − μ(x)) √n/σ(x))²    about 1 where n networks follow the process: standard errors
    worst       max_x |f̄(x) − μ(x)| √n/σ(x)         the same at the worst point
    deviation   mean_x s(x)/σ(x)                     about 1

Two kinds of networks, those that train all layers and those that train the readout alone, are held against two
processes, the one of the tangent kernel and the one of the NNGP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
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


@dataclass(frozen=True)
class Band:
    """A mean and a deviation are known at every point."""

    mean: Float[Tensor, " point"]
    deviation: Float[Tensor, " point"]


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind were trained, and should be this process."""

    name: str  # all layers, readout
    process: str  # ntk, nngp
    outputs: Float[Tensor, "network point"]
    theory: Band
    step_size: float

    @property
    def observed(self) -> Band:
        """The mean and the deviation of the networks' outputs."""
        return Band(self.outputs.mean(0), self.outputs.std(0))


@dataclass(frozen=True)
class Comparison:
    """One kind of networks held against one process, at so many points that were not learned; NaN where not all
    networks are finite.
    """

    networks: str
    process: str
    count: int
    mean: float
    deviation: float
    worst: float
    points: int


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
    limit, own = kernels(wide, inputs, given.train, experiment), variances(wide, inputs, experiment)
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
        theory = band(kernel, limit, own, modes, DescentGain(size / given.divisor, experiment.steps), targets)
        found.append(TrainedNetworks(name, process, outputs[..., 0].cpu(), theory, size))
    return found


def band(
    kernel: Float[Tensor, "point train"],
    limit: LimitKernels,
    own: Float[Tensor, " point"],
    modes: Modes,
    gain: DescentGain,
    targets: Float[Tensor, "train 1"],
) -> Band:
    """Find the process of networks that train with this kernel."""
    prior = Kernels(limit.start[: len(targets)], limit.start)
    process = Ensemble(kernel, prior, modes.at(gain))
    return Band(process.mean(targets)[:, 0].cpu(), process.variance(own).clamp(min=0).sqrt().cpu())


def variances(network: Network, inputs: Float[Tensor, "point *shape"], experiment: Experiment) -> Tensor:
    """Find the variances α²𝒢(x, x) of outputs before training."""
    everywhere = slice(0, len(inputs))
    found = compute(network, BlockPlace(everywhere, everywhere, same=True), inputs, memory_gb=experiment.room_gb / 4)
    return experiment.init.alpha**2 * found.nngp.diagonal()


def comparisons(kinds: list[TrainedNetworks], train: int) -> list[Comparison]:
    """Hold every kind of networks against every process, at the points behind the first `train`."""
    return [comparison(networks, process, train) for networks in kinds for process in kinds]


def comparison(networks: TrainedNetworks, process: TrainedNetworks, train: int) -> Comparison:
    """Hold networks against a process, over points where the process still has a spread."""
    theory, seen, count = process.theory, networks.observed, len(networks.outputs)
    spread = theory.deviation[train:]
    random = ~(spread <= 0)  # a spread that is no number must be heard of
    errors = ((seen.mean - theory.mean)[train:] / spread)[random] * count**0.5
    ratio = float((seen.deviation[train:] / spread)[random].mean())
    worst = float(errors.abs().max()) if len(errors) else float("nan")
    mean = float(errors.square().mean().sqrt())
    return Comparison(networks.name, process.process, count, mean, ratio, worst, len(errors))
