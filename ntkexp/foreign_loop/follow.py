"""One line around a training loop, which may be any of PyTorch, with SGD, Adam or AdamW; or two calls, where a
library owns the loop. Its trace may lie on disk and be loaded by another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ntkexp.foreign_loop.again import AlteredLoop, altered_loop
from ntkexp.foreign_loop.asked import FirstStep, as_queries, refuse_unusable, refuse_without_rules
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.calls import ExampleLoss, Ids
from ntkexp.foreign_loop.dataset_names import DATASET, noted_loading
from ntkexp.foreign_loop.kept.keeper import KeeperInMemory, KeeperOnDisk
from ntkexp.foreign_loop.kept.loop import EventWriter, LoopOnDisk
from ntkexp.foreign_loop.kept.replay import ReplayedSteps
from ntkexp.foreign_loop.kept.shards import Together, together
from ntkexp.foreign_loop.kept.trace_folder import START, TraceFolder
from ntkexp.foreign_loop.moved import (
    Unmoved,
    moved_names,
    named_tensors,
    runs_as_it_is,
    unwrapped_model,
    unwrapped_optimizers,
)
from ntkexp.foreign_loop.signed_outputs import OutputsAtEnds, given_now
from ntkexp.foreign_loop.step import AbstractKeeper, KeeperOfEnds
from ntkexp.foreign_loop.trace import Trace
from ntkexp.foreign_loop.watch import Watch, refuse_followed
from ntkexp.kernel.record.tape import digest, tensors
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, read_object
from ntkexp.records.folder import CONFIG, RunFolder
from ntkexp.shapes import Inputs, Weights

# --- One line around a training loop, which may be any of PyTorch, with SGD, Adam or AdamW.


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
    each example, as the loop has it but for a factor; it is held against the gradients of every step. Where the loop's
    mean divides by class weights or tokens, it gives also what each example counts there: `losses, weight[labels]`.

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
    # as far as is known: elsewhere, compiled or on a GPU, casts may round otherwise
    same_kernels = ours.world == 1 and not keeper.count and runs_as_it_is(model)
    called = CalledModule(module, output, same_kernels=same_kernels)
    if now is None:
        refuse_without_rules(called, moved_names(inner, optimizers), asked)
    watch = Watch(
        model,
        optimizers,
        output,
        ids,
        keeper,
        Unmoved(inner, module),
        None if now is None else replace(now.weighing, loss=loss or now.weighing.loss),
        FirstStep(called, asked) if now is None and ours.world == 1 else None,
    )
    with noted_loading() if ids == DATASET else nullcontext() as noted:
        watch.ids = ids if noted is None else noted.names
        try:
            watch.begin()
            steps = keeper.steps_of(module, same_kernels=same_kernels)
            trace = Trace(steps, module, output, asked, loss, keeper.folder, ours.rank, memory_gb)
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


# --- Following between two calls, where somebody else's loop says when training begins and ends.


class HeldOpen:
    """The options are those of `follow`, and are looked at before anybody trains.

    >>> HeldOpen(queries=torch.eye(2), question=1)
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'question'
    """

    def __init__(self, **options: Any) -> None:  # those of `follow`, which types them
        signature(follow).bind(None, None, **options)
        self.options, self.stack, self.found = options, ExitStack(), None

    found: Trace | None

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Training begins."""
        self.found = self.stack.enter_context(follow(model, optimizers, **self.options))

    def end(self, error: BaseException | None = None) -> None:
        """Training has ended, or was broken off by this."""
        self.stack.__exit__(None if error is None else type(error), error, None)

    @property
    def trace(self) -> Trace:
        """What was seen."""
        if self.found is None:
            raise Mistake("no training has begun; give the callback to the Trainer and train, then ask for .trace")
        return self.found


# --- A trace on disk is begun, or gone on with, for a model, its optimizers and the queries.


def keeper_in(
    to: Path | str,
    ours: Together,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    queries: Inputs,
    output: str | int | None,
    *,
    every: int | None,
    memory_gb: float,
) -> KeeperOnDisk:
    """Who writes the trace of this training."""
    files = TraceFolder(RunFolder(Path(to).expanduser()), ours.rank)
    config = config_of(ours, module, optimizers, queries, output)
    followed = moved_names(module, optimizers)
    still = {name: part for name, part in module.state_dict().items() if name not in followed}
    start = {"queries": queries, "output": output, "still": still}
    return KeeperOnDisk(files, ours, config, start, EventWriter(files), output, every, memory_gb)


def config_of(
    ours: Together,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    queries: Inputs,
    output: str | int | None,
) -> dict[str, Json]:
    """What is followed, as far as it decides whether two traces can be one."""
    return {
        "follow": {
            "model": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": sum(weight.numel() for weight in module.parameters()),
            "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
            "processes": ours.world,
            "output": output,
            "queries": digest(tensors(queries)).hex()[:16],
        },
        "path": {"probes": ["probe"]},  # as a run says where the network was read
    }


# --- A trace that another process wrote: its steps, for a module of the kind that was followed.


def trace_in(folder: Path) -> TraceFolder:
    """The trace in a folder, if it holds one."""
    files = TraceFolder(RunFolder(folder.expanduser()))
    path = files.folder.path
    if not (path / CONFIG).is_file() or "follow" not in read_object(path / CONFIG):
        raise Mistake(f"{path} holds no trace; ntkexp.follow(…, to=…) writes one")
    return files


def loaded(files: TraceFolder, module: nn.Module) -> Trace:
    """The trace, with a module to which its weights are given."""
    start = files.read(files.path / START)
    fill(module, start, files.read(files.weights_at(0))["weights"], files.folder.path)
    kinds = read_object(files.folder.path / CONFIG)["follow"]["optimizers"]
    steps = ReplayedSteps(LoopOnDisk(files), module, start["output"], kinds)
    return Trace(steps, module, start["output"], start["queries"], folder=files.folder, ends=ends_in(files))


def names_in(files: TraceFolder) -> list[str]:
    """The examples of a trace, in order of their first use; no module is asked for."""
    return list(dict.fromkeys(ReplayedSteps(LoopOnDisk(files), nn.Module(), None, ()).names()))


def fill(module: nn.Module, start: Mapping[str, Any], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Give a module all that the followed one held, if it is of that kind."""
    state, given = dict(module.named_parameters()) | dict(module.named_buffers()), {**start["still"], **weights}
    named = state.keys() | module.state_dict().keys()
    wrong = sorted(weights.keys() - state.keys()) or sorted(given.keys() - named)
    wrong = wrong or [name for name in given.keys() & state.keys() if state[name].shape != given[name].shape]
    if wrong:
        raise Mistake(
            f"the module is not the one that was followed in {path}: its '{wrong[0]}' is missing or otherwise"
        )
    with torch.no_grad():
        for name in given.keys() & state.keys():
            state[name].data = given[name].clone().to(state[name].device)
    module.eval()


# --- The model itself is asked at the queries when following begins and ends: f_0 and f_T have to be what it gave.


@dataclass(frozen=True)
class AskedItself:
    """The `model` of the loop; what it gives goes to the `ends` of the trace, and to its folder, if there is one."""

    model: nn.Module
    output: str | int | None
    queries: Inputs
    ends: OutputsAtEnds
    keeper: AbstractKeeper

    def begin(self) -> None:
        """Ask before the first step; a trace that is gone on with knows it."""
        if self.keeper.count:
            assert self.keeper.folder is not None
            self.ends.start = ends_in(TraceFolder(self.keeper.folder)).start
        else:
            self.ends.start = given_now(self.model, self.output, self.queries)
        self.write()

    def end(self, kept: Weights) -> None:
        """Ask after the last step, unless it left other values in the tensors; how they came there is no step's."""
        now = named_tensors(self.model)
        same = (now[k].shape == w.shape and torch.equal(now[k].to(w), w) for k, w in kept.items() if k in now)
        if all(same):
            self.ends.end, self.ends.steps = given_now(self.model, self.output, self.queries), self.keeper.count
            self.write()

    def write(self) -> None:
        """Write it beside the steps."""
        if self.keeper.folder is not None:
            files = TraceFolder(self.keeper.folder)
            files.write(files.asked, vars(self.ends))


def ends_in(files: TraceFolder) -> OutputsAtEnds:
    """What is kept of it; nothing, in traces of before."""
    return OutputsAtEnds(**files.read(files.asked)) if files.asked.is_file() else OutputsAtEnds()
