"""A store in a folder. If training is killed, all written steps remain. Resumed
training continues the trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from secrets import token_hex
from shutil import disk_usage
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ntkexp.allocator import release_memory
from ntkexp.capacity import MemoryBudget, require_disk
from ntkexp.foreign_loop.call import Autocast, Circumstances, ModelCall
from ntkexp.foreign_loop.cross_entropy import (
    CrossEntropyGradient,
    OutputGradient,
    restored,
)
from ntkexp.foreign_loop.example_losses import (
    LossFunction,
    name_of,
    restored_batch,
    store_function,
    stored_batch,
)
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signatures, Signed, distance
from ntkexp.foreign_loop.step import (
    AbstractSteps,
    AbstractStore,
    FollowedStep,
    step_index,
)
from ntkexp.foreign_loop.store.checkpoints import (
    COPIES_PER_STEP,
    CheckpointPlan,
    cloned,
    optimizer_states,
    states_at_end,
    states_on,
)
from ntkexp.foreign_loop.store.files import (
    START,
    Event,
    TraceFolder,
    event_of,
    weights_digest,
    written,
)
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.foreign_loop.store.shards import (
    Processes,
    find_shards,
    joined_events,
    refuse_absent,
)
from ntkexp.kernel.record.tape import map_tensors, tensors
from ntkexp.mistake import Mistake, NoPlace, WrongArgument
from ntkexp.model.functional import Output
from ntkexp.records.atomic import Damaged, Json, read_object
from ntkexp.records.folder import CONFIG, START_WEIGHTS, TRACE_IDENTITY, RunFolder
from ntkexp.shapes import Inputs, Weights

LOG = logging.getLogger("ntkexp.follow")
# rounding error of a signature that is summed in another order, in units of eps
SAME_WEIGHTS_EPS = 16


# --- A resumed loop continues the trace where the stored weights equal its own weights.


@dataclass(frozen=True)
class PlaceInTrace:
    """A position in a trace: the numbers of events (steps of one optimizer)
    and steps before it."""

    events: int
    steps: int


def find_place(
    files: TraceFolder, config: Mapping[str, Json], weights: Weights
) -> PlaceInTrace | None:
    """Return the position in the trace at which a resumed loop continues. There, the
    trace had the present `weights`, up to rounding.

    Return None if the folder is empty or has no step. Raise if the trace never had
    these weights."""
    path = files.folder.path
    if not (path / CONFIG).is_file():
        return None
    refuse_other_loop(files, config)
    files.refuse_lost()
    if not len(files.log):
        if any(files.checkpoints) or files.ended.exists():
            raise Damaged(
                f"{files.log.path} is damaged: it has no step, but there are weights of "
                "later steps; give another folder"
            )
        return None

    # the nearest position, or the last one of several that are equally near
    gaps = dict(gaps_in(files, weights))
    best = min(gaps, key=lambda place: (gaps[place], -place.steps))
    eps = max(torch.finfo(part.dtype).eps for part in weights.values())
    if not gaps[best] <= SAME_WEIGHTS_EPS * eps:
        steps = max(place.steps for place in gaps)
        raise Mistake(
            f"to={path}: the folder holds another run: none of its {steps} "
            "steps has these weights; resume from a checkpoint of that run, or give "
            "another folder"
        )
    return best


def gaps_in(
    files: TraceFolder, weights: Weights
) -> Iterator[tuple[PlaceInTrace, float]]:
    """Yield every position in the trace, with the relative distance between its weights
    and `weights`. The positions are before the first step, and after each step."""
    files.read(files.path / START)
    first = files.read(files.weights_at(0))["weights"]
    signatures = Signatures()
    here = signatures.of(weights)
    on_device = {name: part.to(weights[name].device) for name, part in first.items()}
    signature = dict(signatures.of(on_device))
    steps = 0
    for number, event in enumerate(files.events()):
        # several optimizers may have an event in the same step
        if event["step"] == steps:
            yield PlaceInTrace(number, steps), distance(here, signature)
            steps += 1
        signature |= event["after"]
    yield PlaceInTrace(len(files.log), steps), distance(here, signature)


def refuse_other_loop(files: TraceFolder, config: Mapping[str, Json]) -> None:
    """Raise if the run in a folder is not a trace, or is the trace of another loop."""
    path = files.folder.path
    stored = read_object(path / CONFIG).get("follow")
    wanted = config.get("follow")
    if not isinstance(stored, dict) or not isinstance(wanted, dict):
        raise Mistake(
            f"to={path}: the folder holds a run that is not a trace; give another "
            "folder"
        )
    for key in {**wanted, **stored}:
        if stored.get(key) != wanted.get(key):
            raise Mistake(
                f"to={path}: the folder holds another run, whose {key} is "
                f"{stored.get(key)} and not {wanted.get(key)}{advice_for(key)}"
            )


def advice_for(key: str) -> str:
    """Return advice on a difference between a loop and the trace in its
    folder, or an empty string."""
    if key != "optimizers":
        return ""
    return (
        "; give another folder to begin anew, or build the optimizers of all stages first and "
        "follow(model, [first, second]) from the beginning"
    )


def join_at(files: TraceFolder, place: PlaceInTrace, weights: Weights) -> None:
    """Continue the trace at the position that the first process chose. All other
    processes call this function."""
    if not files.weights_at(place.events).is_file():
        raise Mistake(
            f"rank {files.rank} does not see what rank 0 wrote into {files.folder.path}; give a "
            "folder that all processes share"
        )
    first = files.read(files.weights_at(place.events))["weights"]
    different = [
        name
        for name, weight in first.items()
        if not torch.equal(weight, weights[name].cpu())
    ]
    if different:
        raise Mistake(
            f"rank {files.rank} begins at other weights than rank 0 ('{different[0]}' "
            "differs); follow the model in DistributedDataParallel, which gives all "
            "processes the weights of the first"
        )
    if len(files.log) < place.events:
        raise Mistake(
            f"{files.own.path} of rank {files.rank} was interrupted before step "
            f"{place.steps}, where rank 0 continues; resume from an earlier checkpoint, "
            "or give another folder"
        )
    files.ended.unlink(missing_ok=True)
    files.log.truncate(place.events)


# --- Writing. Each event (a step of one optimizer) is written before the next step
# begins. A checkpoint is written every few steps.


@dataclass
class StoredCall:
    """A call of the latest event, as it was stored: its key,
    its inputs, and its gradient."""

    key: int
    inputs: Inputs
    gradient: OutputGradient | None = None


@dataclass
class CheckpointWriter:
    """A background thread that writes checkpoints, one at a time.

    If the process is killed, the latest checkpoint may be lost, but no partial file
    remains. If a write fails, its error is raised at the next step."""

    files: TraceFolder
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "ntkexp-follow")
    )
    pending: Future[object] | None = None

    def begin(self, event: int, content: Mapping[str, object]) -> int:
        """Begin to write the checkpoint before an event. Return its size in bytes.

        The caller must not change the tensors in `content`.
        """
        parts = written(content)
        self.wait()
        path = self.files.weights_at(event)
        self.pending = self.thread.submit(self.files.write_parts, path, parts)
        return sum(map(len, parts))

    def wait(self) -> None:
        """Wait for the pending write, and raise its error if it failed."""
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.result()

    def raise_error(self) -> None:
        """Raise the error of the pending write if it has failed, without waiting."""
        if self.pending is not None and self.pending.done():
            self.wait()


@dataclass
class DiskStore(AbstractStore):
    """A store that writes a trace to a folder. If several processes train together,
    only the first process writes checkpoints."""

    files: TraceFolder
    processes: Processes
    config: Mapping[str, Json]  # description of the loop
    start: Mapping[str, object]  # the content of start.bin
    known: Sequence[KnownOptimizer]
    output: Output
    every: int | None
    budget: MemoryBudget
    plan: CheckpointPlan = field(init=False)
    writer: CheckpointWriter = field(init=False)
    # parameters that the latest step has moved so far
    moved: frozenset[str] = frozenset()
    steps: int = 0  # number of steps so far
    calls: int = 0  # number of calls so far
    # the calls of the latest event, as they were stored
    stored_calls: dict[int, StoredCall] = field(default_factory=dict)
    size_reported: bool = False
    lock: ExitStack = field(default_factory=ExitStack)
    # number of steps before each checkpoint, by the checkpoint's event number
    checkpoints: dict[int, int] = field(default_factory=dict)
    # indices of the optimizers that have taken no step since the latest checkpoint
    waiting: set[int] = field(default_factory=set)
    # functions of `trace.losses` by name
    functions: dict[str, LossFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder: RunFolder = self.files.folder
        self.writer = CheckpointWriter(self.files)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        loop = LoopOnDisk(TraceFolder(self.files.folder), self.functions)
        return ReplayedSteps(loop, module, self.output, self.known, same_kernels)

    @property
    def count(self) -> int:
        return self.steps

    def store_function(self, function: LossFunction) -> None:
        store_function(self.functions, function)

    # --- Begin a trace, or continue one

    def begin(
        self,
        weights: Weights,
        optimizers: Sequence[torch.optim.Optimizer],
        names: dict[int, str],
    ) -> None:
        self.optimizers = optimizers
        self.names = names
        self.latest = weights
        self.moved = frozenset(weights)  # the next event begins a new step
        about = str(self.files.folder.path.resolve())
        place = PlaceInTrace(**self.processes.decided(about, self.begin_first))
        self.steps = place.steps
        if self.processes.rank:
            self.lock.enter_context(self.files.own.claim())
            join_at(self.files, place, weights)
        self.calls = sum(len(event["calls"]) for event in self.files.events())

    def begin_first(self) -> dict[str, int]:
        """Begin or continue the trace in the first process.

        Return the position as a dict of plain values, for the other processes.
        """
        self.lock.enter_context(self.files.own.claim())
        place = find_place(self.files, self.config, self.latest)
        ended: dict[str, object] = {}
        if place is None:
            self.begin_trace()
        else:
            ended = self.continue_at(place)
        steps = [0, *(event["step"] + 1 for event in self.files.events())]
        self.checkpoints = {event: steps[event] for event in self.files.checkpoints}
        self.plan = self.checkpoint_plan(self.latest)
        self.add_checkpoint(self.latest, ended)
        self.writer.wait()  # a trace without its first checkpoint is useless
        return {"events": len(self.files.log), "steps": self.steps}

    def begin_trace(self) -> None:
        """Write the first files of a new trace, except its first checkpoint."""
        self.files.folder.clear()
        self.files.forget()
        identity = {
            TRACE_IDENTITY: token_hex(16),
            START_WEIGHTS: weights_digest(self.latest),
        }
        # config.json comes first. It marks the folder as a trace, so that the next
        # attempt may clear it if this one is killed
        self.files.folder.write_json(CONFIG, {**self.config, **identity})
        (self.files.path / "weights").mkdir(parents=True)
        self.files.write(self.files.path / START, self.start)

    def continue_at(self, place: PlaceInTrace) -> dict[str, object]:
        """Discard the steps after `place`, because the resumed loop repeats them.

        Return an entry for the next checkpoint: {"ended": states}, with the optimizer
        states that the trace has stored at this position. The resumed loop may begin
        with other states."""
        self.files.folder.reopen()
        self.files.ended.unlink(missing_ok=True)
        # the steps go last, because checkpoints after the last step count as damage
        for event in self.files.checkpoints:
            if event > place.events:
                self.files.weights_at(event).unlink(missing_ok=True)
        self.files.log.truncate(place.events)
        self.steps = place.steps
        LOG.warning(
            "ntkexp: the trace in %s continues at step %d",
            self.files.folder.path,
            self.steps,
        )
        if not place.events:
            return {}
        path = self.files.weights_at(place.events)
        if not self.files.whole(path):
            return {"ended": None}
        return {"ended": states_at_end(self.files.read(path))}

    def checkpoint_plan(self, weights: Weights) -> CheckpointPlan:
        """Plan the checkpoints. Assume that the optimizer's state has at most two
        numbers per weight."""
        size = sum(part.nbytes for part in weights.values())
        free = disk_usage(self.files.path).free
        copies = 1 if all(map(is_plain_descent, self.optimizers)) else 3
        plan = CheckpointPlan.of(self.every, size, copies * size, free, self.budget)
        self.budget.require(
            COPIES_PER_STEP * size * plan.every,
            f"every={plan.every} replayed steps",
            f"give every={plan.max_interval}",
        )
        require_disk(
            self.files.path, 3 * plan.checkpoint_bytes, "three checkpoints of the trace"
        )
        return plan

    # --- Store a step

    def add(
        self, step: FollowedStep, which: int, after: Weights, signed: Signed
    ) -> None:
        self.writer.raise_error()
        index, self.moved = step_index(step, self.moved, self.steps)
        calls = [self.call_content(call) for call in step.calls]
        self.stored_calls = {
            id(call.inputs): self.stored_calls[id(call.inputs)] for call in step.calls
        }
        event = event_of(step, index, which, self.optimizers[which], self.names, signed)
        entry = written({**event, "calls": calls})
        if not self.size_reported and not self.processes.rank:
            refuse_absent(self.files)
            self.report_size(after, sum(map(len, entry)))
        self.files.log.append(*entry)
        self.steps = index + 1
        self.latest = after

        # the first process adds a checkpoint once every optimizer has taken a step
        self.waiting.discard(which)
        since = self.steps - max(self.checkpoints.values(), default=0)
        if not self.processes.rank and not self.waiting and since >= self.plan.every:
            self.add_checkpoint(after)

    def call_content(self, call: ModelCall) -> dict[str, object]:
        """Return the stored form of a call.

        The first event that uses a call stores it completely. Later events store its
        key, and its gradient if it has changed."""
        stored = self.stored_calls.get(id(call.inputs))
        content: dict[str, object] = {}
        if stored is None:
            stored = StoredCall(self.calls, call.inputs)
            self.stored_calls[id(call.inputs)] = stored
            self.calls += 1
            rows = self.files.rows.add(digests(call.rows), call.rows)
            content = {
                "at": call.at,
                "how": call.circumstances.content,
                "signed": call.fingerprint,
                **rows,
            }
            if call.given_names is not None:
                content["names"] = list(call.given_names)
            content["shape"] = call.shape
            content["backward"] = call.backward
            if call.statistics is not None:
                content["statistics"] = call.statistics
            if call.losses is not None:
                content["losses"] = name_of(call.losses)
                content |= stored_batch(call.inputs, len(call.names))
            if call.weights is not None:
                content["weights"] = call.weights
        if call.gradient is not stored.gradient:
            stored.gradient = call.gradient
            content["gradient"] = call.gradient
            if isinstance(call.gradient, CrossEntropyGradient):
                content["gradient"] = call.gradient.content
            if call.joined:
                content["joined"] = call.joined
                content["signed"] = call.fingerprint
        return {"key": stored.key, **content}

    def report_size(self, weights: Weights, entry_bytes: int) -> None:
        """After the first step, log the expected size of the trace."""
        self.size_reported = True
        per_parameter = self.plan.checkpoint_bytes / sum(
            part.numel() for part in weights.values()
        )
        limit = ""
        if not self.plan.fixed:
            limit = f", at most {self.plan.max_bytes / 1e9:.3g} GB in all"
        processes = ""
        if self.processes.world > 1:
            processes = f" in each of {self.processes.world} processes"
        free = disk_usage(self.files.path).free
        # not level info: programs that do not configure logging would not show it
        LOG.warning(
            "ntkexp: the trace in %s takes %.3g MB per step%s, plus new examples, and a checkpoint "
            "of %.3g MB (%.3g bytes per parameter) every %s steps%s; %.3g GB are free",
            *(self.files.folder.path, entry_bytes / 1e6, processes),
            *(
                self.plan.checkpoint_bytes / 1e6,
                per_parameter,
                self.plan.every,
                limit,
                free / 1e9,
            ),
        )

    # --- Store a checkpoint

    def add_checkpoint(
        self, weights: Weights, more: Mapping[str, object] | None = None
    ) -> None:
        """Add a checkpoint before the next event. If there are too many,
        delete every second one.

        `more` holds other entries of the checkpoint, such as "ended".
        """
        # wait for the previous write, so that only one checkpoint is in memory at a
        # time
        self.writer.wait()
        release_memory(weights.values())
        states = optimizer_states(self.optimizers, self.names)
        self.write_checkpoint(
            {"weights": cloned(weights), "memories": states, **(more or {})}
        )
        self.waiting = set(range(len(self.optimizers)))
        if self.plan.too_many(len(self.checkpoints)):
            self.plan.every *= 2
            self.writer.wait()
            for dropped in sorted(self.checkpoints)[1::2]:
                self.files.weights_at(dropped).unlink(missing_ok=True)
                del self.checkpoints[dropped]

    def write_checkpoint(self, content: Mapping[str, object]) -> None:
        """Begin to write a checkpoint of the present state. A replay of the next event
        starts from this checkpoint."""
        event = len(self.files.log)
        size = self.writer.begin(event, content)
        self.plan.checkpoint_bytes = max(self.plan.checkpoint_bytes, size)
        self.checkpoints[event] = self.steps

    # --- End

    def end(self, outside: Outside, *, whole: bool) -> None:
        with (
            self.lock,
            suppress(NoPlace),
            self.writer.thread,
        ):
            # if the disk is full, the stored steps are still useful without an end
            self.writer.wait()
            writes_weights = self.steps > 0 and self.processes.rank == 0
            if writes_weights and len(self.files.log) not in self.checkpoints:
                # omit the optimizer states, because a step that raised an error may
                # have changed them
                self.write_checkpoint(
                    {"weights": self.latest, "memories": None, "ended": None}
                )
                self.writer.wait()
            if whole:
                self.write_end(outside)

    def write_end(self, outside: Outside) -> None:
        """Sync the logs to disk. Then write ended.bin with the
        numbers of their entries."""
        self.files.log.secure()
        self.files.rows.log.secure()
        content = {
            "steps": self.steps,
            "events": len(self.files.log),
            "rows": len(self.files.rows.log),
            "names": outside.names,
            "tensors": {} if self.processes.rank else outside.tensors,
        }
        self.files.write(self.files.ended, content)


def is_plain_descent(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer is SGD without momentum, which has no state."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return not any(group["momentum"] for group in optimizer.param_groups)


# --- Reading.


@dataclass(frozen=True)
class LoopOnDisk:
    """A loop stored in a folder, as it was when the folder was last read. This class
    implements `files.StoredLoop`."""

    files: TraceFolder
    # functions of `trace.losses` by name
    functions: Mapping[str, LossFunction] = field(default_factory=dict)

    @cached_property
    def shards(self) -> list[TraceFolder]:
        """The parts of the trace, each written by one of the processes
        that trained together."""
        return find_shards(self.files)

    def refresh(self) -> None:
        self.files.forget()
        for name in ("shards", "events", "firsts", "checkpoints"):
            vars(self).pop(name, None)

    @property
    def processes(self) -> int:
        return self.files.processes

    @property
    def outside(self) -> Outside:
        if not self.files.ended.exists():
            return Outside()
        end = self.files.read(self.files.ended)
        return Outside(tuple(end["names"]), end["tensors"])

    @cached_property
    def events(self) -> Sequence[Event]:
        """The events of all processes, each with its complete calls."""
        return joined_events(self.shards)

    @cached_property
    def firsts(self) -> list[int]:
        steps = [event["step"] for event in self.events]
        return [
            index
            for index, step in enumerate(steps)
            if index == 0 or steps[index - 1] < step
        ]

    @cached_property
    def checkpoints(self) -> list[int]:
        begin_step = set(self.firsts)
        checkpoints = [event for event in self.files.checkpoints if event in begin_step]
        if checkpoints[:1] != self.firsts[:1]:
            raise Damaged(
                f"{self.files.path} is damaged: its first weights are missing; follow the loop "
                "again"
            )
        return checkpoints

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        if event not in self.files.checkpoints:
            return None
        content = dict(self.files.read(self.files.weights_at(event)))
        content["weights"] = {
            name: part.to(device) for name, part in content["weights"].items()
        }
        for key in ("memories", "ended"):
            if key in content:
                content[key] = states_on(content[key], device)
        return content

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return tuple(self.restored_call(call, device) for call in event["calls"])

    def restored_call(self, call: Mapping[str, Any], device: torch.device) -> ModelCall:
        """Return a stored call on a device. In traces of earlier versions, a
        call has no fingerprint, shape or backward pass."""
        inputs = self.shards[int(call["rank"])].rows.find(call)
        losses = None
        if "losses" in call:
            losses = self.function(call["losses"])
            inputs = restored_batch(call, tensors(inputs))
        return ModelCall(
            at=call["at"],
            inputs=map_tensors(partial(moved_leaf, device), inputs),
            given_names=example_names(call),
            circumstances=Circumstances.read(call.get("how", {})),
            gradient=restored(call["gradient"], device),
            backward=int(call.get("backward", -1)),
            fingerprint=call.get("signed"),
            shape=tuple(call.get("shape", ())),
            joined={
                name: tuple(shape) for name, shape in call.get("joined", {}).items()
            },
            statistics=statistics_on(call, device),
            losses=losses,
            weights=weights_on(call, device),
        )

    def function(self, name: str) -> LossFunction:
        """Return a function of `trace.losses`. Raise if it was not given."""
        if name not in self.functions:
            raise WrongArgument(
                f"losses=: the loop passed the function '{name}' to trace.losses, and "
                f"{self.files.folder.path} does not contain its code; give the function again",
                "losses",
            )
        return self.functions[name]

    def names_and_casts(
        self, event: Event
    ) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        for call in event["calls"]:
            yield example_names(call), Circumstances.read(call.get("how", {})).autocast


def moved_leaf(device: torch.device, tensor: Tensor) -> Tensor:
    """Move a tensor to a device, as a leaf that requires gradients
    if the tensor does."""
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def statistics_on(
    content: Mapping[str, Any], device: torch.device
) -> tuple[Weights, Weights] | None:
    """Return the running statistics before and after a stored call, on a device. Return
    None if the call has stored none."""
    stored = content.get("statistics")
    if stored is None:
        return None
    before, after = tree_map_only(
        Tensor, lambda tensor: tensor.clone().to(device), stored
    )
    return before, after


def weights_on(content: Mapping[str, Any], device: torch.device) -> Weights | None:
    """Return the weights that the loop had moved before a stored call (as SAM does), on
    a device. Return None if it had moved no weights."""
    stored = content.get("weights")
    if stored is None:
        return None
    return {name: weight.clone().to(device) for name, weight in stored.items()}


def example_names(call: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the examples of a stored call: the names from `ids=`, or
    digests of its rows."""
    if "names" in call:
        return tuple(call["names"])
    return tuple(key.partition(" ")[0] for key in call["rows"])
