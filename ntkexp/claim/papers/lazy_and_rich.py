"""Lazy and rich training, controlled by the scale α of the outputs.

AccuracyByScale     draw the accuracy against α
AfterKernel         compare a network and the regressions with its kernels
SilentAlignment     test if the kernel aligns with the targets before the loss falls
LateGeneralising    measure when a classifier generalises (grokking)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import jvp, vjp

from ntkexp.claim.expectation import select_rows
from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.look import MAIN
from ntkexp.claim.papers.wide_networks import network_of_width
from ntkexp.claim.trial import AbstractTrial, NetworkTrial, Rows, refuse_unnamed
from ntkexp.closed_form import FOREVER, modes_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data, Split
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.init import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.loss import centred_one_hot
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, LearningTask
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import MLP
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.statistics import alignment, kernel_change
from ntkexp.stream import stream
from ntkexp.text import percent, short

STEPS_PER_EIGENVALUE = 20
"""The largest eigenvalue of the kernel is recomputed after this many steps."""


@dataclass(frozen=True)
class ScaledFunction:
    """The function f = α (g(θ) − g(θ₀))."""

    function: Function
    start: Weights
    alpha: float

    def outputs(self, weights: Weights, x: Inputs) -> Float[Tensor, "point out"]:
        """Return f(x) = α (g(θ; x) − g(θ₀; x)), which is zero at the start."""
        return self.alpha * (self.function(weights, x) - self.function(self.start, x))


@dataclass(frozen=True)
class LearningStep:
    """A training step, with the outputs f and residuals f − y before the step."""

    before: Weights
    after: Weights
    size: float
    outputs: Float[Tensor, "train out"]
    residual: Float[Tensor, "train out"]

    @property
    def loss(self) -> float:
        """The mean of ½ ‖f − y‖², for outputs f and targets y, before the step."""
        return float(self.residual.square().sum() / (2 * len(self.residual)))


@dataclass(frozen=True)
class ScaledDescent:
    """Full-batch gradient descent of f = α (g(θ) − g(θ₀)) on the mean of ½ ‖f − y‖².

        θ ← θ − η/(α M) Σᵢ ∇g(θ; xᵢ) ℓ′ᵢ,    ℓ′ᵢ = f(xᵢ) − yᵢ,    η = fraction · 2M/λ_max

    M is the number of examples, and λ_max is the largest eigenvalue of the tangent
    kernel of g at the examples. λ_max grows in rich training, so it is recomputed every
    few steps. A step changes f by −η/M Σᵢ K̄(x, xᵢ) ℓ′ᵢ, where K̄ is the secant
    kernel of g. So the largest stable η does not depend on α. If a step would change
    the weights by more than the fraction `stride` of their norm, η is reduced."""

    scaled: ScaledFunction
    inputs: Float[Tensor, " train *shape"]
    targets: Float[Tensor, "train out"]
    # weights → λ_max, the largest eigenvalue of the tangent kernel of g
    largest: Callable[[Weights], float]
    fraction: float
    stride: float = math.inf

    def path(self, weights: Weights, steps: int) -> Iterator[LearningStep]:
        """Yield `steps` training steps, starting from `weights`."""
        count = len(self.targets)
        stable = 0.0
        alpha = self.scaled.alpha
        first = self.scaled.function(self.scaled.start, self.inputs).detach()
        for number in range(steps):
            if number % STEPS_PER_EIGENVALUE == 0:
                stable = self.fraction * 2 * count / self.largest(weights)
            leaves = {
                name: weight.detach().requires_grad_()
                for name, weight in weights.items()
            }
            outputs = alpha * (self.scaled.function(leaves, self.inputs) - first)
            residual = outputs - self.targets
            gradients = torch.autograd.grad(
                residual.square().sum() / (2 * count), list(leaves.values())
            )

            # ‖Δθ‖ = η/α² ‖gradient‖ ≤ stride ‖θ‖
            ratio = float(length(weights.values()) / length(gradients))
            size = min(stable, self.stride * ratio * alpha**2)
            pairs = zip(weights.items(), gradients, strict=True)
            after = {
                name: weight.detach() - size / alpha**2 * gradient
                for (name, weight), gradient in pairs
            }
            yield LearningStep(
                weights, after, size, outputs.detach(), residual.detach()
            )
            weights = after


def length(parts: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Return the norm of a vector that is split into parts.

    >>> length([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    norm: Tensor = torch.stack([part.detach().norm() for part in parts]).norm()
    return norm


@dataclass(frozen=True)
class LearnedTask:
    """Inputs with scalar targets."""

    inputs: Float[Tensor, " train *shape"]
    targets: Float[Tensor, " train"]


def task_of(split: Split) -> LearnedTask:
    """Return the inputs of a split with targets −1 and 1 for the two classes."""
    return LearnedTask(split.inputs, split.target.double() * 2 - 1)


def both_tasks(data: Data) -> tuple[LearnedTask, LearnedTask]:
    """Return the training and the test examples. Raise unless the data have two classes
    and test examples."""
    if len(data.classes) != 2 or not len(data.test.inputs):
        raise Mistake(
            "trial.data: choose data of two classes, and leave some for the test, "
            "such as data=digits"
        )
    return task_of(data.train), task_of(data.test)


class ScaledNetwork:
    """The function f = α (g(θ) − g(θ₀)) of a module g with one output."""

    def __init__(self, module: nn.Module, alpha: float) -> None:
        self.module, self.start = module, weights_of(module)
        self.scaled = ScaledFunction(function_of(module), self.start, alpha)

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, " point"]:
        """Return f(x) = α (g(θ; x) − g(θ₀; x)), which is zero at the start."""
        return self.scaled.outputs(weights, x)[:, 0]

    def kernel(
        self, weights: Weights, x1: Tensor, x2: Tensor
    ) -> Float[Tensor, "point train"]:
        """Return the tangent kernel of the module g. The kernel of f = α (g(θ) − g(θ₀))
        is α² times this kernel."""
        return tangent_kernel(self.module, x1, x2, weights=weights)[:, 0, :, 0]

    def learn(
        self,
        task: LearnedTask,
        steps: int,
        fraction: float,
        until: float,
        stride: float = math.inf,
    ) -> Iterator[LearningStep]:
        """Yield steps of `ScaledDescent` from the start, until the loss is at most
        `until`, but at most `steps`."""

        def largest(weights: Weights) -> float:
            kernel = self.kernel(weights, task.inputs, task.inputs)
            return float(torch.linalg.eigvalsh(kernel)[-1])

        descent = ScaledDescent(
            self.scaled, task.inputs, task.targets[:, None], largest, fraction, stride
        )
        for step in descent.path(self.start, steps):
            if step.loss <= until:
                return
            yield step


class AfterKernel(NetworkTrial):
    """A trained network, compared with two kernel regressions: with the tangent kernel
    before and after training.

    For each width in `widths` and each number of examples in `trains`, a network learns
    two classes, y = ±1. There are three predictors:

        network    f_T, trained from f_0 = 0 until the mean of ½(f − y)² is at most `until`
        before     K_0(x, X) (K_0(X, X) + λ)⁻¹ y
        after      K_T(x, X) (K_T(X, X) + λ)⁻¹ y

        error      the share of test points with the wrong sign
        beyond     error minus the error of the network
        loss       the mean ½(f − y)² at test points

    λ is `ridge` times the mean diagonal of the kernel. A small α makes training rich, a
    large α lazy. If the network does not learn its examples within `steps`, the numbers
    are NaN.

    P. M. Long, "Properties of the After Kernel" (2021), arXiv:2105.10585.
    """

    model: MLP
    widths: tuple[Count, ...] = Field((64, 256), min_length=1)
    trains: tuple[Count, ...] = Field((40, 120), min_length=1)
    alpha: float = Field(0.1, gt=0)
    ridge: float = Field(1e-6, gt=0)
    steps: Count = 6000
    fraction: float = Field(0.4, gt=0, lt=1)
    until: float = Field(0.005, gt=0)

    def rows(self, seed: int) -> Rows:
        for width, train in product(self.widths, self.trains):
            for row in self.predictors(seed, width, train):
                yield {"width": width, "train": train, **row}

    def predictors(
        self, seed: int, width: int, train: int
    ) -> Iterator[dict[str, Level]]:
        """Yield the row of each predictor (see the class)."""
        source = self.data.model_copy(update={"train": train})
        task, new = both_tasks(source.split(seed))

        # Train from f_0 = 0.
        shape = LearningTask(tuple(task.inputs.shape[1:]), 1)
        generator = stream("weights", seed, width)
        module = network_of_width(width, self.model, self.init, shape, generator)
        network = ScaledNetwork(module, self.alpha)
        end = network.start
        for step in network.learn(task, self.steps, self.fraction, self.until):
            end = step.after
        with torch.no_grad():
            loss = float(half_square(network.outputs(end, task.inputs), task.targets))
            outputs = network.outputs(end, new.inputs)
        predictions = {"network": outputs} | {
            name: regression(
                network.kernel(weights, task.inputs, task.inputs),
                network.kernel(weights, new.inputs, task.inputs),
                task.targets,
                self.ridge,
            )
            for name, weights in (("before", network.start), ("after", end))
        }
        reached = loss <= self.until
        errors = {
            name: share_wrong(predicted, new.targets) if reached else math.nan
            for name, predicted in predictions.items()
        }
        for name, predicted in predictions.items():
            new_loss = float(half_square(predicted, new.targets))
            yield {
                "predictor": name,
                "error": errors[name],
                "beyond": errors[name] - errors["network"],
                "loss": new_loss if reached else math.nan,
                "train_loss": loss,
            }


def regression(
    among: Float[Tensor, "train train"],
    across: Float[Tensor, "point train"],
    targets: Float[Tensor, " train"],
    ridge: float,
) -> Float[Tensor, " point"]:
    """Predict by kernel regression: K(x, X) (K(X, X) + λ)⁻¹ y.

    `among` is K(X, X), and `across` is K(x, X).
    λ is `ridge` times the mean diagonal of K(X, X).

    >>> kernel = 2 * torch.eye(2, dtype=torch.float64)
    >>> targets = torch.tensor([3.0, 6.0], dtype=torch.float64)
    >>> regression(kernel, kernel, targets, ridge=0.5).tolist()
    [2.0, 4.0]
    """
    # targets → (K(X, X) + λ)⁻¹ targets
    inverse = modes_of(among).at(FOREVER, ridge * float(among.diagonal().mean()))
    return (across @ inverse(targets[:, None]))[:, 0]


def share_wrong(
    outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]
) -> float:
    """Return the share of points with the wrong sign,
    or NaN if an output is not finite.

    >>> share_wrong(torch.tensor([0.5, -0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, -1.0]))
    0.5
    """
    if outputs.isfinite().all():
        return float((outputs * targets <= 0).double().mean())
    return math.nan


def half_square(
    outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]
) -> Float[Tensor, ""]:
    """Return the mean of ½(f − y)² for the outputs f and targets y."""
    return (outputs - targets).square().mean() / 2


RIDGE_SHARE = 1e-12
"""The ridge of regression with K_T, relative to the mean diagonal of K_T."""


class SilentAlignment(AbstractTrial):
    """Silent alignment: from small weights, the kernel aligns before the loss falls.

    Each network learns two classes with f = α (g(θ) − g(θ₀)),
    for a small and a large α.

        turn      A_early − A_0,   A = yᵀKy/(‖K‖ ‖y‖²) among the training examples
        turned    (A_early − A_0)/(A_T − A_0); the denominator is nearly 0 for a large α
        grown     (‖K_early‖ − ‖K_0‖)/(‖K_T‖ − ‖K_0‖)
        gap       ‖K_T(x, X) K_T(X, X)⁻¹ f_T(X) − f_T(x)‖/‖f_T(x)‖ at test points x, 0 if f_T equals
                  regression with K_T

    The loss falls from L_0. `early` is the first step with a loss of at most
    (1 − `fallen`) L_0, and T is the step with a loss of at most `until` · L_0. The
    columns `network`, `inputs` and `start` label the rows. `inputs` are
    coordinates along the principal directions of the examples: `raw`, or `whitened` to
    equal variances. Targets are ±1 minus their mean, because a linear function of
    standardised inputs has mean zero.

    `start` is `small` or `large`, and selects the scale α. If g is homogeneous of
    degree k in its weights, a small α is equivalent to weights smaller by the factor
    α^{1/k}. For one hidden layer without activation, `gap` is trivially small: linear
    functions that agree at the examples agree in the span of the examples.

    A. Atanasov, B. Bordelon & C. Pehlevan, "Neural networks as kernel learners: the
    silent alignment effect" (2021), arXiv:2111.00034."""

    names: tuple[str, ...] = Field(min_length=1)
    models: tuple[AbstractArchitecture, ...]
    init: AbstractInit
    data: AbstractSource
    small: float = Field(0.001, gt=0)
    large: float = Field(1.0, gt=0)
    fallen: float = Field(0.1, gt=0, lt=1)
    until: float = Field(0.01, gt=0, description="as a share of the loss at the start")
    steps: Count = 4000
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Rows:
        task, new = both_tasks(self.data.split(seed))

        maps = principal_maps(task.inputs.flatten(1))
        tasks = {}
        for inputs, by in zip(("raw", "whitened"), maps, strict=True):
            tasks[inputs] = transformed(task, by), transformed(new, by)
        for name, model in zip(self.names, self.models, strict=True):
            for inputs, pair in tasks.items():
                for start, alpha in (("small", self.small), ("large", self.large)):
                    numbers = self.row(model, alpha, *pair, seed)
                    yield {"network": name, "inputs": inputs, "start": start, **numbers}

    def row(
        self,
        model: AbstractArchitecture,
        alpha: float,
        task: LearnedTask,
        new: LearnedTask,
        seed: int,
    ) -> Mapping[str, float]:
        module = model.module(
            self.init, tuple(task.inputs.shape[1:]), 1, stream("weights", seed)
        ).eval()
        network = ScaledNetwork(module, alpha)
        first = float(task.targets.square().mean() / 2)
        early, last = self.train(network, task, first)
        known = network.outputs(last, task.inputs)
        loss = float(half_square(known, task.targets))
        if early is None or not loss <= self.until * first:
            return dict.fromkeys(("turn", "turned", "grown", "gap"), math.nan)

        # Alignment with yyᵀ and norm of the kernels K_0, K_early and K_T
        kernels = [
            network.kernel(weights, task.inputs, task.inputs)
            for weights in (network.start, early, last)
        ]
        target = torch.outer(task.targets, task.targets)
        turns = [alignment(kernel, target) for kernel in kernels]
        sizes = [float(kernel.norm()) for kernel in kernels]

        # K_T(x, X) K_T(X, X)⁻¹ f_T(X)
        outputs = network.outputs(last, new.inputs)
        across = network.kernel(last, new.inputs, task.inputs)
        regressed = regression(kernels[2], across, known, RIDGE_SHARE)
        return {
            "turn": turns[1] - turns[0],
            "turned": share_of_way(turns),
            "grown": share_of_way(sizes),
            "gap": float((regressed - outputs).norm() / outputs.norm()),
            "alignment_start": turns[0],
            "alignment_early": turns[1],
            "alignment_end": turns[2],
        }

    def train(
        self, network: ScaledNetwork, task: LearnedTask, first: float
    ) -> tuple[Weights | None, Weights]:
        """Train. Return the weights at the steps `early` and T. `first` is the initial
        loss. If training does not get to the step `early`, return None for it."""
        until = self.until * first
        early = None
        last = None
        for step in network.learn(task, self.steps, self.fraction, until, self.stride):
            if early is None and step.loss <= (1 - self.fallen) * first:
                early = step.before
            last = step.after
        if last is None:
            raise Mistake(
                "trial.until is above the loss at the start, so nothing is learned; "
                "give a number below 1"
            )
        return early, last


def transformed(
    task: LearnedTask, by: Float[Tensor, "feature direction"]
) -> LearnedTask:
    """Apply a linear map to the inputs, and subtract the mean of the targets."""
    return LearnedTask(task.inputs.flatten(1) @ by, task.targets - task.targets.mean())


def principal_maps(
    inputs: Float[Tensor, "example feature"],
) -> tuple[Float[Tensor, "feature direction"], Float[Tensor, "feature direction"]]:
    """Return two linear maps of inputs: to principal coordinates, and to whitened
    principal coordinates.

    Both kinds of coordinates have mean square 1 over examples and directions.

    >>> inputs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 7.0, 0.0]], dtype=torch.float64)
    >>> [to.norm(dim=0).round(decimals=4).tolist() for to in principal_maps(inputs)]
    [[0.2828, 0.2828], [0.202, 1.4142]]
    """
    _, sizes, directions = torch.linalg.svd(inputs, full_matrices=False)
    nonzero = sizes > sizes[0] * len(inputs) * torch.finfo(inputs.dtype).eps
    sizes = sizes[nonzero] / len(inputs) ** 0.5
    directions = directions[nonzero].t()
    return directions / sizes.square().mean().sqrt(), directions / sizes


def share_of_way(values: Sequence[float]) -> float:
    """Return (middle − first)/(last − first).

    >>> share_of_way([1.0, 2.0, 5.0])
    0.25
    """
    first, middle, last = values
    return (middle - first) / (last - first)


FIRST_POWERS = 30
FOLLOWING_POWERS = 3
"""The number of power iterations for the first estimate of the largest eigenvalue, and
the number for each later estimate."""


class LateGeneralising(NetworkTrial):
    """The delay between fitting and generalising,
    by the scale α of the outputs (grokking).

    The same network learns the same examples at each α, with f = α (g(θ) − g(θ₀)), the
    loss ½‖f − y‖², and targets y one-hot minus 1/C. A large α makes training lazy, a
    small α rich.

    There is a row for each α and for each `station` of training:

        fitted           when all training examples are first classified correctly
        generalised      when the accuracy on test examples first reaches `level`
        end              when training stops

        time             the time Σ η of the station, over the steps of `ScaledDescent`
        wait             (time of generalised − time of fitted)/time of fitted
        kernel_change    ‖K − K_0‖/‖K_0‖ at the station; K is the tangent kernel summed over outputs
        accuracy         the largest accuracy on test examples, or NaN if the network has not fitted

    Training stops after `steps`, when the loss has fallen to the fraction `until`, or
    when the network has fitted and generalised. At a station that was not reached, time
    and kernel change are NaN.

    T. Kumar, B. Bordelon, S. Gershman & C. Pehlevan, "Grokking as the transition from
    lazy to rich training dynamics" (2023), arXiv:2310.06110. The network, with squares
    and without weight decay, is from A. Gromov, "Grokking modular arithmetic" (2023),
    arXiv:2301.02679."""

    alphas: tuple[float, ...] = Field(min_length=2)
    level: float = Field(0.9, gt=0, le=1)
    steps: Count = 1500
    until: float = Field(1e-4, gt=0)
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)
    points: Count = 40

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        refuse_unclassified(data, least=2)
        for alpha in self.alphas:
            for row in self.stations(data, alpha, seed):
                yield {"alpha": alpha, **row}

    def stations(
        self, data: Data, alpha: float, seed: int
    ) -> Iterator[dict[str, Level]]:
        """Train with one α, and yield the row of each station (see the class)."""
        x = data.train.inputs
        module = self.model.module(
            self.init, tuple(x.shape[1:]), len(data.classes), stream("weights", seed)
        ).eval()
        scaled = ScaledFunction(function_of(module), weights_of(module), alpha)
        stations = self.train(scaled, data)
        fitted = stations.fitted
        generalised = stations.generalised
        wait = math.nan
        if fitted and generalised:
            wait = (generalised.time - fitted.time) / fitted.time
        accuracy = stations.accuracy
        if not fitted or not stations.end.outputs.isfinite().all():
            accuracy = math.nan  # NaN, since training failed

        some = x[: self.points]
        first = tangent_kernel(module, some, weights=scaled.start, outputs="trace")
        for name in ("fitted", "generalised", "end"):
            station = getattr(stations, name)
            time = math.nan
            change = math.nan
            if station is not None:
                time = station.time
                here = tangent_kernel(
                    module, some, weights=station.weights, outputs="trace"
                )
                change = kernel_change(here, first)
            yield {
                "station": name,
                "time": time,
                "wait": wait,
                "kernel_change": change,
                "accuracy": accuracy,
            }

    def train(self, scaled: ScaledFunction, data: Data) -> Stations:
        """Train until the network has fitted and generalised, or training ends."""
        targets = centred_one_hot(data.train.target, len(data.classes))
        fitted = None
        generalised = None
        accuracy = 0.0
        for moment in self.moments(scaled, data.train.inputs, targets):
            new = scaled.outputs(moment.weights, data.test.inputs)
            right = share_right(new, data.test.target)
            accuracy = max(accuracy, right)
            if fitted is None and share_right(moment.outputs, data.train.target) == 1:
                fitted = moment
            if generalised is None and right >= self.level:
                generalised = moment
            if fitted and generalised:
                break
        return Stations(fitted, generalised, moment, accuracy)

    def moments(
        self,
        scaled: ScaledFunction,
        x: Float[Tensor, " train *shape"],
        y: Float[Tensor, "train out"],
    ) -> Iterator[Moment]:
        """Train, and yield the time, weights and outputs before each step."""
        followed = FollowedMode(scaled.function, x, y)
        descent = ScaledDescent(
            scaled, x, y, followed.largest, self.fraction, self.stride
        )
        time = 0.0
        for step in descent.path(scaled.start, self.steps):
            yield Moment(time, step.before, step.outputs)
            if step.residual.square().sum() <= self.until * y.square().sum():
                return
            time += step.size


@dataclass(frozen=True)
class Moment:
    """A point of the training path: its time, its weights,
    and the outputs at the examples."""

    time: float
    weights: Weights
    outputs: Float[Tensor, "train out"]


class Stations(NamedTuple):
    """The stations of `LateGeneralising`, and the largest accuracy on test examples."""

    fitted: Moment | None
    generalised: Moment | None
    end: Moment
    accuracy: float


class FollowedMode:
    """The largest eigenvalue of J Jᵀ along a training path.

    Power iterations start from the previous eigenvector, so few iterations suffice.
    """

    def __init__(
        self, function: Function, x: Tensor, mode: Float[Tensor, "train out"]
    ) -> None:
        self.function = function
        self.x = x
        self.mode = mode
        self.powers = FIRST_POWERS

    def largest(self, weights: Weights) -> float:
        """Estimate the largest eigenvalue from below, by power iterations."""
        self.mode, eigenvalue = top_mode(
            self.function, weights, self.x, self.mode, self.powers
        )
        self.powers = FOLLOWING_POWERS
        return eigenvalue


def top_mode(
    function: Function,
    weights: Weights,
    x: Tensor,
    mode: Float[Tensor, "train out"],
    powers: int,
) -> tuple[Float[Tensor, "train out"], float]:
    """Return the first eigenvector of J Jᵀ and its eigenvalue,
    estimated by `powers` power iterations.

    J is the Jacobian of the outputs at `x`. The iterations start from `mode`.

    >>> import torch
    >>> inputs = torch.diag(torch.tensor([3.0, 1.0]))
    >>> weights = {"w": torch.ones(1, 2)}
    >>> _, size = top_mode(lambda w, x: w["w"] * x, weights, inputs, torch.ones(2, 2), powers=20)
    >>> round(size, 4)
    9.0
    """

    def outputs(at: Weights) -> Tensor:
        return function(at, x)

    load_forward_mode()
    eigenvalue = 0.0
    plain = {name: weight.detach() for name, weight in weights.items()}
    for _ in range(powers):
        # v ← J Jᵀ v, normalised
        (gradient,) = vjp(outputs, plain)[1](mode)
        image: Tensor = jvp(outputs, (plain,), (gradient,))[1]
        eigenvalue = float(image.norm() / mode.norm())
        mode = image / image.norm()
    return mode, eigenvalue


def refuse_unclassified(data: Data, least: int) -> None:
    """Raise if the data have fewer than `least` classes, or no test split."""
    if len(data.classes) < least or not len(data.test.inputs):
        raise Mistake(
            "trial.data: choose data of classes, and leave some for the test, "
            "such as data=modular_addition"
        )


def share_right(outputs: Float[Tensor, "point out"], labels: Tensor) -> float:
    """Return the accuracy, or NaN if an output is not finite.

    The argmax of NaN would be the first class.

    >>> outputs = torch.tensor([[1.0, 0.0], [0.0, math.nan]])
    >>> share_right(outputs[:1], torch.tensor([0])), share_right(outputs, torch.tensor([0, 0]))
    (1.0, nan)
    """
    if not outputs.isfinite().all():
        return math.nan
    return float((outputs.argmax(1) == labels).double().mean())


class AccuracyByScale(AbstractPicture):
    """The accuracy on new inputs against the scale α of the outputs.

    `names` maps looks (main, second, control) to the labels of their lines."""

    has_judged_rows_only = True

    names: dict[str, str] = Field(min_length=1)
    along: str = "init.alpha"
    quantity: str = "accuracy_query"

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_accuracy_by_scale  # noqa: PLC0415  loads matplotlib

        tables = {
            name: select_rows(judged.tables[look], {"quantity": self.quantity})
            for look, name in self.names.items()
        }
        table = tables[self.names[MAIN]]
        means = table["value"].astype(float).groupby(table[self.along]).mean()
        answer = (
            f"{self.names[MAIN].capitalize()}: {percent(means.iloc[0])} at α = "
            f"{short(means.index[0])}, {percent(means.iloc[-1])} at α = "
            f"{short(means.index[-1])}"
        )
        title = "Accuracy at one training loss, by laziness"
        return draw_accuracy_by_scale(tables, self.along, title, answer)

    def here(self, judged: JudgedClaim) -> str:
        return "dots are means over seeds, with 95 % intervals."
