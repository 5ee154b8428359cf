"""What a run explains at each point: its outputs, or a measure g of them, which is a part of the function followed.

    m(θ; x) = g(f(θ; x), y)            m_T(x) − m_0(x) = Σᵢ 𝒮(x, xᵢ) + 𝒟(x)

y is the point's target, as the loss encodes it, and the secant passes through g as through any layer.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs, Weights


@runtime_checkable
class Objective(Protocol):
    """What measures need to know of a loss."""

    @property
    def option(self) -> str:
        """Its name."""

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """ℓ(f, y)."""

    def log_probability(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """log p(y), or a mistake."""


class AbstractMeasure(Component):
    """What is explained at each point."""

    @abstractmethod
    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> MeasuredOutputs | None:
        """The measure under this loss, or none where it is the outputs themselves; refused where it does not exist."""


class Output(AbstractMeasure):
    """The outputs themselves."""

    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> None:
        return None


class AbstractNumber(AbstractMeasure):
    """One number for each point, from its outputs and its target."""

    takes_classes: ClassVar[bool] = True

    @final
    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> MeasuredOutputs:
        if self.takes_classes and not classes:
            raise Mistake("the data have real values and no classes; choose loss or output")
        self.values(
            objective, torch.zeros_like(targets[:1]), targets[:1]
        )  # which a loss may refuse
        return MeasuredOutputs(measure=self, objective=objective)

    @abstractmethod
    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """g(f, y)."""


class Loss(AbstractNumber):
    """The loss ℓ(f, y) that is trained, of one point and without weights: lower is better.

    >>> from ntkexp.loss import Squared
    >>> Loss().values(Squared(), torch.tensor([[3.0]]), torch.tensor([[1.0]])).tolist()
    [2.0]
    """

    takes_classes: ClassVar[bool] = False

    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return objective.value(outputs, targets)


class LogProbability(AbstractNumber):
    """The log-probability that the network gives the class of a point, log p(y), under a loss that has one.

    >>> from ntkexp.loss import Logistic
    >>> LogProbability().values(Logistic(), torch.zeros(1, 1), torch.ones(1, 1)).exp().tolist()
    [0.5]
    """

    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return objective.log_probability(outputs, targets)


class Probability(AbstractNumber):
    """The probability that the network gives the class of a point, p(y), under a loss that has one.

    >>> from ntkexp.loss import CrossEntropy
    >>> Probability().values(CrossEntropy(), torch.zeros(1, 4), torch.eye(4)[:1]).tolist()
    [0.25]
    """

    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        return objective.log_probability(outputs, targets).exp()


class Margin(AbstractNumber):
    """By how much the output of a point's class exceeds the largest of the others, f_y − max_{c ≠ y} f_c; of a single
    output, ±f. It is positive where the point is classified right.

    >>> from ntkexp.loss import Squared
    >>> f, y = torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    >>> Margin().values(Squared(), f, y).tolist(), Margin().values(Squared(), f[:, :1], -y[:, 1:2]).tolist()
    ([2.0], [-1.0])
    """

    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        if outputs.shape[1] == 1:
            return (outputs * targets.sign())[:, 0]
        order = targets.argsort(
            1
        )  # the class of the point is the last, as its target is the largest
        return (
            outputs.gather(1, order[:, -1:])
            - outputs.gather(1, order[:, :-1]).amax(1, keepdim=True)
        )[:, 0]


# --- A measure under the loss of a run: as a function of weights, and of outputs alone.


@dataclass(frozen=True)
class MeasuredOutputs:
    """g of some outputs, given the targets of the same points."""

    measure: AbstractNumber
    objective: Objective

    @property
    def name(self) -> str:
        return self.measure.option

    def of(self, function: Function) -> Function:
        """g ∘ f, of inputs that are pairs (x, y)."""

        def measured(weights: Weights, inputs: Inputs) -> Tensor:
            assert isinstance(inputs, tuple)
            points, targets = inputs
            assert isinstance(points, Tensor)
            assert isinstance(targets, Tensor)
            return self(function(weights, points), targets)

        return measured

    def __call__(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example 1"]:
        """g(f, y), as the one output of each point."""
        return self.measure.values(self.objective, outputs, targets)[:, None]

    def slopes(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        """‖∂g/∂f‖, by which rounding of the outputs enters the measure; at least 1, as g rounds too."""
        with torch.enable_grad():
            given = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self(given, targets).sum(), given)
        found: Tensor = gradient.norm(dim=1).clamp(min=1.0)
        return found


@dataclass(frozen=True)
class MeasuredPoints:
    """The same at all points of a run, whose targets are known."""

    measured: MeasuredOutputs
    targets: Float[Tensor, "point out"]

    @property
    def name(self) -> str:
        return self.measured.name

    def __call__(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, "point 1"]:
        return self.measured(outputs, self.targets)

    def slopes(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, " point"]:
        return self.measured.slopes(outputs, self.targets)
