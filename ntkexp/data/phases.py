"""Phases of learning: which examples belong to each, how many each split takes of it, and whether one tells of another.

>>> [share(128, number, 3) for number in range(3)]
[43, 43, 42]
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def share(count: int, number: int, phases: int) -> int:
    """How many of so many examples, or steps, are of a phase: equal shares, the first ones larger by one if need be."""
    return count // phases + (number < count % phases)


def positions(phase: Int[Tensor, " example"] | None, phases: int, count: int) -> list[Int[Tensor, " chosen"]]:
    """Where the examples of each phase are, of so many in all.

    >>> [place.tolist() for place in positions(torch.tensor([0, 1, 0]), 2, 3)]
    [[0, 2], [1]]
    >>> [place.tolist() for place in positions(None, 1, 3)]
    [[0, 1, 2]]
    """
    if phase is None:
        return [torch.arange(count)]
    return [(phase == number).nonzero()[:, 0] for number in range(phases)]


def leaked(
    learned: tuple[Float[Tensor, "example *shape"], Int[Tensor, " example"]],
    read: tuple[Float[Tensor, "other *shape"], Int[Tensor, " other"]],
) -> tuple[int, int] | None:
    """Find two phases of which one learns what the other reads, given examples and their phases.

    >>> rows, phase = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    >>> leaked((rows, phase), (torch.tensor([[2.0]]), torch.tensor([0])))
    (1, 0)
    >>> leaked((rows, phase), (torch.tensor([[2.0]]), torch.tensor([1])))
    """
    known: dict[bytes, set[int]] = {}
    for row, phase in zip(learned[0], learned[1].tolist(), strict=True):
        known.setdefault(row.numpy().tobytes(), set()).add(phase)
    for row, phase in zip(read[0], read[1].tolist(), strict=True):
        if others := known.get(row.numpy().tobytes(), set()) - {phase}:
            return min(others), phase
    return None
