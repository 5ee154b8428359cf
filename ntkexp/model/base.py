"""The interface of architectures, which build networks of any width for inputs
of any shape.

This file also defines learning tasks, and the forms of the output: scaled,
antisymmetric and centred."""

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
from ntkexp.layer.base import LayerChain, build
from ntkexp.limit.network import Network, network
from ntkexp.mistake import Mistake
from ntkexp.model.functional import call_with, copy_module
from ntkexp.shapes import Shape, Weights
from ntkexp.stream import normal, stream


@dataclass(frozen=True)
class LearningTask:
    """The shape of an example, and the number of outputs that a network must have.

    If `vocabulary` is positive, examples are tokens: integers below `vocabulary`.
    """

    shape: Shape
    outputs: int
    vocabulary: int = 0

    def sample(self, examples: int = 2) -> Float[Tensor, " example *shape"]:
        """Return artificial examples for a trial run of a network.

        >>> LearningTask((3,), 1, vocabulary=4).sample().tolist()
        [[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]]
        """
        if self.vocabulary:
            tokens = torch.arange(examples * prod(self.shape)) % self.vocabulary
            return tokens.view(examples, *self.shape).double()
        return normal(stream("trial"), examples, *self.shape)

    @property
    def description(self) -> str:
        """A description of the examples, for error messages."""
        tokens = f", tokens below {self.vocabulary}" if self.vocabulary else ""
        return f"the data has examples of shape {list(self.shape)}{tokens}"

    def refuse_tokens(self, model: str) -> None:
        """Raise if the data are tokens. Networks without
        an embedding table call this method."""
        if self.vocabulary:
            raise Mistake(
                f"model={model} takes numbers, and the data has tokens; choose model=transformer, "
                "or data.encoding=one_hot"
            )


# --- Forms of the output: f = α Σ `terms` (formulas in `ntkexp.init`)


class ScaledOutput(nn.Module):
    """f = α h."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__()
        self.network = network
        self.alpha = alpha

    def terms(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)

    def trained_terms(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        """Return the terms that depend on trained weights."""
        return self.terms(x)

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, "example out"]:
        first, *rest = self.terms(x)
        total = sum(rest, start=first)
        return total if self.alpha == 1 else self.alpha * total

    def term_norms(
        self, weights: Weights, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, "term example"]:
        """Return the scaled norm α‖term‖ of each trained term and example. The rounding
        error of the outputs is proportional to these norms."""
        module_weights = {f"wrapped.{name}": weight for name, weight in weights.items()}
        with torch.no_grad():
            terms = call_with(TrainedTerms(self), module_weights, (x,))
        return self.alpha * torch.stack([term.norm(dim=1) for term in terms])


class TrainedTerms(nn.Module):
    """A module that returns the trained terms of a `ScaledOutput`."""

    def __init__(self, wrapped: ScaledOutput) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return self.wrapped.trained_terms(x)


class Antisymmetric(ScaledOutput):
    """The antisymmetric form of the output, f = α (h(θ_a) − h(θ_b))/√2, with θ_a = θ_b
    before training."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha / sqrt(2))
        self.mirror = copy_network(network, "antisymmetric")

    def terms(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.mirror(x))


class Centred(ScaledOutput):
    """The centred form of the output, f = α (h(θ) − h(θ_0)),
    where θ_0 are the initial weights."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha)
        self.origin = copy_network(network, "centred").requires_grad_(False)

    def terms(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.origin(x))

    def trained_terms(
        self, x: Float[Tensor, " example *shape"]
    ) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)


def wrap_output(network: nn.Module, init: AbstractInit) -> ScaledOutput:
    """Wrap a network in the form of the output that `init` chooses."""
    if init.antisymmetric:
        return Antisymmetric(network, init.alpha)
    if init.centred:
        return Centred(network, init.alpha)
    return ScaledOutput(network, init.alpha)


def copy_network(network: nn.Module, key: str) -> nn.Module:
    try:
        return copy_module(network)
    except Mistake as mistake:
        raise Mistake(
            f"init.{key}=true needs a copy of the network: {mistake}"
        ) from None


# --- Architectures


class AbstractArchitecture(Component):
    """An architecture of networks, whose layers grow with `width`."""

    remedy: ClassVar[str] = "lower init.W_std or init.alpha"
    """Advice for error messages about outputs that are not finite."""

    width: Count = 512

    @abstractmethod
    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        """Return a network for the task, with weights from the generator."""

    def module(
        self,
        init: AbstractInit,
        shape: Shape,
        outputs: int,
        generator: torch.Generator,
        vocabulary: int = 0,
    ) -> ScaledOutput:
        """Return an untrained network, in the form of the output
        that `init` chooses."""
        task = LearningTask(shape, outputs, vocabulary)
        return wrap_output(self.network(init, task, generator), init)

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        """Return the infinite-width limit of the network h.
        Raise a `Mistake` if it is unknown."""
        raise Mistake(f"model={self.option} has no known limit of infinite width")


class AbstractLayered(AbstractArchitecture):
    """An architecture that is a list of layers."""

    @abstractmethod
    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        """Return the layers for examples of this shape."""

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        task.refuse_tokens(self.option)
        return build(self.layers(init, task.shape, task.outputs), task.shape, generator)

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        task.refuse_tokens(self.option)
        return network(self.layers(init, task.shape, task.outputs), task.shape)
