"""Measures: the quantity that a run explains at each query,
such as its outputs, loss or margin.

    m(θ; x) = g(f(θ; x), y)            m_T(x) − m_0(x) = Σᵢ 𝒮(x, xᵢ) + 𝒟(x)

f are the outputs of the network, and g is the function of the measure. y is the target
of the query x, encoded by the loss. m_0 and m_T are the values before and after
training. 𝒮 are the contributions of training examples, and 𝒟 is the effect of weight
decay. Secant Jacobians treat g as an additional last layer of the network."""

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
    """The methods of a loss that measures use."""

    @property
    def option(self) -> str:
        """The loss's name on the command line."""

    def value(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the loss ℓ(f, y) of each example."""

    def log_probability(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the log-probability of the class of each example, or raise a `Mistake`
        if the loss defines no probabilities."""


class AbstractMeasure(Component):
    """The quantity that a run explains at each query."""

    @abstractmethod
    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> MeasuredOutputs | None:
        """Return the measure with this loss. Return None if the run explains the
        outputs themselves.

        Raise a `Mistake` if the measure is not defined for the loss or the data.
        """


class Output(AbstractMeasure):
    """The outputs themselves."""

    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> None:
        return None


class AbstractNumber(AbstractMeasure):
    """A measure with one value for each query, which depends on the outputs and the
    target of this query."""

    takes_classes: ClassVar[bool] = True

    @final
    def of_run(
        self, objective: Objective, targets: Float[Tensor, "example out"], classes: int
    ) -> MeasuredOutputs:
        if self.takes_classes and not classes:
            raise Mistake(
                "the data have real values and no classes; choose loss or output"
            )
        # evaluate once, because the loss may raise an error, for example if it defines
        # no probabilities
        self.values(objective, torch.zeros_like(targets[:1]), targets[:1])
        return MeasuredOutputs(measure=self, objective=objective)

    @abstractmethod
    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the measure g(f, y) of each example."""


class Loss(AbstractNumber):
    """The unweighted training loss ℓ(f, y) of the query. Lower is better.

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
    """The log-probability log p(y) of the query's class, for losses that define one.

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
    """The probability p(y) of the query's class, for losses that define one.

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
    """The margin f_y − max_{c ≠ y} f_c of the query's class y,
    or ±f if there is one output.

    The margin is positive if the query is classified correctly.

    >>> from ntkexp.loss import Squared
    >>> f, y = torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    >>> Margin().values(Squared(), f, y).tolist()
    [2.0]
    >>> Margin().values(Squared(), f[:, :1], -y[:, 1:2]).tolist()
    [-1.0]
    """

    def values(
        self,
        objective: Objective,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        if outputs.shape[1] == 1:
            # the second of two classes has a target > 0
            sign = 2 * (targets > 0).to(outputs.dtype) - 1
            return (outputs * sign)[:, 0]
        # sort so that the query's class comes last: its target is the largest
        order = targets.argsort(1)
        output_of_class = outputs.gather(1, order[:, -1:])
        largest_other = outputs.gather(1, order[:, :-1]).amax(1, keepdim=True)
        return (output_of_class - largest_other)[:, 0]


# --- Measures with the loss and the targets of a run


@dataclass(frozen=True)
class MeasuredOutputs:
    """The function g(f, y) of a measure for one loss."""

    measure: AbstractNumber
    objective: Objective

    @property
    def name(self) -> str:
        return self.measure.option

    def of(self, function: Function) -> Function:
        """Return the composition of g with the network: (θ, (x, y)) → g(f(θ; x), y)."""

        def measured(weights: Weights, inputs: Inputs) -> Tensor:
            assert isinstance(inputs, tuple)
            points, targets = inputs
            assert isinstance(points, Tensor)
            assert isinstance(targets, Tensor)
            return self(function(weights, points), targets)

        return measured

    def __call__(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, "example 1"]:
        """Return the measure g(f, y) as a column, [example, 1]."""
        return self.measure.values(self.objective, outputs, targets)[:, None]

    def slopes(
        self,
        outputs: Float[Tensor, "example out"],
        targets: Float[Tensor, "example out"],
    ) -> Float[Tensor, " example"]:
        """Return the factor by which g amplifies rounding errors of the outputs:
        max(‖∂g/∂f‖, 1). It is at least 1, because g itself is rounded too."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self(leaf, targets).sum(), leaf)
        slopes: Tensor = gradient.norm(dim=1).clamp(min=1.0)
        return slopes


@dataclass(frozen=True)
class MeasuredPoints:
    """A measure with the targets of all points of a run."""

    measured: MeasuredOutputs
    targets: Float[Tensor, "point out"]

    @property
    def name(self) -> str:
        return self.measured.name

    def __call__(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, "point 1"]:
        return self.measured(outputs, self.targets)

    def slopes(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, " point"]:
        return self.measured.slopes(outputs, self.targets)
