"""What lies inside the wrappers that libraries put around models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ntkexp.mistake import Mistake

SHARDED = {"FullyShardedDataParallel", "FSDPModule"}
"""Classes that need not be imported, which takes a while, to be recognised."""


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
    """The module whose parameters are trained.

    >>> net = nn.Linear(1, 1)
    >>> unwrapped_model(net) is net
    True
    """
    inner = getattr(called_model(model), "_orig_mod", None)
    return unwrapped_model(inner) if isinstance(inner, nn.Module) else called_model(model)


def called_model(model: nn.Module) -> nn.Module:
    """The module that calls reach in this process, without what averages gradients of several.

    >>> called_model(DataParallel(nn.Linear(1, 1)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is wrapped in DataParallel, which cuts batches apart; use DistributedDataParallel
    """
    if isinstance(model, DataParallel):
        raise Mistake("the model is wrapped in DataParallel, which cuts batches apart; use DistributedDataParallel")
    for name, layer in model.named_modules():
        if SHARDED & {kind.__name__ for kind in type(layer).__mro__}:
            where = f"layer '{name}'" if name else "the model"
            raise Mistake(
                f"{where} is a {type(layer).__name__}, whose weights are cut apart over the processes (FSDP), and "
                "none sees a whole step; wrap the model in DistributedDataParallel, or follow one process"
            )
    if not isinstance(model, DistributedDataParallel):
        return model
    if (size := model.process_group.size()) < get_world_size():
        raise Mistake(
            f"gradients are averaged over {size} of {get_world_size()} processes, and those of others are not known "
            "here; follow where all of them train one model"
        )
    inner: nn.Module = model.module
    return inner
