"""Missing inputs, marked by NaN, are replaced by the mean of their feature over the training split.

>>> rows = torch.tensor([[1.0, 5.0], [float("nan"), 7.0], [3.0, 9.0]])
>>> filled(rows, means(rows)).tolist()
[[1.0, 5.0], [2.0, 7.0], [3.0, 9.0]]
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake


def means(train: Float[Tensor, "example *shape"]) -> Float[Tensor, " *shape"]:
    """The mean of each feature over the examples that have it."""
    mean = train.nanmean(0)
    if mean.isnan().any():
        first = int(mean.isnan().flatten().nonzero()[0]) + 1
        raise Mistake(
            f"data.missing=mean: feature {first} (the target not counted) has no value in any of the {len(train)} "
            "training rows, so it has no mean; raise data.train, or remove the column"
        )
    return mean


def filled(values: Float[Tensor, "example *shape"], fill: Float[Tensor, " *shape"]) -> Float[Tensor, "example *shape"]:
    """The values, with the fill where one is missing."""
    return torch.where(values.isnan(), fill, values)
