"""What lies inside the wrappers that libraries put around models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import get_world_size, is_available, is_initialized
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ntkexp.mistake import Mistake


def unwrapped_optimizers(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, without what is around them. A wrapper that moves weights itself is found out by that.

    >>> from types import SimpleNamespace
    >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    >>> unwrapped_optimizers([SimpleNamespace(optimizer=sgd)]) == unwrapped_optimizers(sgd) == [sgd]
    True
    """
    found = [given] if not isinstance(given, Sequence) else list(given)
    while any(isinstance(inner_of(each), torch.optim.Optimizer) for each in found):
        found = [inner_of(each) or each for each in found]
    return found


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """What an optimizer is wrapped around, as accelerate and Lightning do it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained; several processes at once are refused.

    >>> net = nn.Linear(1, 1)
    >>> unwrapped_model(net) is net
    True
    >>> unwrapped_model(DataParallel(net))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is wrapped in DataParallel, which cuts batches apart; train in one process
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        kind = type(model).__name__
        raise Mistake(f"the model is wrapped in {kind}, which cuts batches apart; train in one process")
    if is_available() and is_initialized() and get_world_size() > 1:
        raise Mistake(f"{get_world_size()} processes train together, and one sees a part of each batch; train in one")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
