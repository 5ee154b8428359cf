"""A loss ℓ(f, y) of one example, its derivative in the outputs, and how class labels become targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.stream import stream

# The training objective is L = Σᵢ wᵢ ℓ(f(xᵢ), yᵢ) with wᵢ = 1/M for a mean over M examples and 1 for a sum.
# Weights are the experiment's business; everything here is per example and unweighted.


TRIED = 16
"""Examples at whose targets a loss is compared with differences."""


class AbstractLoss(Component):
    """value, output gradient and the bound max ℓ″ that sets the largest stable step."""

    curvature: ClassVar[float]
    smooth: ClassVar[bool] = True  # whether ℓ′ has no jumps
    is_quadratic: ClassVar[bool] = (
        False  # ℓ = ½ curvature ‖f − y‖², so that flows have closed forms
    )
    reduction: Literal["mean", "sum"] = "mean"

    @abstractmethod
    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        """Class labels as the targets this loss compares outputs with."""

    @final
    def targets(self, target: Tensor, classes: int) -> Float[Tensor, "example out"]:
        """What outputs are compared with: encoded labels, or real values where there are no classes."""
        return self.encode(target, classes) if classes else self.real(target)

    def real(self, values: Float[Tensor, "example value"]) -> Float[Tensor, "example out"]:
        """Real values as targets."""
        raise Mistake(
            f"loss={self.option} takes class labels, and the data has real values; choose loss=squared"
        )

    @abstractmethod
    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """ℓ(f, y), summed over outputs."""

    @abstractmethod
    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        """∂ℓ/∂f."""

    def log_probability(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """log p(y), where outputs are read as those of a distribution over the classes."""
        raise Mistake(
            f"loss={self.option} makes no probabilities of outputs; use loss=cross_entropy or logistic, or another "
            "measure, such as margin"
        )

    @final
    def refuse_unlike_differences(self, targets: Float[Tensor, "example out"]) -> None:
        """Refuse an output gradient that is not the derivative of the value, and a loss of an example that depends on
        others, at random outputs in double precision.
        """
        some = targets[:TRIED].double()
        for f, d in random_outputs(some):
            value, slope = self.value(f, some), (self.output_gradient(f, some) * d).sum(1)
            if value.shape != slope.shape:
                raise Mistake(
                    f"loss={self.option}: value gives {list(value.shape)} for {len(f)} examples; give one each"
                )
            alone = (
                self.value(f[-1:], some[-1:]),
                (self.output_gradient(f[-1:], some[-1:]) * d[-1:]).sum(1),
            )
            if not torch.allclose(
                torch.cat(alone), torch.stack([value[-1], slope[-1]]), rtol=1e-9, atol=1e-12
            ):
                raise Mistake(
                    f"loss={self.option}: the loss of an example depends on others; let it be of each by itself"
                )
            if not bool(lies_between(slope, lambda at: self.value(at, some), f, d).all()):
                raise Mistake(
                    f"loss={self.option}: output_gradient is not the derivative of value, by differences at random "
                    "outputs; a kernel of its path would be that of another loss"
                )

    @final
    def refuse_unlike_second_differences(self, targets: Float[Tensor, "example out"]) -> None:
        """Refuse a value of which autograd has other derivatives than it and the output gradient have by differences:
        effects take both from it."""
        some = targets[:TRIED].double()
        for f, d in random_outputs(some):
            of_value, of_gradient = self.derivatives(f, d, some)
            for each, along, of in (
                (of_value, lambda at: self.value(at, some), "value"),
                (
                    of_gradient,
                    lambda at, d=d: (self.output_gradient(at, some) * d).sum(1),
                    "output_gradient",
                ),
            ):
                if not bool(lies_between(each, along, f, d).all()):
                    raise Mistake(
                        f"loss={self.option}: autograd's derivatives of value are not those of {of}, by differences at "
                        "random outputs, and effects are made of them; look for detach, no_grad or numbers in value"
                    )

    @final
    def derivatives(self, f: Tensor, d: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The first and second derivative of each value along d, as autograd has them."""
        f = f.clone().requires_grad_()
        slope = curvature = f.new_zeros(len(f))
        if (value := self.value(f, targets).sum()).requires_grad:
            (first,) = torch.autograd.grad(value, f, create_graph=True, materialize_grads=True)
            slope = (first * d).sum(1)
        if slope.requires_grad:
            (second,) = torch.autograd.grad(slope.sum(), f, materialize_grads=True)
            curvature = (second * d).sum(1)
        return slope.detach(), curvature

    def weight(self, examples: int) -> float:
        """wᵢ when a step sums over this many examples."""
        return 1.0 / self.divisor(examples)

    def divisor(self, examples: int) -> int:
        """What a sum over this many examples is divided by."""
        return examples if self.reduction == "mean" else 1


def random_outputs(targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs nearer to the targets and farther away, each with a direction."""
    chance = stream("loss")
    for size in (0.1, 1.0, 3.0):
        f, d = (
            torch.randn(targets.shape, generator=chance, dtype=torch.float64).to(targets)
            for _ in range(2)
        )
        yield targets + size * f, d


def lies_between(slope: Tensor, along: Callable[[Tensor], Tensor], f: Tensor, d: Tensor) -> Tensor:
    """Whether a derivative along d lies between the differences to both sides: at a kink it may lie anywhere there,
    where a function is smooth they are as close as the step is short.
    """
    between, value = torch.zeros_like(slope, dtype=torch.bool), along(f)
    for h in (1e-5, 1e-6):
        sides = torch.stack([(along(f + s * h * d) - value) / (s * h) for s in (1, -1)])
        rounding = 100 * torch.finfo(torch.float64).eps * (value.abs() + f.abs().amax(1) + 1) / h
        between |= (sides.amin(0) - rounding <= slope) & (slope <= sides.amax(0) + rounding)
    return between


def signs(labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
    """One-vs-rest targets ±1; two classes share a single output, +1 for the second.

    >>> signs(torch.tensor([0, 1]), 2).tolist()
    [[-1.0], [1.0]]
    """
    if classes == 2:
        return (2.0 * labels.double() - 1.0)[:, None]
    return 2.0 * torch.nn.functional.one_hot(labels, classes).double() - 1.0


class Squared(AbstractLoss):
    """Squared error ℓ = ½‖f − y‖², summed over outputs.

    Two classes become ±1 at one output; more become one-hot vectors, centred so that each row sums to zero.

    >>> f, y = torch.tensor([[3.0]]), torch.tensor([[1.0]])
    >>> Squared().value(f, y), Squared().output_gradient(f, y)
    (tensor([2.]), tensor([[2.]]))
    """

    curvature: ClassVar[float] = 1.0
    is_quadratic: ClassVar[bool] = True

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        if classes == 2:
            return signs(labels, classes)
        return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes

    def real(self, values: Float[Tensor, "example value"]) -> Float[Tensor, "example out"]:
        return values

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return (outputs - targets).square().sum(1) / 2

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return outputs - targets


class CrossEntropy(AbstractLoss):
    """Cross-entropy ℓ = log Σ_c exp f_c − f_y, with one output per class.

    The Hessian diag(p) − ppᵀ has no eigenvalue above ½.

    >>> f, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    >>> CrossEntropy().output_gradient(f, y).tolist()
    [[-0.5, 0.5]]
    """

    curvature: ClassVar[float] = 0.5

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return torch.nn.functional.one_hot(labels, classes).double()

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return -(targets * outputs.log_softmax(1)).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return outputs.softmax(1) - targets

    def log_probability(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return -self.value(outputs, targets)


class Hinge(AbstractLoss):
    """Hinge loss ℓ = max(0, 1 − y f) with y = ±1, one-vs-rest and summed over outputs.

    Piecewise linear, so ℓ″ bounds nothing; 1 is taken by convention, as for the squared error.

    >>> import torch
    >>> f, y = torch.tensor([[0.5, 2.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    >>> Hinge().value(f, y).item(), Hinge().output_gradient(f, y).tolist()
    (0.5, [[-1.0, -0.0]])
    """

    curvature: ClassVar[float] = 1.0
    smooth: ClassVar[bool] = False

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return (1 - targets * outputs).clamp(min=0).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return -targets * (targets * outputs < 1)


class Logistic(AbstractLoss):
    """Logistic loss ℓ = log(1 + exp(−y f)) with y = ±1, one-vs-rest and summed over outputs.

    ℓ″ = σ(yf)σ(−yf) ≤ ¼.

    >>> f, y = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    >>> Logistic().output_gradient(f, y).item()
    -0.5
    """

    curvature: ClassVar[float] = 0.25

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return -torch.nn.functional.logsigmoid(targets * outputs).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return -targets * torch.sigmoid(-targets * outputs)

    def log_probability(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """log σ(yf) of a single output; of several, one-vs-rest, of that of the class alone."""
        own = targets.argmax(1, keepdim=True)
        return torch.nn.functional.logsigmoid((targets * outputs).gather(1, own))[:, 0]
