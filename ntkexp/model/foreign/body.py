"""The body of a model of positions: what it is given for each, and how one vector is read of all."""

from __future__ import annotations

from math import prod

from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.model.transformer import along


class Body(nn.Module):
    """A model without its head, read at the last position or at the mean over positions."""

    def __init__(self, model: nn.Module, entrance: nn.Module, key: str, last: bool) -> None:
        super().__init__()
        self.entrance, self.model, self.key, self.last = entrance, model, key, last

    def forward(self, x: Tensor) -> Float[Tensor, "example width"]:
        hidden: Tensor = self.model(**{self.key: self.entrance(x)}).last_hidden_state
        if hidden.dim() == 4:  # a convolutional model's pixels
            return hidden.flatten(2).mean(2)
        return hidden[:, -1] if self.last else hidden.mean(1)


class DenseByRow(nn.Module):
    """One dense layer takes each row of an example."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example position width"]:
        return along(self.dense, x.reshape(len(x), *rows(x.shape[1:])))


def rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Find the positions of an example, and the features of each: the rows of images with all channels, else the first
    axis.

    >>> rows((3, 8, 4)), rows((5, 7)), rows((6,))
    ((8, 12), (5, 7), (6, 1))
    """
    positions = shape[-2] if len(shape) > 2 else shape[0]
    return positions, prod(shape) // positions
