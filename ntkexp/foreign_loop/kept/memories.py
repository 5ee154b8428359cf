"""What optimizers hold of the parameters of a model, by the names of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ntkexp.foreign_loop.kept.replay import Memories, copied


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The parameters of each group.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> groups_of(torch.optim.SGD([weight]), {id(weight): "w"})
    [['w']]
    """
    return [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]


def memories_of(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> list[Memories]:
    """Copies of what they remember."""
    return [{names[id(weight)]: copied(kept) for weight, kept in each.state.items()} for each in optimizers]


def copies_of(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers an optimizer may remember for each weight."""
    return 0 if isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups) else 2
