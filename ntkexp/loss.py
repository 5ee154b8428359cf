"""Losses ℓ(f, y) of one example, their gradients ∂ℓ/∂f,
and the encoding of labels as targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import inf
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.stream import normal, stream

# The training objective is L = Σᵢ wᵢ ℓ(f(xᵢ), yᵢ). The weights wᵢ are 1/M for a mean
# over M examples, and 1 for a sum. The experiment applies these weights; the methods
# below do not.


CHECKED_EXAMPLES = 16  # number of examples in the comparison with finite differences


class AbstractLoss(Component):
    """A loss: its value, its output gradient ∂ℓ/∂f,
    and the bound max ℓ″ of its curvature."""

    curvature: ClassVar[float]
    """The bound max ℓ″ of the second derivative,
    which determines the largest stable step size."""
    smooth: ClassVar[bool] = True
    """True if the derivative ℓ′ of the loss is continuous."""
    is_quadratic: ClassVar[bool] = False
    """True if the loss is ½ curvature ‖f − y‖².
    Gradient flow then has a closed form."""
    reduction: Literal["mean", "sum"] = "mean"

    @abstractmethod
    def encode(
        self, labels: Int[Tensor, " example"], classes: int
    ) -> Float[Tensor, "example out"]:
        """Encode class labels as targets.

        Each row is largest at the class of its example. If two classes share a single
        output, the target is positive for the second class."""

    @final
    def targets(self, target: Tensor, classes: int) -> Float[Tensor, "example out"]:
        """Encode class labels (`classes` > 0) or real values (`classes` = 0)
        as targets."""
        return self.encode(target, classes) if classes else self.real(target)

    def real(
        self, values: Float[Tensor, "example value"]
    ) -> Float[Tensor, "example out"]:
        """Return the targets for real values. Raise if the loss needs classes."""
        raise Mistake(
            f"loss={self.option} takes class labels, and the data has real values; "
            "choose loss=squared"
        )

    @abstractmethod
    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the loss ℓ(f, y) of each example, summed over outputs."""

    @abstractmethod
    def output_gradient(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example out"]:
        """Return the output gradient ∂ℓ/∂f of each example."""

    def log_probability(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the log-probability of the class of each example. Raise if the loss
        defines no distribution over the classes."""
        raise Mistake(
            f"loss={self.option} makes no probabilities of outputs; use loss=cross_entropy or "
            "logistic, or another measure, such as margin"
        )

    @final
    def refuse_unlike_differences(self, targets: Float[Tensor, "example out"]) -> None:
        """Raise if `output_gradient` is not the derivative of `value`, if the loss of
        an example depends on other examples, if `curvature` is not positive and finite,
        or if `is_quadratic` is wrong.

        Compare the gradient with finite differences at random outputs,
        in double precision."""
        if not 0 < self.curvature < inf:
            raise Mistake(
                f"loss={self.option}: curvature is {self.curvature}; give the largest second "
                "derivative of value, a number > 0, which limits the stable step size"
            )
        checked = targets[:CHECKED_EXAMPLES].double()
        for outputs, direction in random_outputs(checked):
            value = self.value(outputs, checked)
            slope = (self.output_gradient(outputs, checked) * direction).sum(1)
            if value.shape != slope.shape:
                raise Mistake(
                    f"loss={self.option}: value returns {list(value.shape)} for "
                    f"{len(outputs)} examples; return one loss for each"
                )
            if not value.isfinite().all():
                raise Mistake(
                    f"loss={self.option}: value is not finite at random outputs; return a finite "
                    "loss for all outputs"
                )
            self.refuse_interaction(outputs, direction, checked)
            self.refuse_unlike_parabola(value, outputs - checked)
            differences = Differences(outputs, direction)
            if not differences.agree_with(slope, lambda f: self.value(f, checked)):
                raise Mistake(
                    f"loss={self.option}: output_gradient is not the derivative of value, by "
                    "differences at random outputs, so the path kernel would be wrong; correct one "
                    "of the two"
                )

    @final
    def refuse_other_classes(self, classes: int) -> None:
        """Raise if the loss contradicts the rule for predicted classes.

        Accuracies, margins and agreements predict the class of the largest output, or
        the second of two classes if a single output is positive. So each row of targets
        must be largest at its class. With a single output, the loss of the second class
        must be smaller at f = 1 than at f = −1, and the loss of the first class larger."""
        targets = self.encode(torch.arange(classes), classes)
        if targets.shape[1] > 1:
            largest = targets == targets.amax(1, keepdim=True)
            if targets.shape[1] != classes or not torch.equal(
                largest, torch.eye(classes, dtype=torch.bool)
            ):
                raise Mistake(
                    f"loss={self.option}: encode returns targets whose largest entry is not at the "
                    "class, but accuracies predict the class of the largest output; return targets "
                    "such as one_hot"
                )
            return
        ones = torch.ones_like(targets)
        preference = (self.value(-ones, targets) - self.value(ones, targets)).sign()
        positive = targets[:, 0] > 0
        if preference.tolist() != [-1.0, 1.0] or positive.tolist() != [False, True]:
            raise Mistake(
                f"loss={self.option}: encode returns one output for {classes} classes, and "
                "accuracies read its sign; let the target of the second class be positive, and the "
                "loss of the first class smaller at negative outputs, as with signs"
            )

    @final
    def refuse_unlike_parabola(
        self, value: Float[Tensor, " example"], residual: Float[Tensor, "example out"]
    ) -> None:
        """Raise if `is_quadratic` is True, and the value is not ½ curvature ‖f − y‖²."""
        parabola = self.curvature * residual.square().sum(1) / 2
        if self.is_quadratic and not torch.allclose(value, parabola, rtol=1e-9):
            raise Mistake(
                f"loss={self.option}: is_quadratic is True, and value is not ½ curvature ‖f − y‖² "
                f"with curvature={self.curvature}; correct curvature, or leave out is_quadratic"
            )

    @final
    def refuse_interaction(
        self, outputs: Tensor, direction: Tensor, targets: Tensor
    ) -> None:
        """Raise if the loss of an example depends on other examples of the batch.

        Compute the value and slope of the last example in the batch and alone.
        """

        def last_value_and_slope(f: Tensor, d: Tensor, y: Tensor) -> Tensor:
            slope = (self.output_gradient(f, y) * d).sum(1)
            return torch.stack([self.value(f, y)[-1], slope[-1]])

        in_batch = last_value_and_slope(outputs, direction, targets)
        alone = last_value_and_slope(outputs[-1:], direction[-1:], targets[-1:])
        if not torch.allclose(alone, in_batch, rtol=1e-9, atol=1e-12):
            raise Mistake(
                f"loss={self.option}: the loss of an example depends on others; compute it from "
                "this example alone"
            )

    @final
    def refuse_unlike_second_differences(
        self, targets: Float[Tensor, "example out"]
    ) -> None:
        """Raise if autograd's derivatives of `value` are wrong. Compare the first
        derivative with finite differences of `value`, and the second derivative with
        finite differences of `output_gradient`.

        Leave-out effects use these derivatives.
        """
        checked = targets[:CHECKED_EXAMPLES].double()
        for outputs, direction in random_outputs(checked):
            slope, curvature = self.derivatives(outputs, direction, checked)
            differences = Differences(outputs, direction)

            def slope_at(f: Tensor, direction: Tensor = direction) -> Tensor:
                return (self.output_gradient(f, checked) * direction).sum(1)

            if not differences.agree_with(slope, lambda f: self.value(f, checked)):
                raise self.autograd_mistake("value")
            if not differences.agree_with(curvature, slope_at):
                raise self.autograd_mistake("output_gradient")

    @final
    def autograd_mistake(self, method: str) -> Mistake:
        return Mistake(
            f"loss={self.option}: autograd's derivatives of value do not match finite differences "
            f"of {method}, and effects are computed from them; look for detach, no_grad or "
            "conversions to numbers in value"
        )

    @final
    def derivatives(
        self, outputs: Tensor, direction: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return autograd's first and second derivatives
        of `value` along a direction."""
        outputs = outputs.clone().requires_grad_()
        slope = outputs.new_zeros(len(outputs))
        curvature = slope
        value = self.value(outputs, targets).sum()
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(
                value, outputs, create_graph=True, materialize_grads=True
            )
            slope = (gradient * direction).sum(1)
        if slope.requires_grad:
            (second,) = torch.autograd.grad(
                slope.sum(), outputs, materialize_grads=True
            )
            curvature = (second * direction).sum(1)
        return slope.detach(), curvature

    def weight(self, examples: int) -> float:
        """Return the weight wᵢ of an example in a batch of `examples` examples."""
        return 1.0 / self.divisor(examples)

    def divisor(self, examples: int) -> int:
        """Return 1/wᵢ: the number of examples for a mean, 1 for a sum."""
        return examples if self.reduction == "mean" else 1


def random_outputs(targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield three pairs: random outputs at growing distances from the targets, and a
    random direction."""
    generator = stream("loss")
    for distance in (0.1, 1.0, 3.0):
        offset = normal(generator, *targets.shape).to(targets)
        direction = normal(generator, *targets.shape).to(targets)
        yield targets + distance * offset, direction


class Differences:
    """One-sided difference quotients at `outputs`, along the rows of `direction`."""

    def __init__(self, outputs: Tensor, direction: Tensor) -> None:
        self.outputs = outputs
        self.direction = direction

    def agree_with(self, slope: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
        """Return True if `slope` is the derivative of `function`, up to rounding.

        The slope must lie between the left and the right difference quotient. At a kink,
        this accepts every slope between the left and the right derivative."""
        value = function(self.outputs)
        agrees = torch.zeros_like(slope, dtype=torch.bool)
        eps = torch.finfo(torch.float64).eps
        for h in (1e-5, 1e-6):
            quotients = torch.stack(
                [
                    (function(self.outputs + sign * h * self.direction) - value)
                    / (sign * h)
                    for sign in (1, -1)
                ]
            )
            rounding = 100 * eps * (value.abs() + self.outputs.abs().amax(1) + 1) / h
            above_lower = quotients.amin(0) - rounding <= slope
            below_upper = slope <= quotients.amax(0) + rounding
            agrees |= above_lower & below_upper
        return bool(agrees.all())


def one_hot(
    labels: Int[Tensor, " example"], classes: int
) -> Float[Tensor, "example out"]:
    return torch.nn.functional.one_hot(labels, classes).double()


def centred_one_hot(
    labels: Int[Tensor, " example"], classes: int
) -> Float[Tensor, "example out"]:
    """Return one-hot vectors minus 1/C for C classes, so that each row sums to zero."""
    return one_hot(labels, classes) - 1 / classes


def signs(
    labels: Int[Tensor, " example"], classes: int
) -> Float[Tensor, "example out"]:
    """Return one-vs-rest targets ±1. Two classes share one output,
    with +1 for the second class.

    >>> signs(torch.tensor([0, 1]), 2).tolist()
    [[-1.0], [1.0]]
    """
    if classes == 2:
        return (2.0 * labels.double() - 1.0)[:, None]
    return 2.0 * one_hot(labels, classes) - 1.0


class Squared(AbstractLoss):
    """Squared error ℓ = ½‖f − y‖², summed over outputs.

    Two classes are encoded as ±1 at one output. More classes are encoded as one-hot
    vectors minus 1/classes, so that each row sums to zero.

    >>> f = torch.tensor([[3.0]])
    >>> y = torch.tensor([[1.0]])
    >>> Squared().value(f, y), Squared().output_gradient(f, y)
    (tensor([2.]), tensor([[2.]]))
    """

    curvature: ClassVar[float] = 1.0
    is_quadratic: ClassVar[bool] = True

    def encode(
        self, labels: Int[Tensor, " example"], classes: int
    ) -> Float[Tensor, "example out"]:
        if classes == 2:
            return signs(labels, classes)
        return centred_one_hot(labels, classes)

    def real(
        self, values: Float[Tensor, "example value"]
    ) -> Float[Tensor, "example out"]:
        return values

    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return (outputs - targets).square().sum(1) / 2

    def output_gradient(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example out"]:
        return outputs - targets


class CrossEntropy(AbstractLoss):
    """Cross-entropy ℓ = log Σ_c exp f_c − f_y, with one output per class.

    The eigenvalues of the Hessian diag(p) − ppᵀ are at most ½.

    >>> f = torch.zeros(1, 2, dtype=torch.float64)
    >>> y = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    >>> CrossEntropy().output_gradient(f, y).tolist()
    [[-0.5, 0.5]]
    """

    curvature: ClassVar[float] = 0.5

    def encode(
        self, labels: Int[Tensor, " example"], classes: int
    ) -> Float[Tensor, "example out"]:
        return one_hot(labels, classes)

    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return -(targets * outputs.log_softmax(1)).sum(1)

    def output_gradient(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example out"]:
        return outputs.softmax(1) - targets

    def log_probability(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return -self.value(outputs, targets)


class Hinge(AbstractLoss):
    """Hinge loss ℓ = max(0, 1 − y f) with y = ±1, one-vs-rest and summed over outputs.

    ℓ is piecewise linear, so its second derivative 0 gives no limit of the step size.
    By convention, `curvature` is 1, as for the squared error.

    >>> import torch
    >>> f = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    >>> y = torch.ones(1, 2, dtype=torch.float64)
    >>> Hinge().value(f, y).item(), Hinge().output_gradient(f, y).tolist()
    (0.5, [[-1.0, -0.0]])
    """

    curvature: ClassVar[float] = 1.0
    smooth: ClassVar[bool] = False

    def encode(
        self, labels: Int[Tensor, " example"], classes: int
    ) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return (1 - targets * outputs).clamp(min=0).sum(1)

    def output_gradient(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example out"]:
        return -targets * (targets * outputs < 1)


class Logistic(AbstractLoss):
    """Logistic loss ℓ = log(1 + exp(−y f)) with y = ±1,
    one-vs-rest and summed over outputs.

    ℓ″ = σ(yf)σ(−yf) ≤ ¼.

    >>> f, y = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    >>> Logistic().output_gradient(f, y).item()
    -0.5
    """

    curvature: ClassVar[float] = 0.25

    def encode(
        self, labels: Int[Tensor, " example"], classes: int
    ) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return -torch.nn.functional.logsigmoid(targets * outputs).sum(1)

    def output_gradient(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example out"]:
        return -targets * torch.sigmoid(-targets * outputs)

    def log_probability(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return log σ(y f) at the output of the example's class."""
        label = targets.argmax(1, keepdim=True)
        return torch.nn.functional.logsigmoid((targets * outputs).gather(1, label))[
            :, 0
        ]
