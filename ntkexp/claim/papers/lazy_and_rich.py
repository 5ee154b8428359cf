"""What the kernel does while a network learns, lazy or rich by the scale α of its outputs: as a machine of its own
after training, when it turns to the targets, and when a classifier generalises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import jvp, vjp

from ntkexp.claim.papers.convolutional_kernels import centred
from ntkexp.claim.papers.wide_networks import network_of_width
from ntkexp.claim.trial import AbstractTrial, refuse_unnamed
from ntkexp.closed_form import FOREVER, modes_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data, Split
from ntkexp.diagnostics import alignment, drift
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.init import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, LearningTask
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import MLP
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

REFRESH = 20
"""Steps after which the largest eigenvalue is computed again."""


@dataclass(frozen=True)
class ScaledFunction:
    """A function of weights is scaled by α, and its outputs at the start are taken off."""

    function: Function
    start: Weights
    alpha: float

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, "point out"]:
        """Outputs, which are zero at the start."""
        return self.alpha * (self.function(weights, x) - self.function(self.start, x))


@dataclass(frozen=True)
class LearningStep:
    """A step from `before` to `after`, its size, and what was said and missed before it."""

    before: Weights
    after: Weights
    size: float
    outputs: Float[Tensor, "train out"]
    missed: Float[Tensor, "train out"]

    @property
    def loss(self) -> float:
        """The mean of ½ ‖missed‖² before the step."""
        return float(self.missed.square().sum() / (2 * len(self.missed)))


@dataclass(frozen=True)
class ScaledDescent:
    """A function of weights learns, scaled and without its first outputs, by stable steps of descent on all examples.

    Steps on the mean of ½ ‖missed‖²; none moves the weights by more than `stride`, as a share of their length.

        f = α (g(θ) − g(θ₀)),    θ ← θ − η/(α M) Σᵢ ∇g(θ; xᵢ) ℓ′ᵢ,    ℓ′ᵢ = f(xᵢ) − yᵢ,    η = fraction · 2M/λ_max

    with λ_max the largest eigenvalue of the tangent kernel of g among the examples, asked for again every few
    steps: what is not lazy would otherwise leave the range in which steps are stable. Whatever α is, the step
    moves f by −η/M Σᵢ K̄(x, xᵢ) ℓ′ᵢ, with K̄ the secant kernel of g.
    """

    scaled: ScaledFunction
    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, "train out"]
    largest: Callable[[Weights], float]  # the weights ↦ λ_max
    fraction: float
    stride: float = math.inf

    def path(self, weights: Weights, steps: int) -> Iterator[LearningStep]:
        """Take `steps` steps, lazily."""
        count, stable, alpha = len(self.targets), 0.0, self.scaled.alpha
        first = self.scaled.function(self.scaled.start, self.inputs).detach()
        for number in range(steps):
            if number % REFRESH == 0:
                stable = self.fraction * 2 * count / self.largest(weights)
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            outputs = alpha * (self.scaled.function(leaves, self.inputs) - first)
            missed = outputs - self.targets
            gradients = torch.autograd.grad(
                missed.square().sum() / (2 * count), list(leaves.values())
            )
            size = min(
                stable, self.stride * float(length(weights.values()) / length(gradients)) * alpha**2
            )
            pairs = zip(weights.items(), gradients, strict=True)
            after = {
                name: weight.detach() - size / alpha**2 * gradient
                for (name, weight), gradient in pairs
            }
            yield LearningStep(weights, after, size, outputs.detach(), missed.detach())
            weights = after


def length(parts: Iterable[Tensor]) -> Float[Tensor, ""]:
    """The length of a vector in parts.

    >>> length([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    norm: Tensor = torch.stack([part.detach().norm() for part in parts]).norm()
    return norm


@dataclass(frozen=True)
class LearnedTask:
    """Inputs, and what is learned of them."""

    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, " train"]


def task_of(split: Split) -> LearnedTask:
    """Two classes are −1 and 1."""
    return LearnedTask(split.inputs, split.target.double() * 2 - 1)


class ScaledNetwork:
    """A module of one output, scaled by α and without its first output, which learns a task by descent."""

    def __init__(self, module: nn.Module, alpha: float) -> None:
        self.module, self.start = module, weights_of(module)
        self.scaled = ScaledFunction(function_of(module), self.start, alpha)

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, " point"]:
        """Outputs, which are zero before anything is learned."""
        return self.scaled.outputs(weights, x)[:, 0]

    def kernel(self, weights: Weights, x1: Tensor, x2: Tensor) -> Float[Tensor, "point train"]:
        """The tangent kernel of the module, which is that of the outputs over α²."""
        return tangent_kernel(self.module, x1, x2, weights=weights)[:, 0, :, 0]

    def learn(
        self,
        weights: Weights,
        task: LearnedTask,
        steps: int,
        fraction: float,
        until: float,
        stride: float = math.inf,
    ) -> Iterator[LearningStep]:
        """Take `steps` steps on a task, or until the mean of ½ missed² is no larger than `until`.

        None moves the weights by more than `stride`, as a share of their length.
        """

        def largest(weights: Weights) -> float:
            return float(torch.linalg.eigvalsh(self.kernel(weights, task.inputs, task.inputs))[-1])

        descent = ScaledDescent(
            self.scaled, task.inputs, task.targets[:, None], largest, fraction, stride
        )
        for step in descent.path(weights, steps):
            if step.loss <= until:
                return
            yield step


class AfterKernel(AbstractTrial):
    """The kernel after training as a machine of its own: three predictors of new points, by width and number of
    examples.

    A network of each width learns each number of examples of two classes.

        network    f_T, trained from f_0 = 0 on ½(f − y)² until the mean over the examples has fallen to `until`
        before     K_0(x, X) (K_0(X, X) + ridge)⁻¹ y
        after      K_T(x, X) (K_T(X, X) + ridge)⁻¹ y

        error      the share of new points with the wrong sign         beyond    error less that of the network
        loss       mean ½(f − y)² of new points, y = ±1

    The ridge is the same share of the mean diagonal for both kernels. Small α makes training rich, large α lazy.
    Where the network did not learn its examples within these steps, there is no kernel after training, and rows have
    no numbers.

    P. M. Long, "Properties of the After Kernel" (2021), arXiv:2105.10585.
    """

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 256), min_length=1)
    trains: tuple[Count, ...] = Field((40, 120), min_length=1)
    alpha: float = Field(0.1, gt=0)
    ridge: float = Field(1e-6, gt=0)
    steps: Count = 6000
    fraction: float = Field(0.4, gt=0, lt=1)
    until: float = Field(0.005, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        sizes = [(width, train) for width in self.widths for train in self.trains]
        return [
            {"width": width, "train": train, **row}
            for width, train in sizes
            for row in self.beside(seed, width, train)
        ]

    def beside(self, seed: int, width: int, train: int) -> Iterator[dict[str, Level]]:
        data = self.data.model_copy(update={"train": train}).split(seed)
        if len(data.classes) != 2 or not len(data.test.inputs):
            raise Mistake(
                "trial.data: choose data of two classes, and leave some for the test, such as data=digits"
            )
        task, new = task_of(data.train), task_of(data.test)

        # Train the network from f_0 = 0.
        shape, generator = (
            LearningTask(tuple(task.inputs.shape[1:]), 1),
            stream("weights", seed, width),
        )
        module = network_of_width(width, self.model, self.init, shape, generator)
        network = ScaledNetwork(module, self.alpha)
        start = {name: weight.clone() for name, weight in network.start.items()}
        end = start
        for step in network.learn(start, task, self.steps, self.fraction, self.until):
            end = step.after
        with torch.no_grad():
            missed = float(half_square(network.outputs(end, task.inputs), task.targets))
            outputs = network.outputs(end, new.inputs)
        predictions = {"network": outputs} | {
            name: regression(
                network.kernel(weights, task.inputs, task.inputs),
                network.kernel(weights, new.inputs, task.inputs),
                task.targets,
                self.ridge,
            )
            for name, weights in (("before", start), ("after", end))
        }
        reached = missed <= self.until
        errors = {
            name: wrong(found, new.targets) if reached else math.nan
            for name, found in predictions.items()
        }
        for name, found in predictions.items():
            yield {
                "predictor": name,
                "error": errors[name],
                "beyond": errors[name] - errors["network"],
                "loss": float(half_square(found, new.targets)) if reached else math.nan,
                "train_loss": missed,
            }


def regression(
    known: Float[Tensor, "train train"],
    across: Float[Tensor, "point train"],
    targets: Float[Tensor, " train"],
    ridge: float,
) -> Float[Tensor, " point"]:
    """Predict points by a kernel, with a ridge that is this share of its mean diagonal.

    >>> kernel = 2 * torch.eye(2, dtype=torch.float64)
    >>> regression(kernel, kernel, torch.tensor([3.0, 6.0], dtype=torch.float64), ridge=0.5).tolist()
    [2.0, 4.0]
    """
    learned = modes_of(known).at(FOREVER, ridge * float(known.diagonal().mean()))
    return (across @ learned(targets[:, None]))[:, 0]


def wrong(outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]) -> float:
    """The share of points whose sign is not that of their target; none where an output is not finite.

    >>> wrong(torch.tensor([0.5, -0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, -1.0]))
    0.5
    """
    return float((outputs * targets <= 0).double().mean()) if outputs.isfinite().all() else math.nan


def half_square(
    outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]
) -> Float[Tensor, ""]:
    """The mean of ½(f − y)²."""
    return (outputs - targets).square().mean() / 2


RIDGE = 1e-12
"""What regression adds to the kernel, as a share of its mean diagonal: it keeps what is singular from being refused."""


class SilentAlignment(AbstractTrial):
    """When the kernel turns towards the targets: before the loss falls, from a small start; while it falls, from a
    large.

    The same network learns two classes from a small start and from a large one.

        turn      A_early − A_0,   A = yᵀKy/(‖K‖ ‖y‖²) among the training examples
        turned    the same as a share of A_T − A_0, which is next to nothing from a large start
        grown     (‖K_early‖ − ‖K_0‖)/(‖K_T‖ − ‖K_0‖)
        gap       ‖K_T(x, X) K_T(X, X)⁻¹ f_T(X) − f_T(x)‖/‖f_T(x)‖ at new points x: whether f_T is regression with
                  K_T

    Inputs are coordinates along the principal directions of the examples, `raw`, or `whitened`: each then as large
    as the others. Targets are ±1 less their mean, of which standardised inputs know nothing. `early` is the first
    step before which the loss has fallen by `fallen` of itself, T that before which `until` of it is left.

    Rows are told apart by `network`, by `inputs`, and by `start`, the scale α of the outputs f = α (g(θ) − g(θ₀)):
    where g is homogeneous of degree k in its weights, a small α is a start from weights that are α^{1/k} as large.
    Of one hidden layer without activations `gap` says nothing: whatever is linear and right at the examples is
    right in their span.

    A. Atanasov, B. Bordelon & C. Pehlevan, "Neural networks as kernel learners: the silent alignment effect" (2021),
    arXiv:2111.00034.
    """

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
        """Every model has a name of its own."""
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if len(data.classes) != 2 or not len(data.test.inputs):
            raise Mistake(
                "trial.data: choose data of two classes, and leave some for the test, such as data=digits"
            )
        task, new = task_of(data.train), task_of(data.test)

        # The same inputs in two systems of coordinates, and targets without their mean.
        tasks = {}
        for inputs, by in zip(
            ("raw", "whitened"), principal_maps(task.inputs.flatten(1)), strict=True
        ):
            old, unseen = (
                LearnedTask(one.inputs.flatten(1) @ by, one.targets - one.targets.mean())
                for one in (task, new)
            )
            tasks[inputs] = old, unseen
        return [
            {
                "network": name,
                "inputs": inputs,
                "start": start,
                **self.row(model, alpha, *pair, seed),
            }
            for name, model in zip(self.names, self.models, strict=True)
            for inputs, pair in tasks.items()
            for start, alpha in (("small", self.small), ("large", self.large))
        ]

    def row(
        self,
        model: AbstractArchitecture,
        alpha: float,
        task: LearnedTask,
        new: LearnedTask,
        seed: int,
    ) -> Mapping[str, float]:
        """Learn from one start."""
        module = model.module(
            self.init, tuple(task.inputs.shape[1:]), 1, stream("weights", seed)
        ).eval()
        network = ScaledNetwork(module, alpha)
        first = float(task.targets.square().mean() / 2)
        path = network.learn(
            {name: weight.clone() for name, weight in network.start.items()},
            task,
            self.steps,
            self.fraction,
            self.until * first,
            self.stride,
        )
        # The weights at the first step with a loss that has fallen enough, if there is one, and when it is learned.
        early, last = None, None
        for step in path:
            if early is None and step.loss <= (1 - self.fallen) * first:
                early = step.before
            last = step.after
        if last is None:
            raise Mistake(
                "trial.until is above the loss at the start, so nothing is learned; give a number below 1"
            )
        missed = network.outputs(last, task.inputs) - task.targets
        if early is None or not float(missed.square().mean() / 2) <= self.until * first:
            return dict.fromkeys(("turn", "turned", "grown", "gap"), math.nan)

        # Alignment with yyᵀ and size of the kernel at all three.
        kernels = [
            network.kernel(weights, task.inputs, task.inputs)
            for weights in (network.start, early, last)
        ]
        target = torch.outer(task.targets, task.targets)
        turns, sizes = (
            [alignment(kernel, target) for kernel in kernels],
            [float(kernel.norm()) for kernel in kernels],
        )

        # K_T(x, X) K_T(X, X)⁻¹ f_T(X), beside f_T(x)
        outputs = network.outputs(last, new.inputs)
        across = network.kernel(last, new.inputs, task.inputs)
        regressed = regression(kernels[2], across, network.outputs(last, task.inputs), RIDGE)
        return {
            "turn": turns[1] - turns[0],
            "turned": share(turns),
            "grown": share(sizes),
            "gap": float((regressed - outputs).norm() / outputs.norm()),
            "alignment_start": turns[0],
            "alignment_early": turns[1],
            "alignment_end": turns[2],
        }


def principal_maps(
    inputs: Float[Tensor, "example feature"],
) -> tuple[Float[Tensor, "feature direction"], Float[Tensor, "feature direction"]]:
    """Map to coordinates along principal directions, and to whitened ones; both have a mean square of one.

    >>> raw, whitened = principal_maps(torch.tensor([[1.0, 0.0, 0.0], [0.0, 7.0, 0.0]], dtype=torch.float64))
    >>> [each.norm(dim=0).round(decimals=4).tolist() for each in (raw, whitened)]
    [[0.2828, 0.2828], [0.202, 1.4142]]
    """
    _, sizes, directions = torch.linalg.svd(inputs, full_matrices=False)
    nonzero = sizes > sizes[0] * len(inputs) * torch.finfo(inputs.dtype).eps
    sizes, directions = sizes[nonzero] / len(inputs) ** 0.5, directions[nonzero].t()
    return directions / sizes.square().mean().sqrt(), directions / sizes


def share(values: Sequence[float]) -> float:
    """Which share of the way from the first to the last was gone at the middle one.

    >>> share([1.0, 2.0, 5.0])
    0.25
    """
    first, middle, last = values
    return (middle - first) / (last - first)


FIRST, FOLLOWING = 30, 3
"""So many powers find the largest eigenvalue of the kernel at the start, and follow it from there."""


class LateGeneralising(AbstractTrial):
    """How long after it has fitted its examples a classifier generalises, by the scale α of its outputs:

    The same network learns the same examples at each α.

        fitted         the time at which all examples are classified right
        generalised    the time at which the share `level` of new ones is
        wait           (generalised − fitted)/fitted
        drift          ‖K − K_0‖/‖K_0‖ at either, K the tangent kernel summed over outputs
        accuracy       the largest share of new examples that were classified right, by a network that has fitted
                       its own

    of f = α (g(θ) − g(θ₀)) on the loss ½‖f − y‖², y one-hot less 1/C. Large α makes training lazy, small α rich.
    Time is Σ η over steps θ ← θ − η/(α M) Σᵢ ∇g ℓ′ᵢ that are stable, and so short that none moves the weights by
    more than `stride` of their length. Rows are told apart by `alpha` and `station`, the last of which is the
    `end`. What is not reached before steps run out, or before the loss has fallen to `until` of itself, where
    gradients have died away, has no time.

    T. Kumar, B. Bordelon, S. Gershman & C. Pehlevan, "Grokking as the transition from lazy to rich training dynamics"
    (2023), arXiv:2310.06110. The network, of squares without weight decay, is that of A. Gromov, "Grokking modular
    arithmetic" (2023), arXiv:2301.02679.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    alphas: tuple[float, ...] = Field(min_length=2)
    level: float = Field(0.9, gt=0, le=1)
    steps: Count = 1500
    until: float = Field(1e-4, gt=0)
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)
    points: Count = 40

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if len(data.classes) < 2 or not len(data.test.inputs):
            raise Mistake(
                "trial.data: choose data of classes, and leave some for the test, as of modular_addition"
            )
        return [
            {"alpha": alpha, **row}
            for alpha in self.alphas
            for row in self.stations(data, alpha, seed)
        ]

    def stations(self, data: Data, alpha: float, seed: int) -> Iterator[dict[str, Level]]:
        """Learn at one scale, and look at the network where it has fitted, where it generalises, and at the end."""
        x, classes = data.train.inputs, len(data.classes)
        module = self.model.module(
            self.init, tuple(x.shape[1:]), classes, stream("weights", seed)
        ).eval()
        scaled = ScaledFunction(function_of(module), weights_of(module), alpha)
        fitted, generalised, accuracy = None, None, 0.0
        for moment in self.moments(scaled, x, centred(data.train.target, classes)):
            right = share_right(scaled.outputs(moment.weights, data.test.inputs), data.test.target)
            accuracy = max(accuracy, right)
            if fitted is None and share_right(moment.outputs, data.train.target) == 1:
                fitted = moment
            if generalised is None and right >= self.level:
                generalised = moment
            if fitted and generalised:
                break
        times = [station.time if station else math.nan for station in (fitted, generalised)]
        if not fitted or not moment.outputs.isfinite().all():
            accuracy = (
                math.nan
            )  # what has not learned, or has diverged, is no network that does not generalise
        some = x[: self.points]
        first = tangent_kernel(module, some, weights=scaled.start, outputs="trace")
        for name, station in (("fitted", fitted), ("generalised", generalised), ("end", moment)):
            here = (
                None
                if station is None
                else tangent_kernel(module, some, weights=station.weights, outputs="trace")
            )
            yield {
                "station": name,
                "time": math.nan if station is None else station.time,
                "wait": (times[1] - times[0]) / times[0],
                "drift": math.nan if here is None else drift(here, first),
                "accuracy": accuracy,
            }

    def moments(
        self,
        scaled: ScaledFunction,
        x: Float[Tensor, "train *shape"],
        y: Float[Tensor, "train out"],
    ) -> Iterator[Moment]:
        """Every moment, until steps run out or the loss has fallen to a share `until` of itself."""
        followed = FollowedMode(scaled.function, x, y)
        descent, time = (
            ScaledDescent(scaled, x, y, followed.largest, self.fraction, self.stride),
            0.0,
        )
        for step in descent.path(scaled.start, self.steps):
            yield Moment(time, step.before, step.outputs)
            if step.missed.square().sum() <= self.until * y.square().sum():
                return
            time += step.size


@dataclass(frozen=True)
class Moment:
    """The weights at a time, and what the network says of its examples."""

    time: float
    weights: Weights
    outputs: Float[Tensor, "train out"]


class FollowedMode:
    """Follows the first mode of the kernel J Jᵀ by a few powers from where it was last."""

    def __init__(self, function: Function, x: Tensor, mode: Float[Tensor, "train out"]) -> None:
        self.function, self.x, self.mode, self.powers = function, x, mode, FIRST

    def largest(self, weights: Weights) -> float:
        """Find its eigenvalue, from below."""
        self.mode, found = top_mode(self.function, weights, self.x, self.mode, self.powers)
        self.powers = FOLLOWING
        return found


def top_mode(
    function: Function, weights: Weights, x: Tensor, mode: Float[Tensor, "train out"], powers: int
) -> tuple[Float[Tensor, "train out"], float]:
    """Follow the first mode of the kernel J Jᵀ, and find its eigenvalue from below, by `powers` powers.

    >>> import torch
    >>> square = torch.diag(torch.tensor([3.0, 1.0]))
    >>> found = top_mode(lambda w, x: w["w"] * x, {"w": torch.ones(1, 2)}, square, torch.ones(2, 2), powers=20)
    >>> round(found[1], 4)
    9.0
    """

    def outputs(given: Weights) -> Tensor:
        return function(given, x)

    load_forward_mode()
    size, plain = 0.0, {name: weight.detach() for name, weight in weights.items()}
    for _ in range(powers):
        (gradient,) = vjp(outputs, plain)[1](mode)
        image: Tensor = jvp(outputs, (plain,), (gradient,))[1]
        size = float(image.norm() / mode.norm())
        mode = image / image.norm()
    return mode, size


def share_right(outputs: Float[Tensor, "point out"], labels: Tensor) -> float:
    """The share of points whose largest output is that of their label."""
    return float((outputs.argmax(1) == labels).double().mean()) if outputs.isfinite().all() else 0.0
