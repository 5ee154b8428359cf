"""Synthetic sources, which generate as many examples as the splits need."""

from __future__ import annotations

from math import pi, sqrt
from typing import Annotated, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, model_validator
from torch import Tensor
from torch.nn.functional import normalize

from ntkexp.component import MAX_COUNT, Count, CountOrNone, Depth
from ntkexp.data.base import AbstractSource, Examples, Standardise
from ntkexp.mistake import Mistake
from ntkexp.stream import normal

# Each source draws its target function before the inputs, so that the function is
# independent of the number of examples.


class AbstractSynthetic(AbstractSource):
    """A source that generates examples. The size of `test` must be a number."""

    test: CountOrNone = 256
    standardise: Standardise = "none"

    @property
    def size(self) -> int:
        """The number of examples in all splits."""
        return self.train + self.query + self.test


class Circle(AbstractSynthetic):
    """Points on the unit circle, with a sum of waves as the target.

    Regression; `frequencies` are the numbers k of waves around the circle.

        x = (cos a, sin a),  a uniform in [0, 2π),    y = Σ_k cos(k a) + sin(k a)

    >>> inputs = Circle(train=3, query=0, test=0).split().train.inputs
    >>> torch.allclose(inputs.norm(dim=1), torch.ones(3, dtype=torch.float64))
    True
    """

    frequencies: tuple[Count, ...] = Field((1, 2, 3), min_length=1)

    def examples(self, generator: torch.Generator) -> Examples:
        angle = (
            2 * pi * torch.rand(self.size, 1, generator=generator, dtype=torch.float64)
        )
        phase = angle * torch.tensor(self.frequencies, dtype=torch.float64)
        target = (phase.cos() + phase.sin()).sum(1, keepdim=True)
        return Examples(torch.cat([angle.cos(), angle.sin()], 1), target)


class Moons(AbstractSynthetic):
    """Two interleaving half circles with Gaussian noise, equally many points on each.

    Two classes; `noise` is the standard deviation of the noise in both coordinates.

    upper: (cos t, sin t)        lower: (1 − cos t, ½ − sin t)        t uniform in [0, π)
    """

    standardise: Standardise = "each"
    noise: NonNegativeFloat = 0.1

    def examples(self, generator: torch.Generator) -> Examples:
        angle = pi * torch.rand(self.size, generator=generator, dtype=torch.float64)
        labels = torch.arange(self.size) % 2
        upper = torch.stack([angle.cos(), angle.sin()], 1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
        noise = self.noise * normal(generator, self.size, 2)
        return Examples(
            torch.where(labels[:, None] == 0, upper, lower) + noise,
            labels,
            ("upper", "lower"),
        )


class Sphere(AbstractSynthetic):
    """Points on a sphere, with a polynomial of low degree as the target.

    Regression; the inputs have `dimension` coordinates.

        x uniform on S^{d−1},    y = Σ_{k ≤ degree} h_k(√d w_k·x),    w_k random unit vectors

    h_k = He_k/√k! are the normalised Hermite polynomials. In high dimension, every
    degree contributes the same variance to y.

        h_0 = 1,    h_1 = z,    √(k+1) h_{k+1} = z h_k − √k h_{k−1}

    >>> z = torch.tensor([2.0], dtype=torch.float64)
    >>> [round(value.item(), 4) for value in hermite(z, 2)]
    [1.0, 2.0, 2.1213]
    """

    dimension: int = Field(10, ge=2, le=MAX_COUNT)
    degree: Depth = 2

    def examples(self, generator: torch.Generator) -> Examples:
        def unit_vectors(count: int) -> Tensor:
            return normalize(normal(generator, count, self.dimension))

        directions = unit_vectors(self.degree)
        inputs = unit_vectors(self.size)
        projections = sqrt(self.dimension) * inputs @ directions.t()
        target = sum(
            hermite(z, k)[k] for k, z in enumerate(projections.unbind(1), start=1)
        )
        return Examples(inputs, torch.as_tensor(target)[:, None])


def hermite(
    z: Float[Tensor, " example"], degree: int
) -> list[Float[Tensor, " example"]]:
    """Return the normalised Hermite polynomials h_0(z) … h_degree(z)."""
    values = [torch.ones_like(z), z]
    for k in range(1, degree):
        values.append((z * values[k] - sqrt(k) * values[k - 1]) / sqrt(k + 1))
    return values


class Parity(AbstractSynthetic):
    """Parity (generalised XOR). Fewer than `order` coordinates contain no information
    about the label.

    Two classes; the inputs are corners of the cube {−1, 1}^dimension, or Gaussian.

        y = sign(x_1 · x_2 ⋯ x_order)

    Corners are drawn without repetition, so that no test example is a training example.
    """

    dimension: Count = 10
    order: Count = 2
    inputs: Literal["signs", "gaussian"] = "signs"

    def examples(self, generator: torch.Generator) -> Examples:
        if self.order > self.dimension:
            raise Mistake(
                f"data.order={self.order} coordinates are multiplied, but "
                f"data.dimension={self.dimension}"
            )
        if self.inputs == "signs":
            inputs = distinct_corners(self.size, self.dimension, generator)
        else:
            inputs = normal(generator, self.size, self.dimension)
        positive = inputs[:, : self.order].sign().prod(1) > 0
        return Examples(inputs, positive.long(), ("odd", "even"))


def distinct_corners(
    count: int, dimension: int, generator: torch.Generator
) -> Float[Tensor, "example dimension"]:
    """Draw distinct corners of the cube {−1, 1}^dimension. All sets of corners are
    equally likely."""
    if count > 2**dimension:
        raise Mistake(
            f"data.train, data.query and data.test ask for {count} examples, and a cube of "
            f"data.dimension={dimension} has {2**dimension} corners; lower one of them, or raise "
            "data.dimension"
        )
    points = torch.empty(0, dimension, dtype=torch.float64)
    while len(points) < count:
        signs = 2.0 * torch.randint(0, 2, (count, dimension), generator=generator) - 1.0
        points = torch.unique(torch.cat([points, signs.double()]), dim=0)
    return points[torch.randperm(len(points), generator=generator)[:count]]


class Teacher(AbstractSynthetic):
    """Gaussian inputs, with a random network as the target.

    Regression; the inputs have `dimension` coordinates, the teacher has `hidden` units.

    x ~ N(0, I_d),    y = Σ_j a_j tanh(w_j·x) / √hidden,    w_j ~ N(0, I/d),  a_j ~ N(0, 1)
    """

    dimension: Count = 10
    hidden: Count = 16

    def examples(self, generator: torch.Generator) -> Examples:
        first = normal(generator, self.dimension, self.hidden)
        second = normal(generator, self.hidden, 1)
        inputs = normal(generator, self.size, self.dimension)
        hidden = torch.tanh(inputs @ first / sqrt(self.dimension))
        return Examples(inputs, hidden @ second / sqrt(self.hidden))


class Cued(AbstractSynthetic):
    """Gaussian inputs with a cue that selects one of two tasks.

    Regression on the first or the second of two orthogonal tasks.

        x ~ N(0, I_d) with the cue (c, 0) for the first task and (0, c) for the second
        y = w₁·x or w₂·x,  wᵢ·wⱼ = δᵢⱼ

    With equal seeds, both tasks have the same x and differ in cue and target.
    `data=sequence` trains them one after the other, as in T. Flesch, K. Juechems, T.
    Dumbalska, A. Saxe & C. Summerfield, "Orthogonal representations for robust
    context-dependent task performance in brains and neural networks", Neuron 110
    (2022).

    >>> from ntkexp.data.base import examples_stream
    >>> sources = [Cued(task=task, train=3, query=1, test=0) for task in (1, 2)]
    >>> one, other = (source.examples(examples_stream(0)) for source in sources)
    >>> one.inputs[0, -2:].tolist(), other.inputs[0, -2:].tolist()
    ([2.0, 0.0], [0.0, 2.0])
    >>> torch.equal(one.inputs[:, :-2], other.inputs[:, :-2])
    True
    """

    task: Literal[1, 2] = 1
    dimension: int = Field(6, ge=2, le=MAX_COUNT)
    cue: float = Field(2.0, ge=0)

    def examples(self, generator: torch.Generator) -> Examples:
        directions = torch.linalg.qr(normal(generator, self.dimension, 2)).Q
        points = normal(generator, self.size, self.dimension)
        cue = self.cue * torch.eye(2, dtype=points.dtype)[self.task - 1].expand(
            len(points), 2
        )
        target = points @ directions[:, self.task - 1 : self.task]
        return Examples(torch.cat([points, cue], 1), target)


Whole = Annotated[int, Field(ge=-(10**6), le=10**6)]


class Integers(AbstractSource):
    """The integers from `first` to `last`; only a few are training examples.

    Regression with one target value for all.
    `train` must be the number of observed integers.

        x = first … last,    y = value

    The training split contains the integers in `observed`, in this order; the test
    split contains all others. F. Huszár, "Some intuition on the neural tangent kernel"
    (2020), draws kernels over x = −10 … 20 with one observation, (10, 50). Inputs and
    targets are neither standardised nor shuffled.

    >>> data = Integers().split()
    >>> data.train.inputs.tolist(), data.train.target.tolist(), len(data.test.inputs)
    ([[10.0]], [[50.0]], 30)
    """

    train: Count = 1
    query: CountOrNone = 0
    standardise: Standardise = "none"
    first: Whole = -10
    last: Whole = 20
    observed: tuple[Whole, ...] = Field((10,), min_length=1)
    value: float = 50.0

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        outside = [x for x in self.observed if not self.first <= x <= self.last]
        if outside:
            raise Mistake(
                f"data.observed={list(self.observed)}: {outside[0]} is not in {self.first} … "
                f"{self.last}; change data.first or data.last"
            )
        if len(set(self.observed)) < len(self.observed):
            raise Mistake(f"data.observed={list(self.observed)}: give each number once")
        if self.train != len(self.observed):
            raise Mistake(
                f"data.train={self.train}: {len(self.observed)} of the numbers are observed; give "
                "the same number, or change data.observed"
            )
        if self.label_noise:
            raise Mistake(
                "data.label_noise: all targets of integers are equal, so noise has no standard "
                "deviation to scale with"
            )
        return self

    def examples(self, generator: torch.Generator) -> Examples:
        unobserved = [
            x for x in range(self.first, self.last + 1) if x not in set(self.observed)
        ]
        inputs = torch.tensor([*self.observed, *unobserved], dtype=torch.float64)[
            :, None
        ]
        return Examples(inputs, torch.full_like(inputs, self.value), as_given=True)
