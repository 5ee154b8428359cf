"""A recorded training, as far as its derivative asks for it, and its weights as one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Size, Tensor

from ntkexp.optimizer.base import LinearStep
from ntkexp.shapes import Weights

# --- Named weights as one vector, and back: what is done weight by weight is done once.


@dataclass(frozen=True)
class FlatWeights:
    """The parameters one after another.

    >>> names = flat_like({"bias": torch.zeros(2), "gain": torch.ones(1, 1)})
    >>> names.vector({"gain": torch.tensor([[3.0]]), "bias": torch.tensor([1.0, 2.0])})
    tensor([1., 2., 3.])
    >>> names.weights(torch.tensor([1.0, 2.0, 3.0]))["gain"]
    tensor([[3.]])
    """

    shapes: Mapping[str, Size]

    @property
    def places(self) -> dict[str, slice]:
        """Where each parameter lies in the vector."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            found[name] = slice(at, at + shape.numel())
            at += shape.numel()
        return found

    @property
    def size(self) -> int:
        """How many numbers the vector has."""
        return sum(shape.numel() for shape in self.shapes.values())

    def vector(self, weights: Mapping[str, Tensor]) -> Float[Tensor, "*several weight"]:
        """Put them one after another; several networks' weights at once, if they have axes in front."""
        several = {name: weights[name].dim() - len(shape) for name, shape in self.shapes.items()}
        return torch.cat(
            [weights[name].reshape(*weights[name].shape[:n], -1) for name, n in several.items()],
            dim=-1,
        )

    def weights(self, vector: Float[Tensor, "*several weight"]) -> Weights:
        """Views of the vector, by name.

        >>> names = flat_like({"gain": torch.ones(1, 2)})
        >>> names.weights(torch.zeros(3, 2))["gain"].shape
        torch.Size([3, 1, 2])
        """
        several = vector.shape[:-1]
        # at once, as what comes back to a slice would be a whole vector for every name
        parts = torch.split(vector, [shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: part.view(*several, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def flat_like(weights: Mapping[str, Tensor]) -> FlatWeights:
    """The order and the shapes of these."""
    return FlatWeights({name: weight.shape for name, weight in weights.items()})


# --- A recorded training, as far as its derivative needs it, whatever its source and storage.
#
# One step takes the gradient of its losses in, and moves the weights; all by PyTorch's definitions,
#
#     g = Σ κᵢ ∇ℓᵢ(θ)        p = c g + λθ,  c = min(1, clip_norm/(‖g‖ + 1e-6))
#     m ← βm + αp            θ ← (1 − d)θ − S ⊙ m − N ⊙ p
#
# with a number or a vector for each of these letters, as `optimizer.base` has them. Where S is divided by past
# gradients (Adam; RMSprop, with ρ = 1 and m = p), S = σ/n with
#
#     n = t/ρ + ε,   u² ← β₂u² + (1 − β₂)p²,   t = u, or the largest u so far (AMSGrad)


@dataclass(frozen=True, kw_only=True)
class TakenBatch:
    """Examples whose losses were averaged together; a step may take several batches, and an example several rows."""

    examples: Int[Tensor, " row"]  # the place of each among all examples of the training
    shares: Float[Tensor, " row"]  # κ as it was: 1/|B| in a mean
    losses: Callable[
        [Float[Tensor, " weight"]], Float[Tensor, " row"]
    ]  # ℓᵢ(θ), differentiable twice
    is_mean: bool = True  # whether κ would be shared among the others, if an example were left out
    per_weight: Float[Tensor, " row"] | None = (
        None  # κ by the weight of its example, where these are not all 1
    )
    counts: Float[Tensor, " row"] | float = (
        1.0  # what each share counts in the mean: class weights, tokens
    )

    @property
    def by_weight(self) -> Float[Tensor, " row"]:
        """κ of each row by the weight of its example, also where that is nothing."""
        return self.shares if self.per_weight is None else self.per_weight

    @property
    def counted(self) -> Float[Tensor, " row"]:
        """What each row counts in the mean, up to a factor that all have."""
        return self.shares * self.counts

    def times(self, factor: float) -> TakenBatch:
        """Multiply the shares."""
        return replace(self, shares=self.shares * factor, per_weight=self.by_weight * factor)


@dataclass(frozen=True, kw_only=True)
class Denominator:
    """The n by which an update divides, after the step, and what it was before."""

    second: float  # β₂
    root: float  # ρ = √(1 − β₂ˢ⁺¹)
    eps: float
    mean: Tensor  # m
    latest: Tensor  # u²
    latest_before: Tensor
    largest: Tensor | None = None  # t², where it is not u²
    largest_before: Tensor | None = None
    passed: Tensor | None = (
        None  # how much of a change of u is one of t, where that is not 1[u > t′]
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """How some of the weights took the gradient of a step in, and what S is divided by."""

    place: slice
    linear: LinearStep
    denominator: Denominator | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A step at the weights before it."""

    index: int
    weights: Float[Tensor, " weight"]  # θ
    batches: tuple[TakenBatch, ...]
    updates: tuple[Update, ...]  # weights without one stay as they are
    clip_norm: float | None = None
    with_grad: Float[Tensor, " weight"] | None = (
        None  # 0 for weights whose gradient was not used, 1 for others
    )


class AbstractTrajectory(ABC):
    """The steps of one training, any of which can be asked for at any time."""

    @property
    @abstractmethod
    def length(self) -> int:
        """How many steps were taken."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """How many examples there are."""

    @property
    @abstractmethod
    def flat(self) -> FlatWeights:
        """The names of the weights in their order."""

    @property
    @abstractmethod
    def end(self) -> Float[Tensor, " weight"]:
        """The weights after the last step."""

    @abstractmethod
    def step(self, index: int) -> TrainedStep:
        """One of the steps, from 0 on."""
