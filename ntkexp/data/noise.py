"""Noise on the training targets.

Of class labels, exactly the given share (rounded) is replaced by another class, each of the others being as likely.
Real targets get Gaussian noise whose standard deviation is the given share of theirs.

>>> clean = torch.zeros(10, dtype=torch.int64)
>>> noisy(clean, 3, 0.2, torch.Generator().manual_seed(0)).count_nonzero().item()
2
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def noisy(
    target: Int[Tensor, " example"] | Float[Tensor, "example value"],
    classes: int,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Add a share of noise to targets: labels are replaced, or, where there are no classes, numbers are added."""
    return relabelled(target, classes, share, generator) if classes else blurred(target, share, generator)


def relabelled(
    labels: Int[Tensor, " example"], classes: int, share: float, generator: torch.Generator
) -> Int[Tensor, " example"]:
    """A share of labels is replaced: a step of 1 … classes − 1 around the circle of classes never ends where it
    began.
    """
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    step = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    return labels.index_copy(0, chosen, (labels[chosen] + step) % classes)


def blurred(
    values: Float[Tensor, "example value"], share: float, generator: torch.Generator
) -> Float[Tensor, "example value"]:
    """Add noise to values: y + share · deviation · N(0, 1)."""
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    return values + share * values.std(0, correction=0) * noise
