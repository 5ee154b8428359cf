"""The entry point: one line around any training loop of PyTorch, or two calls if a library owns the loop.

`watch.py` records the loop. `torch_rules.py` lists the optimizers that can be followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ntkexp.foreign_loop.again import AlteredLoop, altered_loop
from ntkexp.foreign_loop.arguments import (
    checked_queries,
    measured_queries,
    moved_names,
    refuse_unusable,
    refuse_without_rules,
    runs_as_it_is,
    unwrapped_model,
    unwrapped_optimizers,
)
from ntkexp.foreign_loop.batch_norm import BatchNormMode, checked_mode
from ntkexp.foreign_loop.example_names import DATASET, Ids, recorded_loading
from ntkexp.foreign_loop.first_step import FirstStepProof
from ntkexp.foreign_loop.measure import Measure, MeasuredQueries, gathered_queries
from ntkexp.foreign_loop.model_function import CalledModule, evaluate_at_queries
from ntkexp.foreign_loop.outside import (
    FrozenTensors,
    memory_kept,
    named_tensors,
    release_memory,
    same_values,
)
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.step import AbstractStore
from ntkexp.foreign_loop.step_log import LogStep, StepLog
from ntkexp.foreign_loop.store.chosen import ChosenStore, Steps, chosen_steps
from ntkexp.foreign_loop.store.disk import DiskStore
from ntkexp.foreign_loop.store.endpoints import EndpointStore
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.store.memory import MemoryStore
from ntkexp.foreign_loop.store.shards import Processes, current_processes
from ntkexp.foreign_loop.torch_rules import KnownOptimizer, known_optimizer
from ntkexp.foreign_loop.trace import Trace, outputs_at_ends
from ntkexp.foreign_loop.user_loss import ExampleLoss
from ntkexp.foreign_loop.watch import Watch, refuse_followed
from ntkexp.kernel.record.tape import digest, tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import copied
from ntkexp.path.components import By, components_of
from ntkexp.records.atomic import Json
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Inputs


@contextmanager
def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    queries: Inputs | DataLoader[Any],
    output: str | int | None = None,
    measure: Measure | None = None,
    ids: Ids = None,
    loss: ExampleLoss | None = None,
    to: Path | str | None = None,
    every: int | None = None,
    by: By | None = None,
    memory_gb: float = 4.0,
    batch_norm: BatchNormMode = "exact",
    rules: Sequence[AbstractOptimizerRule] = (),
    steps: Steps | None = None,
    log: LogStep | None = None,
) -> Iterator[Trace]:
    """Follow what the optimizer, or a list of them, makes of the model; `attribute` of the trace tells how.

    `queries` are inputs at which the model is asked, or a DataLoader that gives them in batches; `output` names the
    tensor that is read of a model which gives several. `measure` is a function of the outputs of a call of the queries
    and of the call (its `args`, `kwargs` and `ids`) that gives what is explained in place of the outputs, such as a
    loss, a log-probability or a margin: a number for each query, several, or a dict of them by name. Examples go by
    what they hold, or by `ids`: the keyword of the model that holds their names, a function of the call (its `args` and
    `kwargs`) that gives them, or 'dataset' for their indices in what a DataLoader reads. All steps are held in memory,
    up to `memory_gb`; or written to a folder as they happen, if it is given, `to`. A killed training leaves there what
    it has done, and goes on there when it is resumed. Weights are kept once in `every` steps: by default 8 in memory,
    and as often as there is room on disk; those between are replayed. Of several processes that train one model, each
    follows, into the same folder; the first attributes.

    Optimizers of PyTorch are known, and classes derived from them; others go by `rules`, one each, which every step is
    compared with (`ntkexp.AbstractOptimizerRule`).

    The model itself is asked at the queries when following begins and ends, in evaluation, and left as it was.

    Random numbers of its calls, as of dropout, are drawn again as they were, and autocast is entered again; queries are
    asked in evaluation, and without casts.

    `batch_norm` says how examples share a batch whose BatchNorm is in training mode, as `attribute` has it.

    `loss` is asked for effects alone: outputs of a call and the call (its `args`, `kwargs` and `ids`) to one loss for
    each example, as the loop has it but for a factor; it is compared with the gradients of every step. Where the loop's
    mean divides by class weights or tokens, it gives also what each example counts there: `losses, weight[labels]`.

    `steps` says which steps are explained, if not all: a number, for the last n, or the numbers of some, such as
    range(100, 110), counted from 0. The others are passed over, and only what they did together is found.

    `log` is a function of numbers and a step, called after each step with what is known of it: `gradient_norm`,
    `weight_norm`, `learning_rate`, `examples`, `rule_error`, and with `loss=` also the mean `loss`. `run.log` of wandb
    and `mlflow.log_metrics` are such functions.

    `by` tells contributions apart by components, as `attribute` explains: 'module', 'parameter', or a dict of names to
    patterns of parameters.

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
    # Refuse what cannot be followed. The copy of the model is what is replayed, and evaluated at the queries.
    optimizers = unwrapped_optimizers(optimizer)
    checked_mode(batch_norm)
    chosen = None if steps is None else chosen_steps(steps)
    refuse_unusable(model, optimizers, ids, loss, every, to, memory_gb, measure, rules, log)
    refuse_followed(optimizers)
    known = [known_optimizer(each, rules) for each in optimizers]
    inner = unwrapped_model(model)
    moved = moved_names(inner, optimizers)
    module = copied(inner).eval()
    if by is not None:
        components_of(by, sorted(moved))  # or a mistake, before anybody trains

    with memory_kept(module.parameters()):
        inputs, sizes = gathered_queries(queries)
        inputs = checked_queries(inputs, module, output)
        measured = (
            None
            if measure is None
            else measured_queries(measure, inputs, sizes, ids, module, output)
        )

        # Where steps are stored, and what is refused of the model itself.
        processes, altered = current_processes(), altered_loop()
        store = choose_store(
            to,
            processes,
            altered,
            inner,
            optimizers,
            known,
            inputs,
            output,
            every,
            memory_gb,
            measured,
            by,
            chosen,
        )
        # as far as is known: elsewhere, compiled or on a GPU, casts may round otherwise
        same_kernels = processes.world == 1 and not store.count and runs_as_it_is(model)
        called = CalledModule(module, output, same_kernels=same_kernels, measured=measured)
        if altered is None:
            refuse_without_rules(called, moved, inputs)
        release_memory(module.parameters())
        with recorded_loading() if ids == DATASET else nullcontext() as loading:
            watch = Watch(
                model,
                optimizers,
                known,
                output,
                ids if loading is None else loading.names,
                store,
                FrozenTensors(inner, module),
                None
                if altered is None
                else replace(altered.weighing, loss=loss or altered.weighing.loss),
                FirstStepProof(called, inputs)
                if altered is None and processes.world == 1
                else None,
                None if log is None or altered is not None else StepLog(log, optimizers, loss),
            )
            whole = False
            try:
                watch.begin()
                followed, rank = store.steps_of(module, same_kernels=same_kernels), processes.rank
                trace = Trace(
                    followed,
                    module,
                    output,
                    inputs,
                    loss,
                    store.folder,
                    rank,
                    memory_gb,
                    by,
                    measured=measured,
                )
                trace.batch_norm = batch_norm
                if altered is not None:
                    altered.traces.append(trace)
                with (
                    nullcontext()
                    if rank or altered is not None
                    else evaluated_at_ends(trace, inner, watch)
                ):
                    yield trace
                whole = True
            finally:
                watch.end(whole=whole)


@contextmanager
def evaluated_at_ends(trace: Trace, model: nn.Module, watch: Watch) -> Iterator[None]:
    """Note what the model itself gives at the queries when the loop begins and ends, also beside steps that are stored
    in a folder."""

    def write(start: torch.Tensor | None, end: torch.Tensor | None = None, steps: int = -1) -> None:
        trace.ends.start, trace.ends.end, trace.ends.steps = start, end, steps
        if trace.folder is not None:
            files = TraceFolder(trace.folder)
            files.write(files.outputs_at_ends, vars(trace.ends))

    def asked() -> torch.Tensor | None:
        return evaluate_at_queries(model, trace.output, trace.queries, trace.measured)

    # f_0, which a trace that is gone on with holds
    known = (
        outputs_at_ends(trace.folder) if trace.folder is not None and watch.store.count else None
    )
    write(asked() if known is None else known.start)
    yield
    watch.catch_up()

    # f_T, unless the loop left other values in its tensors after the last step, which no step explains
    last = {**named_tensors(trace.module), **watch.latest.weights, **watch.statistics.at_step}
    if all(
        same_values(now, last[name]) for name, now in named_tensors(model).items() if name in last
    ):
        write(trace.ends.start, asked(), watch.store.count)


def choose_store(
    to: Path | str | None,
    processes: Processes,
    altered: AlteredLoop | None,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    known: Sequence[KnownOptimizer],
    queries: Inputs,
    output: str | int | None,
    every: int | None,
    memory_gb: float,
    measured: MeasuredQueries | None,
    by: By | None,
    chosen: int | frozenset[int] | None = None,
) -> AbstractStore:
    """In memory, or in a folder, where a trace of the same training goes on. A loop that is carried out again, by
    `again=`, says that itself, whatever its code gives; by itself only its ends are stored."""
    if processes.world > 1:
        if altered is not None:
            raise Mistake(
                f"again=: {processes.world} processes train together, and one cannot carry their loop out again; give "
                "a function that does it in one process, with a call for each of them, and ask later, by ntkexp "
                "attribute"
            )
        if to is None:
            raise Mistake(
                f"{processes.world} processes train together, and each sees a part of every batch; give a folder in "
                "which they write side by side, to=…, the same in every process"
            )
    if chosen is not None and altered is None:
        if to is not None or processes.world > 1 or len(optimizers) > 1:
            raise Mistake(
                "steps=: some steps are held in memory, of one optimizer in one process; leave steps= out, or to= and "
                "other optimizers"
            )
        return ChosenStore(known, output, every, memory_gb, chosen)
    place = to if altered is None else altered.place
    if place is None:
        return (
            MemoryStore(known, output, every, memory_gb)
            if altered is None
            else EndpointStore(known)
        )
    followed: dict[str, Json] = {  # decides whether two traces can be one
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "optimizers": [each.name for each in known],
        "processes": processes.world,
        "output": output,
        "queries": digest(tensors(queries)).hex()[:16],
    }
    moved = moved_names(model, optimizers)
    still = {name: part for name, part in model.state_dict().items() if name not in moved}
    start = {"queries": queries, "output": output, "still": still} | (
        {} if by is None else {"by": by}
    )
    if measured is not None:
        followed |= {"measure": measured.described, "calls": list(measured.calls.sizes)}
        start["calls"] = measured.calls.content
    config: dict[str, Json] = {
        "follow": followed,
        "path": {"probes": ["probe"]},
    }  # where the network was read
    files = TraceFolder(RunFolder(Path(place).expanduser()), processes.rank)
    return DiskStore(files, processes, config, start, known, output, every, memory_gb)


class FollowSession:
    """Following between two calls, where another library's loop says when training begins and ends. The options are
    those of `follow`, and are checked before training begins.

    >>> FollowSession(queries=torch.eye(2), question=1)
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'question'
    """

    def __init__(self, **options: Any) -> None:  # those of `follow`, which types them
        signature(follow).bind(None, None, **options)
        self.options, self.stack = options, ExitStack()
        self.begun: Trace | None = None

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Training begins."""
        self.begun = self.stack.enter_context(follow(model, optimizers, **self.options))

    def end(self, error: BaseException | None = None) -> None:
        """Training has ended, or was broken off by this."""
        self.stack.__exit__(None if error is None else type(error), error, None)

    @property
    def trace(self) -> Trace:
        """What was seen."""
        if self.begun is None:
            raise Mistake(
                "no training has begun; give the callback to the Trainer and train, then ask for .trace"
            )
        return self.begun
