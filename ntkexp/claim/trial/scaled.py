"""A function of weights learns with its output scaled by α, and the kernel after training as a machine of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.width import network_of_width
from ntkexp.closed_form.modes import FOREVER, modes_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Split
from ntkexp.init.base import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import MLP
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

REFRESH = 20
"""The largest eigenvalue is asked for again after so many steps."""


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
        """Take so many steps, each when it is asked for."""
        count, stable, alpha = len(self.targets), 0.0, self.scaled.alpha
        first = self.scaled.function(self.scaled.start, self.inputs).detach()
        for number in range(steps):
            if number % REFRESH == 0:
                stable = self.fraction * 2 * count / self.largest(weights)
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            outputs = alpha * (self.scaled.function(leaves, self.inputs) - first)
            missed = outputs - self.targets
            gradients = torch.autograd.grad(missed.square().sum() / (2 * count), list(leaves.values()))
            size = min(stable, self.stride * float(length(weights.values()) / length(gradients)) * alpha**2)
            pairs = zip(weights.items(), gradients, strict=True)
            after = {name: weight.detach() - size / alpha**2 * gradient for (name, weight), gradient in pairs}
            yield LearningStep(weights, after, size, outputs.detach(), missed.detach())
            weights = after


def length(parts: Iterable[Tensor]) -> Float[Tensor, ""]:
    """The length of a vector in parts.

    >>> length([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    found: Tensor = torch.stack([part.detach().norm() for part in parts]).norm()
    return found


@dataclass(frozen=True)
class LearnedTask:
    """Inputs, and what is learned of them."""

    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, " train"]


def task_of(split: Split) -> LearnedTask:
    """Two classes are −1 and 1."""
    return LearnedTask(split.inputs, split.target.double() * 2 - 1)


class ScaledNetwork:
    """A network of one output learns a task, scaled by α, by descent on all examples of the task.

    A module of one output, scaled by α and without its first output.
    """

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
        """Take steps on a task, so many, or until the mean of ½ missed² is no larger than `until`.

        None moves the weights by more than `stride`, as a share of their length.
        """

        def largest(weights: Weights) -> float:
            return float(torch.linalg.eigvalsh(self.kernel(weights, task.inputs, task.inputs))[-1])

        descent = ScaledDescent(self.scaled, task.inputs, task.targets[:, None], largest, fraction, stride)
        for step in descent.path(weights, steps):
            if step.loss <= until:
                return
            yield step

    def learned(self, weights: Weights, task: LearnedTask, steps: int, fraction: float, until: float) -> Weights:
        """The weights after such steps."""
        for step in self.learn(weights, task, steps, fraction, until):
            weights = step.after
        return weights


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
    Where the network did not learn its examples in so many steps, there is no kernel after training, and rows have
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
        places = [(width, train) for width in self.widths for train in self.trains]
        return [
            {"width": width, "train": train, **row}
            for width, train in places
            for row in self.beside(seed, width, train)
        ]

    def beside(self, seed: int, width: int, train: int) -> Iterator[dict[str, Level]]:
        """The rows of one network."""
        data = self.data.model_copy(update={"train": train}).split(seed)
        if len(data.classes) != 2 or not len(data.test.inputs):
            raise Mistake("trial.data: choose data of two classes, and leave some for the test, such as data=digits")
        task, new = task_of(data.train), task_of(data.test)
        asked, generator = LearningTask(tuple(task.inputs.shape[1:]), 1), stream("weights", seed, width)
        module = network_of_width(width, self.model, self.init, asked, generator)
        network = ScaledNetwork(module, self.alpha)
        start = {name: weight.clone() for name, weight in network.start.items()}
        end = network.learned(start, task, self.steps, self.fraction, self.until)
        with torch.no_grad():
            missed = float(half_square(network.outputs(end, task.inputs), task.targets))
            outputs = network.outputs(end, new.inputs)
        said = {"network": outputs} | {
            name: regression(
                network.kernel(weights, task.inputs, task.inputs),
                network.kernel(weights, new.inputs, task.inputs),
                task.targets,
                self.ridge,
            )
            for name, weights in (("before", start), ("after", end))
        }
        known = missed <= self.until
        errors = {name: wrong(found, new.targets) if known else math.nan for name, found in said.items()}
        for name, found in said.items():
            yield {
                "predictor": name,
                "error": errors[name],
                "beyond": errors[name] - errors["network"],
                "loss": float(half_square(found, new.targets)) if known else math.nan,
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


def half_square(outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]) -> Float[Tensor, ""]:
    """The mean of ½(f − y)²."""
    return (outputs - targets).square().mean() / 2
