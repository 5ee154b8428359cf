"""The entry point: a context manager around any training loop of PyTorch, or two calls
if a library runs the loop (`FollowSession`).

`watch` records the loop. `known_optimizers` lists the optimizers that can be followed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ntkexp.allocator import memory_kept, release_memory
from ntkexp.foreign_loop.again import AlteredLoop, altered_loop
from ntkexp.foreign_loop.arguments import (
    FollowOptions,
    ParameterGroups,
    checked_queries,
    measured_queries,
    refuse_other_objects,
    refuse_same_memory,
    refuse_without_rules,
    runs_as_it_is,
    unwrapped_model,
    unwrapped_optimizers,
)
from ntkexp.foreign_loop.batch_norm import BatchNormMode
from ntkexp.foreign_loop.example_names import DATASET, Ids, recorded_loading
from ntkexp.foreign_loop.first_step import FirstStepProof
from ntkexp.foreign_loop.known_optimizers import known_optimizer
from ntkexp.foreign_loop.measure import Measure, gathered_queries
from ntkexp.foreign_loop.model_function import CalledModule, evaluate_at_queries
from ntkexp.foreign_loop.outside import named_tensors, same_values
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.running_loop import FollowedLoop, RunningLoop
from ntkexp.foreign_loop.step import AbstractStore
from ntkexp.foreign_loop.step_log import LogStep, StepLog
from ntkexp.foreign_loop.store.chosen import ChosenStore, Steps, chosen_steps
from ntkexp.foreign_loop.store.disk import DiskStore
from ntkexp.foreign_loop.store.endpoints import EndpointStore
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.store.memory import MemoryStore
from ntkexp.foreign_loop.store.shards import Processes, current_processes
from ntkexp.foreign_loop.trace import Trace, outputs_at_ends
from ntkexp.foreign_loop.user_loss import ExampleLoss, Weighing
from ntkexp.foreign_loop.watch import Watch, refuse_followed
from ntkexp.kernel.record.tape import digest, tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import Output, copy_module
from ntkexp.path.components import By, components_of
from ntkexp.records.atomic import Json
from ntkexp.records.folder import RunFolder
from ntkexp.report.progress import quiet_log
from ntkexp.shapes import Inputs
from ntkexp.text import counted

LOG = logging.getLogger("ntkexp.follow")


@contextmanager
def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    queries: Inputs | DataLoader[Any],
    output: Output | list[str | int] = None,
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
    quiet: bool = False,
) -> Iterator[Trace]:
    """Record the steps of an optimizer, or of a list of optimizers,
    while the loop runs.

    The context manager yields a `Trace`. Its method `attribute` returns the
    contribution of each training example to the change of each output. If the loss is
    not a function of the model's outputs, as in physics-informed networks, MAML and
    graphs, call `Trace.losses` in the loop.

    Args:
        model: the module that the loop trains, also compiled or in
            DistributedDataParallel.
        optimizer: the optimizer of the loop, or a list of all its optimizers.
        queries: inputs at which the model's outputs are attributed, or a DataLoader
            that yields them in batches. The model is evaluated at the queries when
            following begins and ends, in evaluation mode, without autocast.
        output: if the model returns several tensors, the name or index of the tensor to
            explain, or a list of these. The loss may use all tensors.
        measure: a function (outputs, call) of the outputs at the queries, whose values
            are explained instead of the outputs, such as a loss, a log-probability or a
            margin. It returns one value for each query, several values, or a dict of
            values by name. `call` has `args`, `kwargs` and `ids`.
        ids: names of examples: a keyword of the model that holds them, a function of
            the call, or 'dataset' for the indices in the Dataset that a DataLoader
            reads. By default examples are named by digests of their content.
        loss: a function (outputs, call) that returns one loss for each example, as in
            the loop, up to a factor. Only leave-out effects need it. It is compared
            with the gradients of every step. If the loop's loss is a mean weighted by
            class or by number of tokens, return a pair: the losses, and the weight of
            each example, as in `losses, weight[labels]`.
        to: a folder to which steps are written during training. By default steps are
            held in memory, up to `memory_gb`. If training is killed, its steps remain
            in the folder, and resumed training continues the trace. If several
            processes train one model, each follows into the same folder, and the first
            one attributes.
        every: the number of steps between stored weights. The steps between them are
            replayed. The default is 8, or more if the weights do not fit on the disk.
        by: components by which contributions are split: 'module', 'parameter', or a
            dict of names to patterns of parameters.
        memory_gb: the memory for stored steps, and for attribution.
        batch_norm: 'exact' differentiates the batch mean and variance of BatchNorm in
            training mode, 'constant' holds them constant.
        rules: rules for optimizers other than PyTorch's
            (`ntkexp.AbstractOptimizerRule`). Every step is compared with its rule.
        steps: the steps to explain: an integer n for the last n, or indices from 0,
            such as range(100, 110). For all other steps, only their total change is
            reported.
        log: a function (numbers, step) that is called after each step, such as
            `run.log` of wandb or `mlflow.log_metrics`. `numbers` is a dict with
            `gradient_norm`, `weight_norm`, `learning_rate`, `examples`, `rule_error`,
            and with `loss=` also the mean `loss`.
        quiet: log no messages, such as the size of a trace, in the loop.

    Yields:
        The trace, which records each step. Call its method `attribute` after the loop.

    Raises:
        Mistake: if the loop cannot be followed. The page "Which loops are refused"
            lists the reasons, and when each is found.

    A replay draws the same random numbers as the loop, for example in dropout, and
    enters the same autocast contexts.

    >>> import torch
    >>> model, x = torch.nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> optimizer, before = torch.optim.AdamW(model.parameters()), model(x).detach()
    >>> with follow(model, optimizer, queries=x) as trace:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().sum().backward()
    ...         optimizer.step()
    >>> attribution = trace.attribute()
    >>> explained = attribution["contribution"].sum("example") + attribution["decay"]
    >>> bool(abs(before.numpy() + explained - model(x).detach().numpy()).max() < 1e-14)
    True
    """
    # raise for unusable arguments
    options = FollowOptions(
        output=tuple(output) if isinstance(output, list) else output,
        measure=measure,
        ids=ids,
        loss=loss,
        to=to,
        every=every,
        by=by,
        memory_gb=memory_gb,
        batch_norm=batch_norm,
        rules=rules,
        log=log,
    )
    chosen = None if steps is None else chosen_steps(steps)
    optimizers = unwrapped_optimizers(optimizer)
    refuse_other_objects(model, optimizers)
    options.refuse_unusable()
    refuse_followed(optimizers)

    with quiet_log(quiet):
        loop = followed_loop(model, optimizers, options)
    with quiet_log(quiet), memory_kept(loop.module.parameters()):
        setup = setup_of(loop, queries, options)
        store = choose_store(setup, chosen)
        # A replay of a call under casts returns the same bits only with the same
        # kernels. A compiled model, a GPU, or another machine may use other kernels.
        is_alone = setup.processes.world == 1
        same_kernels = is_alone and not store.count and runs_as_it_is(model)
        called = replace(setup.called, same_kernels=same_kernels)
        if setup.altered is None:
            refuse_without_rules(called, loop.updated, setup.queries)
        release_memory(loop.module.parameters())
        with recorded_loading() if ids == DATASET else nullcontext() as loading:
            if loading is not None:
                options = replace(options, ids=loading.names)
            setup = replace(setup, called=called, options=options)
            yield from watched(setup, store)


@dataclass(frozen=True)
class FollowSetup:
    """A loop, the queries at which its outputs are explained,
    and the options of `follow`."""

    loop: FollowedLoop
    called: CalledModule
    queries: Inputs
    options: FollowOptions
    processes: Processes
    altered: AlteredLoop | None  # weights of the examples, if the loop runs again


def followed_loop(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: FollowOptions,
) -> FollowedLoop:
    """Return the loop, with a copy of its model for queries and replays. Raise if the
    model or an optimizer cannot be followed."""
    known = [known_optimizer(optimizer, options.rules) for optimizer in optimizers]
    inner = unwrapped_model(model)
    groups = ParameterGroups(inner, optimizers)
    updated = {name for name, _ in groups}
    not_in_model = len(groups.not_in_model())
    refuse_same_memory(dict(groups))
    module = copy_module(inner).eval()
    if options.by is not None:
        components_of(options.by, sorted(updated))  # raises if a pattern has no match
    if not_in_model:
        LOG.warning(
            "ntkexp: the optimizer also updates %s outside the model, on which the "
            "outputs of the model must not depend",
            counted(not_in_model, "tensor"),
        )
    return FollowedLoop(model, inner, module, optimizers, known, updated)


def setup_of(
    loop: FollowedLoop, queries: Inputs | DataLoader[Any], options: FollowOptions
) -> FollowSetup:
    """Return the loop with its queries. Raise if the model or the measure does not
    accept them."""
    inputs, sizes = gathered_queries(queries)
    inputs = checked_queries(inputs, loop.module, options.output)
    called = CalledModule(loop.module, options.output)
    if options.measure is not None:
        measured = measured_queries(options.measure, inputs, sizes, options.ids, called)
        called = replace(called, measured=measured)
    return FollowSetup(
        loop, called, inputs, options, current_processes(), altered_loop()
    )


def watched(setup: FollowSetup, store: AbstractStore) -> Iterator[Trace]:
    """Register the hooks, yield the trace while the loop runs, and remove the hooks."""
    loop = setup.loop
    options = setup.options
    called = setup.called
    watch = watch_of(setup, store)
    completed = False
    try:
        watch.begin()
        trace = Trace(
            store.steps_of(loop.module, same_kernels=called.same_kernels),
            loop.module,
            options.output,
            setup.queries,
            options.loss,
            store.folder,
            setup.processes.rank,
            options.budget,
            options.by,
            batch_norm=options.batch_norm,
            measured=called.measured,
            watch=watch,
        )
        evaluated: AbstractContextManager[None] = nullcontext()
        if setup.altered is not None:
            setup.altered.traces.append(trace)
        elif not setup.processes.rank:
            evaluated = evaluated_at_ends(trace, loop.inner, watch)
        with evaluated:
            try:
                yield trace
            finally:
                trace.watch = None  # frees the model and the copies of its weights
        completed = True
    finally:
        watch.end(whole=completed)


def watch_of(setup: FollowSetup, store: AbstractStore) -> Watch:
    """Return the hooks on the loop, not yet registered. A loop that runs again has no
    log, and no proof of the first step."""
    loop = setup.loop
    options = setup.options
    altered = setup.altered
    weighing: Weighing | None = None
    first: FirstStepProof | None = None
    log: StepLog | None = None
    if altered is not None:
        weighing = replace(altered.weighing, loss=options.loss or altered.weighing.loss)
    elif setup.processes.world == 1:
        began_with_gradient = any(
            weight.grad is not None and bool(weight.grad.any())
            for weight in loop.inner.parameters()
        )
        first = FirstStepProof(setup.called, setup.queries, began_with_gradient)
    if altered is None and options.log is not None:
        log = StepLog(options.log, loop.optimizers, options.loss)
    running = RunningLoop(loop, store)
    return Watch(running, options.output, options.ids, weighing, first, log)


@contextmanager
def evaluated_at_ends(trace: Trace, model: nn.Module, watch: Watch) -> Iterator[None]:
    """Record the outputs of the user's model
    at the queries when the loop begins and ends."""

    def evaluate() -> torch.Tensor | None:
        return evaluate_at_queries(model, trace.output, trace.queries, trace.measured)

    # f_0; a continued trace has it already
    if trace.folder is not None and watch.loop.store.count:
        trace.ends.start = outputs_at_ends(trace.folder).start
    else:
        trace.ends.start = evaluate()
    write_outputs_at_ends(trace)
    yield
    watch.steps.catch_up()

    # f_T. Do not record it if tensors were changed after the last step, because no step
    # explains that change.
    last = {
        **named_tensors(trace.module),
        **watch.loop.latest.weights,
        **watch.loop.statistics.at_step,
    }
    if all(
        same_values(now, last[name])
        for name, now in named_tensors(model).items()
        if name in last
    ):
        trace.ends.end = evaluate()
        trace.ends.steps = watch.loop.store.count
        write_outputs_at_ends(trace)


def write_outputs_at_ends(trace: Trace) -> None:
    """Write the fingerprints of the outputs at the start and the end of the loop to the
    trace's folder, if it has one."""
    if trace.folder is not None:
        files = TraceFolder(trace.folder)
        files.write(files.outputs_at_ends, vars(trace.ends))


# --- The store.


def choose_store(
    setup: FollowSetup, chosen: int | frozenset[int] | None
) -> AbstractStore:
    """Return a store in memory or in a folder.

    If the loop runs again for `again=`, store all steps in `altered.folder`. Without
    this folder, store only the weights at both ends."""
    options = setup.options
    loop = setup.loop
    refuse_processes(options, setup.processes, setup.altered)
    if setup.altered is not None:
        if setup.altered.folder is None:
            return EndpointStore(loop.known)
        return disk_store(setup.altered.folder, setup)
    output = setup.called.output
    if chosen is not None:
        if (
            options.to is not None
            or setup.processes.world > 1
            or len(loop.optimizers) > 1
        ):
            raise Mistake(
                "steps=: chosen steps can be stored only in memory, for one optimizer "
                "in one process; omit steps=, or omit to= and follow a single "
                "optimizer"
            )
        return ChosenStore(loop.known, output, options.every, options.budget, chosen)
    if options.to is None:
        return MemoryStore(loop.known, output, options.every, options.budget)
    return disk_store(options.to, setup)


def refuse_processes(
    options: FollowOptions, processes: Processes, altered: AlteredLoop | None
) -> None:
    """Raise if several processes train together, and the loop runs again or `to=` names
    no folder for them."""
    if processes.world == 1:
        return
    if altered is not None:
        raise Mistake(
            f"again=: {processes.world} processes train together, and one process "
            "cannot repeat their loop; give a function that runs the loop in one "
            "process, with a call for each of them, and compute effects later, with "
            "ntkexp attribute"
        )
    if options.to is None:
        raise Mistake(
            f"{processes.world} processes train together, and each sees only a part of "
            "every batch; give a folder for all of them, to=…, the same in every "
            "process"
        )


def disk_store(path: Path | str, setup: FollowSetup) -> DiskStore:
    """Return a store in a folder. If the folder already holds a trace, the store
    continues it, or raises if the trace has another config."""
    loop = setup.loop
    called = setup.called
    options = setup.options
    kind = type(loop.inner)
    followed: dict[str, Json] = {
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "parameters": sum(weight.numel() for weight in loop.inner.parameters()),
        "optimizers": [known.name for known in loop.known],
        "processes": setup.processes.world,
        "output": called.output,
        "queries": digest(tensors(setup.queries)).hex()[:16],
    }
    start: dict[str, object] = {
        "queries": setup.queries,
        "output": called.output,
        "still": loop.still,
    }
    if options.by is not None:
        start["by"] = options.by
    if called.measured is not None:
        followed["measure"] = called.measured.described
        followed["calls"] = list(called.measured.calls.sizes)
        start["calls"] = called.measured.calls.content
    config: Mapping[str, Json] = {"follow": followed, "path": {"queries": ["query"]}}
    return DiskStore(
        TraceFolder(RunFolder(Path(path).expanduser()), setup.processes.rank),
        setup.processes,
        config,
        start,
        loop.known,
        called.output,
        options.every,
        options.budget,
    )


class FollowSession:
    """A session of `follow` for a loop that a library runs. It lasts from `begin` to
    `end`.

    `options` are the arguments of `follow`. Their names are checked immediately.

    >>> FollowSession(queries=torch.eye(2), question=1)
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'question'
    """

    def __init__(self, **options: Any) -> None:
        signature(follow).bind(None, None, **options)
        self.options = options
        self.stack = ExitStack()
        self.begun: Trace | None = None

    def begin(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Enter `follow` for the model and optimizers of the library."""
        self.begun = self.stack.enter_context(follow(model, optimizers, **self.options))

    def end(self, error: BaseException | None = None) -> None:
        """Exit `follow`. `error` is the exception
        that interrupted the training, if any."""
        self.stack.__exit__(None if error is None else type(error), error, None)

    @property
    def trace(self) -> Trace:
        """The trace, while training runs or after it."""
        if self.begun is None:
            raise Mistake(
                "no training has begun; give the callback to the Trainer and train, "
                "then read .trace"
            )
        return self.begun
