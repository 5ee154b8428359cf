"""One line around a training loop, which may be any of PyTorch, with SGD, Adam or AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from ntkexp.foreign_loop.keeper import KeeperInMemory
from ntkexp.foreign_loop.model_call import Ids
from ntkexp.foreign_loop.trace import Trace
from ntkexp.foreign_loop.watch import Watch
from ntkexp.kernel.record.inputs import as_inputs
from ntkexp.shapes import Inputs


@contextmanager
def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    queries: Inputs,
    output: str | int | None = None,
    ids: Ids = None,
    memory_gb: float = 4.0,
) -> Iterator[Trace]:
    """Follow what the optimizer, or a list of them, makes of the model; `attribute` of the trace tells how.

    `queries` are inputs at which the model is asked, `output` names the tensor that is read of a model which gives
    several. Examples go by what they hold, or by `ids`: the keyword of the model that holds their names, or a function
    of its inputs that gives them. All steps are held in memory, up to `memory_gb`.

    >>> import torch
    >>> model, x = torch.nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> optimizer, before = torch.optim.AdamW(model.parameters()), model(x).detach()
    >>> with follow(model, optimizer, queries=x) as trace:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().sum().backward()
    ...         optimizer.step()
    >>> found = trace.attribute()
    >>> explained = found["contribution"].sum("example") + found["decay"]
    >>> bool(abs(before.numpy() + explained - model(x).detach().numpy()).max() < 1e-14)
    True
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    module, asked = deepcopy(model), as_inputs(queries)
    keeper = KeeperInMemory(memory_gb)
    watch = Watch(model, optimizers, output, ids, keeper)
    trace = Trace(keeper.steps, module, output, asked)
    watch.begin()
    try:
        yield trace
    finally:
        watch.end()
