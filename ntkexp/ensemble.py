"""Ensembles of networks on a one-dimensional problem, compared with Gaussian processes.

At infinite width, the outputs of trained networks are draws of a Gaussian process. If
all layers are trained, its mean and covariance follow from the tangent kernel (NTK) and
the NNGP kernel. If only the readout is trained, they follow from the NNGP kernel
alone."""

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

from ntkexp.closed_form import DescentGain, Ensemble, Kernels, Learned, modes_of
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
from ntkexp.text import short

# --- A one-dimensional problem: inputs on a line or a circle, with one target each.


NORM_TOLERANCE = 1e-6  # tolerance for ‖x‖ = 1 on the unit circle


@dataclass(frozen=True)
class EnsembleProblem:
    """The points of a one-dimensional problem. The training examples come first, then
    all other points sorted by position."""

    inputs: Float[Tensor, " point *shape"]
    # position of each point on the line, or angle on the circle
    places: Float[Tensor, " point"]
    targets: Float[Tensor, "point out"]
    train: int  # number of training examples
    axis: str  # label of the positions: input or angle
    divisor: float  # number that divides the training objective, Σ½(f − y)²/divisor


def problem(experiment: Experiment) -> EnsembleProblem:
    """Draw the data of an experiment.

    Raise if the Gaussian processes do not describe its training.
    """
    refuse_other(experiment)
    data = experiment.draw()
    encoded = targets(data, experiment.loss)
    splits = (data.train, data.query, data.test)
    inputs = torch.cat([split.inputs for split in splits])
    positions, axis = positions_of(inputs.flatten(1))
    train = len(data.train.inputs)
    order = torch.cat([torch.arange(train), train + positions[train:].argsort()])
    divisor = experiment.loss.divisor(train) / experiment.loss.curvature
    return EnsembleProblem(
        inputs[order], positions[order], encoded[order], train, axis, divisor
    )


def positions_of(
    inputs: Float[Tensor, "point feature"],
) -> tuple[Float[Tensor, " point"], str]:
    """Return the positions of inputs on a line or on the unit circle, and their label."""
    features = inputs.shape[1]
    if features == 1:
        return inputs[:, 0], "input"
    is_unit = (inputs.norm(dim=1) - 1).abs() < NORM_TOLERANCE
    if features == 2 and is_unit.all():
        return torch.atan2(inputs[:, 1], inputs[:, 0]), "angle"
    raise Mistake(
        f"an ensemble needs one-dimensional inputs, and the data has inputs of {features} numbers; "
        "choose data=circle, or data=table with one column besides the target"
    )


def targets(data: Data, loss: AbstractLoss) -> Float[Tensor, "point 1"]:
    """Return the targets of the loss at all points.
    Raise if there are several outputs."""
    target = torch.cat([data.train.target, data.query.target, data.test.target])
    encoded = loss.targets(target, len(data.classes))
    if encoded.shape[1] != 1:
        raise Mistake(
            "an ensemble consists of networks with one output, and the data has "
            f"{encoded.shape[1]}; choose data=circle"
        )
    return encoded


def refuse_other(experiment: Experiment) -> None:
    """Raise unless the initial outputs are random and training is plain gradient
    descent."""
    optimizer = experiment.optimizer
    if not experiment.loss.is_quadratic or type(optimizer) is not GD:
        raise Mistake(
            "the processes describe loss=squared and optimizer=gd; choose them"
        )
    if optimizer.weight_decay or optimizer.clip_norm or optimizer.layers:
        raise Mistake(
            "the processes describe plain gradient descent; leave out weight decay, clipping and "
            "step sizes of layers"
        )
    steps = experiment.steps
    equal = all(experiment.schedule.factor(step, steps) == 1.0 for step in range(steps))
    if experiment.stop_at_loss is not None or not equal:
        raise Mistake(
            "the processes describe equal steps; leave out stop_at_loss, schedule and warm-up"
        )
    if experiment.switches:
        raise Mistake("the processes describe one data set; leave out data=sequence")
    init = experiment.init
    is_plain = not (init.antisymmetric or init.centred or init.parent)
    if not (isinstance(init, NTK) and is_plain):
        raise Mistake(
            "the processes start from random outputs; choose init=ntk, neither antisymmetric nor "
            "centred, and without init.parent"
        )


@dataclass(frozen=True)
class StackedNetworks:
    """Networks of one architecture, with their weights stacked along a first axis for
    `vmap`.

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

    def outputs(
        self, x: Float[Tensor, " point *shape"]
    ) -> Float[Tensor, "network point out"]:
        run = vmap(
            lambda w, b: functional_call(self.module, (w, b), (x,)), in_dims=(0, 0)
        )
        outputs: Tensor = run(self.weights, self.buffers)
        return outputs

    def tangent_kernels(
        self, x: Float[Tensor, " point *shape"]
    ) -> Float[Tensor, "network point point_"]:
        """Return the tangent kernel of each network between all points.
        There is one output."""
        kernels = []
        for k in range(len(next(iter(self.weights.values())))):
            weights = {name: weight[k] for name, weight in self.weights.items()}
            kernels.append(tangent_kernel(self.module, x, weights=weights)[:, 0, :, 0])
        return torch.stack(kernels)


def stacked(modules: Sequence[nn.Module]) -> StackedNetworks:
    """Stack the weights of modules with the same architecture."""
    weights, buffers = stack_module_state(list(modules))
    detached = {name: weight.detach() for name, weight in weights.items()}
    return StackedNetworks(modules[0], detached, buffers)


# --- Training an ensemble of networks with different seeds,
# in all layers or only in the readout.


# maximum total number of weights of networks that are trained together
WEIGHTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class EnsembleTraining:
    """The training of an ensemble: gradient descent on Σ½(f − y)²/divisor, summed over
    the first `len(targets)` points."""

    inputs: Float[Tensor, " point *shape"]
    targets: Float[Tensor, "train out"]
    size: float  # the step size
    steps: int
    divisor: float
    readout: bool  # True if only the last layer is trained

    def outputs(
        self,
        modules: Sequence[nn.Module],
        report_progress: Callable[[int], None] = lambda networks: None,
    ) -> Float[Tensor, "network point out"]:
        """Train the modules and return their outputs.

        Call `report_progress` with the number of trained modules.
        """
        return self.outputs_at((self.steps,), modules, report_progress)[self.steps]

    def outputs_at(
        self,
        times: Sequence[int],
        modules: Sequence[nn.Module],
        report_progress: Callable[[int], None] = lambda networks: None,
    ) -> dict[int, Float[Tensor, "network point out"]]:
        """Train the modules and return their outputs after each number
        of steps in `times`."""
        parameters = sum(weight.numel() for weight in modules[0].parameters())
        group_size = max(1, WEIGHTS_AT_ONCE // parameters)
        outputs: dict[int, list[Tensor]] = {time: [] for time in times}
        for start in range(0, len(modules), group_size):
            group = modules[start : start + group_size]
            for time, networks in enumerate(self.course(stacked(group))):
                if time in outputs:
                    with torch.no_grad():
                        outputs[time].append(networks.outputs(self.inputs))
            report_progress(start + len(group))
        return {time: torch.cat(parts) for time, parts in outputs.items()}

    def trained(self, networks: StackedNetworks) -> StackedNetworks:
        """Return the networks after the last step."""
        return deque(self.course(networks), maxlen=1).pop()

    def course(self, networks: StackedNetworks) -> Iterator[StackedNetworks]:
        """Yield the networks before training and after every step.

        The objective is the sum of the losses of all networks, so the gradient of a
        network does not depend on the other networks."""
        weights = networks.weights
        inputs = self.inputs[: len(self.targets)]
        trained = list(weights)
        if self.readout:  # only the last layer, such as net.3.weight and net.3.bias
            layer = trained[-1].rpartition(".")[0]
            trained = [name for name in trained if name.rpartition(".")[0] == layer]
        yield networks
        for _ in range(self.steps):
            free = {name: weights[name].detach().requires_grad_() for name in trained}
            outputs = replace(networks, weights={**weights, **free}).outputs(inputs)
            loss = (outputs - self.targets).square().sum() / (2 * self.divisor)
            gradients = torch.autograd.grad(loss, list(free.values()))
            # θ ← θ − η ∇L
            weights = dict(weights)
            for name, gradient in zip(trained, gradients, strict=True):
                weights[name] = weights[name] - self.size * gradient
            yield replace(networks, weights=weights)


# --- The test: could the networks be draws of a Gaussian process?
#
# The process has mean μ, covariance C and standard deviation σ. n networks have mean
# f̄, covariance S and standard deviation s at p points. If the networks are draws of
# the process, `mean`, `deviation` and `covariance` are about 1:
#
#     mean        √mean_x ((f̄(x) − μ(x)) √n/σ(x))²       in standard errors
#     worst       max_x |f̄(x) − μ(x)| √n/σ(x)            in standard errors
#     deviation   mean_x s(x)/σ(x)
#     covariance  √(Σ_xx′ ((S − C)(x, x′)/σ(x)σ(x′))² (n − 1)/(p² + Σ_xx′ (C(x, x′)/σ(x)σ(x′))²))
#     chance      the p-value. For `mean` and for `covariance`, find the fraction of simulated
#                 ensembles with at least this value. The p-value is twice the smaller fraction.
#
# Both kinds of networks (trained in all layers, or only in the readout) are compared
# with both processes. A point is compared only if σ is at least a tenth of the standard
# deviation before training. Close to training examples, σ almost vanishes, so any
# effect of finite width would be many standard errors.


# minimum deviation σ at a compared point, relative to σ before training
LEAST_DEVIATION = 0.1
SIMULATED_ENSEMBLES = 999  # gives p-values with a resolution of 0.001
REJECTION_LEVEL = 0.05  # smaller p-values reject the process
NUMBERS_AT_ONCE = 1 << 21  # numbers in one batch of simulated ensembles
# axes with a smaller share of the total variance are not simulated
SMALL_EIGENVALUE = 1e-5


@dataclass(frozen=True)
class Band:
    """The mean and the standard deviation of outputs at every point."""

    mean: Float[Tensor, " point"]
    deviation: Float[Tensor, " point"]


@dataclass(frozen=True)
class Process:
    """The mean and covariance of a Gaussian process at all points."""

    mean: Float[Tensor, " point"]
    covariance: Float[Tensor, "point point"]
    before: Float[Tensor, " point"]  # the standard deviation before training

    @cached_property
    def deviation(self) -> Float[Tensor, " point"]:
        return self.covariance.diagonal().clamp(min=0).sqrt()


@dataclass(frozen=True)
class TrainedNetworks:
    """Trained networks of one kind, and the process that describes them
    at infinite width."""

    name: str  # trained parts: "all layers" or "readout"
    process: str  # kernel of the process: "ntk" or "nngp"
    outputs: Float[Tensor, "network point"]
    theory: Process
    step_size: float

    @property
    def observed(self) -> Band:
        return Band(self.outputs.mean(0), self.outputs.std(0))


@dataclass(frozen=True)
class Comparison:
    """The comparison of one kind of networks with one Gaussian process. The numbers are
    NaN if outputs are not finite."""

    networks: str
    process: str
    count: int
    mean: float
    deviation: float
    worst: float
    points: int  # number of compared points
    among: int  # number of points that are not training examples
    covariance: float
    chance: float  # the p-value

    @property
    def follows(self) -> bool:
        """True if the test does not reject the process."""
        return self.chance >= REJECTION_LEVEL


@dataclass(frozen=True)
class Reference:
    """A Gaussian process that is compared with networks, at the compared points.
    Outputs are expressed in standard deviations of the process."""

    process: TrainedNetworks  # its `theory` is the mean and covariance of the process
    train: int  # number of training examples
    count: int  # number of networks that are compared with the process

    @cached_property
    def where(self) -> Int[Tensor, " kept"]:
        """The indices of the compared points.

        A point is also compared if σ is NaN, so that the statistics become NaN.
        """
        theory = self.process.theory
        pinned = theory.deviation <= LEAST_DEVIATION * theory.before
        return self.train + (~pinned[self.train :]).nonzero()[:, 0]

    @cached_property
    def correlation(self) -> Float[Tensor, "kept kept"]:
        """The correlation of the process between points, C(x, x′)/σ(x)σ(x′)."""
        theory = self.process.theory
        scale = 1 / theory.deviation[self.where]
        covariance = theory.covariance[self.where][:, self.where]
        return covariance * scale * scale[:, None]

    def errors(
        self, outputs: Float[Tensor, "network point"]
    ) -> Float[Tensor, "network kept"]:
        """Return the error of each network f in standard deviations of the process:
        (f(x) − μ(x))/σ(x)."""
        theory = self.process.theory
        errors = (outputs - theory.mean) / theory.deviation
        return errors[:, self.where]

    def distances(
        self,
        errors: Float[Tensor, "*draw network axis"],
        expected: Float[Tensor, "axis axis"],
    ) -> Float[Tensor, "*draw 2"]:
        """Return the statistics `mean` and `covariance` above: the distance of the
        mean error from 0, and of the covariance of errors from `expected`.

        Both distances are invariant under orthogonal transformations of the axes."""
        n = errors.shape[-2]
        points = len(self.where)
        mean = errors.mean(-2)
        mean_square = n * mean.square().sum(-1) / points
        centred = errors - mean[..., None, :]
        covariance = centred.mT @ centred / (n - 1)
        usual = points**2 + self.correlation.square().sum()
        covariance_square = (
            (n - 1) * (covariance - expected).square().sum((-2, -1)) / usual
        )
        return torch.stack((mean_square, covariance_square), dim=-1).sqrt()

    @cached_property
    def drawn(self) -> Float[Tensor, "draw 2"]:
        """The distances of simulated ensembles, each with `count` draws of the process.

        The draws use the eigenvectors of the correlation as axes, because `distances`
        is invariant under rotations."""
        values = torch.linalg.eigvalsh(self.correlation)
        values = values[values > SMALL_EIGENVALUE * values.sum()]
        generator = stream("process", self.count, len(self.where))
        parts = []
        at_once = max(1, NUMBERS_AT_ONCE // (self.count * len(values)))
        for first in range(0, SIMULATED_ENSEMBLES, at_once):
            shape = (min(at_once, SIMULATED_ENSEMBLES - first), self.count, len(values))
            normal = torch.randn(shape, generator=generator, dtype=values.dtype)
            parts.append(self.distances(normal * values.sqrt(), values.diag()))
        return torch.cat(parts)

    def chance(self, distances: Float[Tensor, "2"]) -> float:
        """Return the p-value `chance` above, for the distances of mean and covariance."""
        if not distances.isfinite().all():
            return math.nan
        farther = (self.drawn >= distances).sum(0)
        return min(1.0, 2 * (1 + int(farther.min())) / (1 + SIMULATED_ENSEMBLES))


@dataclass(frozen=True)
class WideKernels:
    """The kernels of networks of infinite width, of the function f with its scale α."""

    tangent: Float[Tensor, "point train"]
    covariance: Float[Tensor, "point train"]  # of the outputs before training
    covariance_everywhere: Float[Tensor, "point point"]


def wide_kernels(
    experiment: Experiment, inputs: Float[Tensor, " point *shape"], train: int
) -> WideKernels:
    """Compute α²Θ(x, X), α²𝒢(x, X), and α²𝒢(x, x′) between all points."""
    task = LearningTask(tuple(inputs.shape[1:]), 1)
    network = experiment.model.limit(experiment.init, task)
    limit = infinite_kernels(network, inputs, train, experiment)
    everywhere = slice(0, len(inputs))
    block = BlockSlices(everywhere, everywhere, same=True)
    nngp = compute(network, block, inputs, budget=experiment.budget.part(4)).nngp
    return WideKernels(limit.tangent, limit.start, experiment.init.alpha**2 * nngp)


def ensemble(
    experiment: Experiment,
    given: EnsembleProblem,
    count: int,
    report_progress: Callable[[str, int], None],
) -> list[TrainedNetworks]:
    """Train `count` networks in all layers, and `count` networks only in the readout.
    The step size of each kind depends on λ_max of its kernel.

    `report_progress` receives the kind and the number of finished networks.
    """
    kind = {"device": experiment.device, "dtype": getattr(torch, experiment.dtype)}
    inputs = given.inputs.to(**kind)
    targets = given.targets[: given.train].to(**kind)
    wide = wide_kernels(experiment, inputs, given.train)
    data = experiment.draw()
    modules = [
        draw_network(experiment.model_copy(update={"seed": seed}), data, 1)
        for seed in range(experiment.seed, experiment.seed + count)
    ]
    kinds = []
    for name, process, kernel in (
        ("all layers", "ntk", wide.tangent),
        ("readout", "nngp", wide.covariance),
    ):
        modes = modes_of(kernel[: given.train])
        largest_stable = 2 * given.divisor / float(modes.values[-1])
        size = experiment.optimizer.chosen_step(largest_stable)
        if size > largest_stable:
            raise Mistake(
                f"optimizer: steps of {short(size)} diverge with the {process.upper()} "
                f"kernel; take steps below {short(largest_stable)}"
            )
        training = EnsembleTraining(
            inputs,
            targets,
            size,
            experiment.steps,
            divisor=given.divisor,
            readout=process == "nngp",
        )
        outputs = training.outputs(modules, partial(report_progress, name))[..., 0]
        # the Gaussian process after the same training
        gain = DescentGain(size / given.divisor, experiment.steps)
        theory = trained_process(wide, kernel, modes.at(gain), targets)
        kinds.append(TrainedNetworks(name, process, outputs.cpu(), theory, size))
    return kinds


def trained_process(
    wide: WideKernels,
    kernel: Float[Tensor, "point train"],
    learned: Learned,
    targets: Float[Tensor, "train out"],
) -> Process:
    """Return the process of networks of infinite width that train with this kernel."""
    train = len(targets)
    prior = Kernels(wide.covariance[:train], wide.covariance)
    trained = Ensemble(kernel, prior, learned)
    start = wide.covariance_everywhere
    return Process(
        mean=trained.mean(targets)[:, 0].cpu().double(),
        covariance=trained.covariance(start).cpu().double(),
        before=start.diagonal().sqrt().cpu().double(),
    )


def comparisons(kinds: Sequence[TrainedNetworks], train: int) -> list[Comparison]:
    """Compare every kind of networks with every Gaussian process,
    at points outside the training set."""
    references = [Reference(process, train, len(process.outputs)) for process in kinds]
    return [
        comparison(networks, reference)
        for networks in kinds
        for reference in references
    ]


def comparison(networks: TrainedNetworks, reference: Reference) -> Comparison:
    """Compare one kind of networks with one Gaussian process."""
    errors = reference.errors(networks.outputs.to(reference.correlation))
    distances = reference.distances(errors, reference.correlation)
    count = len(errors)
    points = len(reference.where)
    worst = errors.mean(0).abs() * count**0.5
    ratio = (networks.observed.deviation / reference.process.theory.deviation)[
        reference.where
    ]
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
