"""One line around a training loop, which may be any of PyTorch, with SGD, Adam or AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from ntkexp.foreign_loop.altered_loop import AlteredLoop, altered_loop
from ntkexp.foreign_loop.asked import FirstStep, as_queries, refuse_unusable, refuse_without_rules
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.dataset_names import DATASET, noted_loading
from ntkexp.foreign_loop.example_loss import ExampleLoss
from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.keeper_of_ends import KeeperOfEnds
from ntkexp.foreign_loop.kept.asked_itself import AskedItself
from ntkexp.foreign_loop.kept.keeper_in_memory import KeeperInMemory
from ntkexp.foreign_loop.kept.open import keeper_in
from ntkexp.foreign_loop.members import moved_names
from ntkexp.foreign_loop.model_call import Ids
from ntkexp.foreign_loop.together import Together, together
from ntkexp.foreign_loop.trace import Trace
from ntkexp.foreign_loop.unmoved import Unmoved, named_tensors
from ntkexp.foreign_loop.unwrapped import unwrapped_model, unwrapped_optimizers
from ntkexp.foreign_loop.watch import Watch, refuse_followed
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs


@contextmanager
def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    queries: Inputs,
    output: str | int | None = None,
    ids: Ids = None,
    loss: ExampleLoss | None = None,
    to: Path | str | None = None,
    every: int | None = None,
    memory_gb: float = 4.0,
) -> Iterator[Trace]:
    """Follow what the optimizer, or a list of them, makes of the model; `attribute` of the trace tells how.

    `queries` are inputs at which the model is asked, `output` names the tensor that is read of a model which gives
    several. Examples go by what they hold, or by `ids`: the keyword of the model that holds their names, a function of
    the call (its `args` and `kwargs`) that gives them, or 'dataset' for their indices in what a DataLoader reads. All
    steps are held in memory, up to `memory_gb`; or written to a folder as they happen, if it is given, `to`. A killed
    training leaves there what it has done, and goes on there when it is resumed. Weights are kept `every` so many
    steps, by itself 8 in memory and as often as there is room on disk; those between are replayed. Of several processes
    that train one model, each follows, into the same folder; the first attributes.

    The model itself is asked at the queries when following begins and ends, in evaluation, and left as it was.

    Random numbers of its calls, as of dropout, are drawn again as they were, and autocast is entered again; queries are
    asked in evaluation, and without casts.

    `loss` is asked for effects alone: outputs of a call and the call (its `args`, `kwargs` and `ids`) to one loss for
    each example, as the loop has it but for a factor; it is held against the gradients of every step.

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
    optimizers = unwrapped_optimizers(optimizer)
    refuse_unusable(model, optimizers, ids, loss, every, to, memory_gb)
    refuse_followed(optimizers)
    inner = unwrapped_model(model)
    module = deepcopy(inner).eval()
    asked = as_queries(queries, module, output)
    now, ours, whole = altered_loop(), together(), False
    refuse_apart(ours, to, now)
    place, keeper = to if now is None else now.place, keeper_without_folder(now, output, every, memory_gb)
    if place is not None:
        keeper = keeper_in(place, ours, inner, optimizers, asked, output, every=every, memory_gb=memory_gb)
    called = CalledModule(module, output)
    if now is None:
        refuse_without_rules(called, moved_names(inner, optimizers), asked)
    watch = Watch(
        model,
        optimizers,
        output,
        ids,
        keeper,
        Unmoved(inner, module),
        None if now is None else now.weighing,
        FirstStep(called, asked) if now is None and ours.world == 1 else None,
    )
    with noted_loading() if ids == DATASET else nullcontext() as noted:
        watch.ids = ids if noted is None else noted.names
        try:
            watch.begin()
            trace = Trace(keeper.steps_of(module), module, output, asked, loss, keeper.folder, ours.rank, memory_gb)
            itself = AskedItself(inner, output, asked, trace.ends, keeper) if now is None and not ours.rank else None
            if itself is not None:
                itself.begin()
            if now is not None:
                now.traces.append(trace)
            yield trace
            if itself is not None:
                itself.end({**named_tensors(module), **watch.weights})
            whole = True
        finally:
            watch.end(whole=whole)


def refuse_apart(ours: Together, to: Path | str | None, now: AlteredLoop | None) -> None:
    """Refuse several processes of which each would keep a part of the trace for itself."""
    if ours.world == 1:
        return
    if now is not None:
        raise Mistake(
            f"again=: {ours.world} processes train together, and one cannot carry their loop out again; give a "
            "function that does it in one process, with a call for each of them, and ask later, by ntkexp attribute"
        )
    if to is None:
        raise Mistake(
            f"{ours.world} processes train together, and each sees a part of every batch; give a folder in which they "
            "write side by side, to=…, the same in every process"
        )


def keeper_without_folder(
    now: AlteredLoop | None, output: str | int | None, every: int | None, memory_gb: float
) -> AbstractKeeper:
    """Who keeps steps that go to no folder."""
    return KeeperInMemory(output, every, memory_gb) if now is None else KeeperOfEnds()
