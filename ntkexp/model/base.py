"""An architecture: a value from which a network of any width is built, for inputs of any shape.

What the data asks of a network comes first, and how its output is read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod, sqrt
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.component import Component, Count
from ntkexp.init import AbstractInit
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.limit.network import Network, network
from ntkexp.mistake import Mistake
from ntkexp.model.functional import called, copied
from ntkexp.shapes import Weights
from ntkexp.stream import stream


@dataclass(frozen=True)
class LearningTask:
    """What the data asks of a network: the shape of an example, the number of outputs, and, unless `vocabulary` is 0,
    that examples are tokens, numbers below it.
    """

    shape: tuple[int, ...]
    outputs: int
    vocabulary: int = 0

    def sample(self, examples: int = 2) -> Float[Tensor, "example *shape"]:
        """Examples that are made up, to try a network on.

        >>> LearningTask((3,), 1, vocabulary=4).sample().tolist()
        [[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]]
        """
        if self.vocabulary:
            tokens = torch.arange(examples * prod(self.shape)) % self.vocabulary
            return tokens.view(examples, *self.shape).double()
        return torch.randn(examples, *self.shape, generator=stream("trial"), dtype=torch.float64)

    @property
    def description(self) -> str:
        """How the examples are spoken of."""
        tokens = f", tokens below {self.vocabulary}" if self.vocabulary else ""
        return f"the data has examples of shape {list(self.shape)}{tokens}"

    def refuse_tokens(self, model: str) -> None:
        """Most networks calculate with their inputs, and a token is no quantity."""
        if self.vocabulary:
            raise Mistake(
                f"model={model} takes numbers, and the data has tokens; choose model=transformer, or "
                "data.encoding=one_hot"
            )


# --- How a network's output is read: scaled by α, made antisymmetric, centred (the formulas stand in `ntkexp.init`).
#
# Each reading names the `terms` of which f is the sum.


class ScaledOutput(nn.Module):
    """f = α Σ terms, the terms being plus and minus what networks of the same shape give."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__()
        self.network, self.alpha = network, alpha

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)

    def trained_terms(
        self, x: Float[Tensor, "example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        """The terms that change in training."""
        return self.terms(x)

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example out"]:
        first, *rest = self.terms(x)
        total = sum(rest, start=first)
        return total if self.alpha == 1 else self.alpha * total

    def sizes(
        self, weights: Weights, x: Float[Tensor, "example *shape"]
    ) -> Float[Tensor, "term example"]:
        """α‖trained term‖ for every example at these weights: f cannot be known to better than rounding of that."""
        there = {f"reading.{name}": weight for name, weight in weights.items()}
        with torch.no_grad():
            terms = called(TrainedTerms(self), there, (x,))
        return self.alpha * torch.stack([term.norm(dim=1) for term in terms])


class TrainedTerms(nn.Module):
    """The trained terms of a reading as the outputs of a module."""

    def __init__(self, reading: ScaledOutput) -> None:
        super().__init__()
        self.reading = reading

    def forward(
        self, x: Float[Tensor, "example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return self.reading.trained_terms(x)


class Antisymmetric(ScaledOutput):
    """f = α (h(θ_a) − h(θ_b))/√2, equal halves at the start."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha / sqrt(2))
        self.mirror = copy_network(network, "antisymmetric")

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.mirror(x))


class Centred(ScaledOutput):
    """f = α (h(θ) − h(θ_0)), θ_0 kept as constants."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha)
        self.origin = copy_network(network, "centred").requires_grad_(False)

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.origin(x))

    def trained_terms(
        self, x: Float[Tensor, "example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)


def read_output(network: nn.Module, init: AbstractInit) -> ScaledOutput:
    """The network with its output read as `init` says."""
    if init.antisymmetric:
        return Antisymmetric(network, init.alpha)
    return Centred(network, init.alpha) if init.centred else ScaledOutput(network, init.alpha)


def copy_network(network: nn.Module, key: str) -> nn.Module:
    try:
        return copied(network)
    except Mistake as mistake:
        raise Mistake(f"init.{key}=true needs a copy of the network: {mistake}") from None


# --- An architecture: a value from which a network of any width is built, for inputs of any shape.


class AbstractArchitecture(Component):
    """An architecture is what is trained. `width` scales every architecture."""

    remedy: ClassVar[str] = "lower init.W_std or init.alpha"  # for outputs that are not finite

    width: Count = 512

    @abstractmethod
    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        """A network for the task, its weights drawn from the generator."""

    def module(
        self,
        init: AbstractInit,
        shape: tuple[int, ...],
        outputs: int,
        generator: torch.Generator,
        vocabulary: int = 0,
    ) -> ScaledOutput:
        """The network at the start of training, its output read as `init` says; `shape` is that of one example, and
        a `vocabulary` that is not 0 says that examples are tokens.
        """
        return read_output(
            self.network(init, LearningTask(shape, outputs, vocabulary), generator), init
        )

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        """What the network h becomes as its width grows; where that is not known, a mistake says so."""
        raise Mistake(f"model={self.option} has no known limit of infinite width")


class AbstractLayered(AbstractArchitecture):
    """An architecture that is a list of layers."""

    @abstractmethod
    def layers(
        self, init: AbstractInit, shape: tuple[int, ...], outputs: int
    ) -> tuple[AbstractLayer, ...]:
        """The layers, from an example of the given shape to its outputs."""

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        task.refuse_tokens(self.option)
        return build(self.layers(init, task.shape, task.outputs), task.shape, generator)

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        task.refuse_tokens(self.option)
        return network(self.layers(init, task.shape, task.outputs), task.shape)
