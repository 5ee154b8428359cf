"""The interface through which the sweep for leave-out effects reads a recorded training
run, and the conversion of named weights to one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Size, Tensor

from ntkexp.optimizer.base import LinearStep
from ntkexp.shapes import Weights

# --- Conversion between named weights and one vector.
#
# With one vector, an elementwise operation runs once instead of once per parameter.


@dataclass(frozen=True)
class FlatWeights:
    """The layout of all parameters, concatenated into one vector.

    >>> names = flat_like({"bias": torch.zeros(2), "gain": torch.ones(1, 1)})
    >>> names.vector({"gain": torch.tensor([[3.0]]), "bias": torch.tensor([1.0, 2.0])})
    tensor([1., 2., 3.])
    >>> names.weights(torch.tensor([1.0, 2.0, 3.0]))["gain"]
    tensor([[3.]])
    """

    shapes: Mapping[str, Size]

    @property
    def slices(self) -> dict[str, slice]:
        """The slice of each parameter in the vector."""
        slices = {}
        start = 0
        for name, shape in self.shapes.items():
            slices[name] = slice(start, start + shape.numel())
            start += shape.numel()
        return slices

    @property
    def size(self) -> int:
        """The length of the vector: the number of all weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    def vector(self, weights: Mapping[str, Tensor]) -> Float[Tensor, "*several weight"]:
        """Concatenate weights along the last axis. Keep leading axes,
        such as an axis of networks."""
        flat = []
        for name, shape in self.shapes.items():
            leading = weights[name].shape[: weights[name].dim() - len(shape)]
            flat.append(weights[name].reshape(*leading, -1))
        return torch.cat(flat, dim=-1)

    def weights(self, vector: Float[Tensor, "*several weight"]) -> Weights:
        """Return the parameters as views of the vector, by name.

        >>> names = flat_like({"gain": torch.ones(1, 2)})
        >>> names.weights(torch.zeros(3, 2))["gain"].shape
        torch.Size([3, 1, 2])
        """
        leading = vector.shape[:-1]
        # Use one split: the backward pass of one slice per name would allocate a vector
        # per name.
        parts = torch.split(
            vector, [shape.numel() for shape in self.shapes.values()], dim=-1
        )
        return {
            name: part.view(*leading, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def flat_like(weights: Mapping[str, Tensor]) -> FlatWeights:
    return FlatWeights({name: weight.shape for name, weight in weights.items()})


# --- A recorded training run, or a recorded followed loop. In PyTorch's definitions,
# one step is:
#
#     g = Σ κᵢ ∇ℓᵢ(θ)        p = c g + λθ,  c = min(1, clip_norm/(‖g‖ + 1e-6))
#     m ← βm + α ⊙ p         θ ← (1 − d)θ − S ⊙ m − N ⊙ p
#
# `LinearStep` defines the coefficients. κᵢ is the share of example i in the loss ℓ. If
# the optimizer divides by past gradients, as Adam does, then S = σ/n for a number σ.
# The denominator n = √v/ρ + ε (see `DenominatorFormula`) is written in terms of u = √v:
#
#     u² ← β₂u² + (1 − β₂)p²        t = u, or the largest u so far (AMSGrad)
#     n = t/ρ + ε                   ρ = 1 for RMSprop, which has m = p


@dataclass(frozen=True, kw_only=True)
class TakenBatch:
    """One term of the loss of a step, such as one mean over a batch of examples.

    A step may have several such terms. A row is one loss ℓᵢ. An example may have several
    rows.
    """

    examples: Int[Tensor, " row"]  # the index of the example of each row
    # κ, the shares in the loss: 1/|B| in a mean over a batch B
    shares: Float[Tensor, " row"]
    # θ ↦ ℓᵢ(θ), which must be twice differentiable
    losses: Callable[[Float[Tensor, " weight"]], Float[Tensor, " row"]]
    # True for a mean, in which the shares of all other examples grow if one is left out
    is_mean: bool = True
    # κ/w, the shares divided by the weights w of the examples; None means w = 1
    per_weight: Float[Tensor, " row"] | None = None
    # the count of each row in the mean: 1, a class weight, or a number of tokens
    counts: Float[Tensor, " row"] | float = 1.0

    @property
    def unweighted_shares(self) -> Float[Tensor, " row"]:
        """The share κ of each row divided by the weight w of its example,
        defined even if w = 0."""
        return self.shares if self.per_weight is None else self.per_weight

    @property
    def counted(self) -> Float[Tensor, " row"]:
        """The share of each row times its count in the mean, up to a common factor."""
        return self.shares * self.counts

    def times(self, factor: float) -> TakenBatch:
        """Return the batch with its shares multiplied by a factor."""
        return replace(
            self,
            shares=self.shares * factor,
            per_weight=self.unweighted_shares * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Denominator:
    """The denominator n = t/ρ + ε of an update, and the optimizer state before and
    after the step. u² is the mean of squared gradients. t is u, or the largest u so far
    (AMSGrad)."""

    beta2: float  # β₂, the decay rate of u²
    bias_correction: float  # ρ = √(1 − β₂ˢ⁺¹) at step s, counted from 0
    eps: float
    mean: Tensor  # m, the momentum
    second_moment: Tensor  # u² after the step
    second_moment_before: Tensor
    # t², the largest u² so far (AMSGrad); None means t = u
    max_second_moment: Tensor | None = None
    max_second_moment_before: Tensor | None = None
    # ∂t/∂u; None means 1 where u exceeds the earlier t, else 0
    max_slope: Tensor | None = None

    @property
    def t(self) -> Tensor:
        """t, the root of the second moment, or of
        its largest value so far (AMSGrad)."""
        if self.max_second_moment is None:
            return self.second_moment.sqrt()
        return self.max_second_moment.sqrt()

    def value(self, t: Tensor) -> Tensor:
        """Return n = t/ρ + ε."""
        return t / self.bias_correction + self.eps


@dataclass(frozen=True, kw_only=True)
class Update:
    """The optimizer's linear step for the weights in the slice `weight_slice`, and the
    denominator n if the optimizer divides by past gradients."""

    weight_slice: slice
    linear: LinearStep
    denominator: Denominator | None


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One training step, with the weights before it."""

    index: int
    weights: Float[Tensor, " weight"]  # θ before the step
    batches: tuple[TakenBatch, ...]
    # updates of parts of the weights; all other weights do not change
    updates: tuple[Update, ...]
    clip_norm: float | None = None
    # mask: 1 for weights with a gradient, 0 for others
    with_grad: Float[Tensor, " weight"] | None = None


class AbstractTrajectory(ABC):
    """The steps of one training run, readable in any order."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of steps."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """The number of examples."""

    @property
    @abstractmethod
    def flat(self) -> FlatWeights:
        """The names and shapes of the weights, in order."""

    @property
    @abstractmethod
    def end(self) -> Float[Tensor, " weight"]:
        """The weights after the last step."""

    @abstractmethod
    def step(self, index: int) -> TrainedStep:
        """Return one step, counted from 0."""
