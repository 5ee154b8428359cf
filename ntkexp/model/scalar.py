"""Scalar functions of a scalar, small enough to inspect every parameter
and every kernel entry."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from ntkexp.init import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, LearningTask

# The fields of these components are the initial parameters. The seed, `width` and the
# scales of `init` have no effect.


class AbstractScalar(AbstractArchitecture):
    """A scalar function of a scalar."""

    @abstractmethod
    def function(self) -> nn.Module:
        """Return the function [example, 1] → [example, 1] with its initial parameters."""

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        task.refuse_tokens(self.option)
        if task.shape != (1,) or task.outputs != 1:
            raise Mistake(
                f"model={self.option} maps one number to one output; {task.description} and needs "
                f"{task.outputs} outputs; choose data=integers"
            )
        return self.function()


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


class ScalarLinear(AbstractScalar):
    """A straight line with two parameters, whose kernel is not invariant
    under translations.

        f(x) = θ₁ x + θ₂,    k(x, x′) = x x′ + 1

    An observation at x′ = 10 moves the values at x < −0.1 in the opposite direction
    (Huszár 2020). `slope` and `offset` are the initial parameters.

    >>> from ntkexp.library import tangent_kernel
    >>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
    >>> tangent_kernel(ScalarLinear().function(), x)[:, 0, 0, 0].tolist()
    [101.0, -9.0]
    """

    slope: float = 3.0
    offset: float = 1.0

    def function(self) -> nn.Module:
        return Line(self.slope, self.offset, 1.0)


class Line(nn.Module):
    """f(x) = θ₁ x + gain · θ₂."""

    def __init__(self, slope: float, offset: float, gain: float) -> None:
        super().__init__()
        self.slope = parameter(slope)
        self.offset = parameter(offset)
        self.gain = gain

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        return torch.mul(x, self.slope) + self.gain * self.offset


class ReparametrisedLinear(AbstractScalar):
    """The straight line of `scalar_linear` with a scaled offset:
    equal functions, a different kernel.

        f(x) = θ₁ x + gain · θ₂,    k(x, x′) = x x′ + gain²

    The kernel, and therefore generalisation, depends on the parametrisation, not only
    on the set of functions (Huszár 2020). `slope` and `parameter` are the initial θ₁
    and θ₂.

    >>> import torch
    >>> from ntkexp.library import tangent_kernel
    >>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
    >>> tangent_kernel(ReparametrisedLinear().function(), x)[:, 0, 0, 0].tolist()
    [200.0, 90.0]
    """

    slope: float = 3.0
    parameter: float = 0.1
    gain: float = 10.0

    def function(self) -> nn.Module:
        return Line(self.slope, self.parameter, self.gain)


class RadialBasis(AbstractScalar):
    """Two Gaussian bumps and an offset: a function with five parameters.

        f(x) = a₁ exp(−(x − c₁)²/30) + a₂ exp(−(x − c₂)²/30) + b

    F. Huszár, "Some intuition on the neural tangent kernel" (2020), gives the
    parameters (4, −10, 25, 10, 50). In his formula, the first number of each pair is
    the amplitude. But his text and pictures fit the other `reading`: the first number
    is the centre. Then k(x, 10) changes its sign, and the kernel of a finite step has
    its maximum at x = 7.

        reading            (c₁, a₁, c₂, a₂, b)      k(10, 10)    k/k(10, 10) over −10 … 20
        centre_first       (4, −10, 25, 10, 50)     2.542236     −0.2785 (at 0) … 1.2042 (at 8), left tail 0.387
        amplitude_first    (−10, 4, 10, 25, 50)     2.000000      0.5 … 1 (at 10): never negative

    >>> from ntkexp.library import tangent_kernel
    >>> x = torch.tensor([[10.0], [0.0]], dtype=torch.float64)
    >>> kernel = tangent_kernel(RadialBasis().function(), x)[:, 0, 0, 0]
    >>> round(kernel[0].item(), 6), round((kernel[1] / kernel[0]).item(), 4)
    (2.542236, -0.2785)
    """

    numbers: tuple[float, float, float, float, float] = (4.0, -10.0, 25.0, 10.0, 50.0)
    reading: Literal["centre_first", "amplitude_first"] = "centre_first"

    def function(self) -> nn.Module:
        first, second, third, fourth, offset = self.numbers
        if self.reading == "centre_first":
            return Bumps((first, third), (second, fourth), offset)
        return Bumps((second, fourth), (first, third), offset)


class Bumps(nn.Module):
    """f(x) = Σ_j a_j exp(−(x − c_j)²/30) + b."""

    def __init__(
        self, centre: tuple[float, float], amplitude: tuple[float, float], offset: float
    ) -> None:
        super().__init__()
        self.centre = parameter(*centre)
        self.amplitude = parameter(*amplitude)
        self.offset = parameter(offset)

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        bumps = torch.exp(-1 / 30 * torch.square(x - self.centre))
        return torch.mm(bumps, self.amplitude[:, None]) + self.offset


Entry = Annotated[int, Field(ge=-(10**6), le=10**6)]


class LookupTable(AbstractScalar):
    """A table with one parameter for each integer from `first` to `last`,
    which cannot generalise.

        f(i) = θᵢ,    θᵢ = slope · i + offset at the start,    k(i, j) = 1 if i = j, else 0

    Gradient descent on the error at one integer changes no other value (Huszár 2020).

    >>> table = LookupTable().function()
    >>> table(torch.tensor([[10.0], [-10.0]])).flatten().tolist()
    [32.0, -28.0]
    """

    first: Entry = -10
    last: Entry = 20
    slope: float = 3.0
    offset: float = 2.0

    @model_validator(mode="after")
    def refuse_empty(self) -> Self:
        if self.last < self.first:
            raise Mistake(
                f"model.last={self.last}: the table starts at model.first={self.first}; raise it"
            )
        return self

    def function(self) -> nn.Module:
        keys = torch.arange(self.first, self.last + 1, dtype=torch.float64)
        return TableOfEntries(keys, self.slope * keys + self.offset)


class TableOfEntries(nn.Module):
    """f(x) is the entry with key x."""

    key: Tensor

    def __init__(
        self, key: Float[Tensor, " entry"], entry: Float[Tensor, " entry"]
    ) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.entry = nn.Parameter(entry[:, None].clone())

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        entry = (x[:, 0] - self.key[0]).round().long()
        known = (entry >= 0) & (entry < len(self.key)) & (x[:, 0] == x[:, 0].round())
        if not known.all():
            raise Mistake(
                f"model=lookup_table has no entry for {float(x[~known][0, 0]):g}; its keys are the "
                f"integers from model.first={int(self.key[0])} to model.last={int(self.key[-1])}"
            )
        return nn.functional.embedding(entry, self.entry)
