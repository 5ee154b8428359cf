"""Named weights as one vector, and back: what is done weight by weight is done once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Size, Tensor

from ntkexp.shapes import Weights


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
        return torch.cat([weights[name].reshape(*weights[name].shape[:n], -1) for name, n in several.items()], dim=-1)

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
            name: part.view(*several, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def flat_like(weights: Mapping[str, Tensor]) -> FlatWeights:
    """The order and the shapes of these."""
    return FlatWeights({name: weight.shape for name, weight in weights.items()})
