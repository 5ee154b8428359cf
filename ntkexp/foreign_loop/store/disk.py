"""Steps are stored in a folder as they happen: a killed training leaves all that were written, and goes on there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from secrets import token_hex
from shutil import disk_usage
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ntkexp.foreign_loop.call import Autocast, Circumstances, ModelCall
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.outside import Outside, release_memory
from ntkexp.foreign_loop.rule import Signatures, Signed, distance
from ntkexp.foreign_loop.step import AbstractSteps, AbstractStore, FollowedStep, placed
from ntkexp.foreign_loop.store.files import (
    START,
    Event,
    TraceFolder,
    event_of,
    weights_digest,
    written,
)
from ntkexp.foreign_loop.store.replay import (
    CheckpointPlan,
    ReplayedSteps,
    memories_on,
    optimizer_states,
    states_at_end,
)
from ntkexp.foreign_loop.store.shards import Processes, find_shards, joined_events, refuse_absent
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.kernel.record.tape import map_tensors
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import Damaged, Json, read_object
from ntkexp.records.folder import CONFIG, START_WEIGHTS, TRACE_IDENTITY, RunFolder
from ntkexp.shapes import Inputs, Weights

LOG = logging.getLogger("ntkexp.follow")
SAME = 16  # eps: of sums that are taken in another order


# --- Where a trace goes on: at the step whose weights a loop begins with, if its folder holds one of the same training.


@dataclass(frozen=True)
class PlaceInTrace:
    """So many events, and steps, lie before it."""

    events: int
    steps: int


def find_place(
    files: TraceFolder, config: Mapping[str, Json], weights: Weights
) -> PlaceInTrace | None:
    """Where these weights are in the trace of a folder; nowhere, if it holds none."""
    path = files.folder.path
    if not (path / CONFIG).is_file():
        return None
    stored, wanted = (each.get("follow") for each in (read_object(path / CONFIG), config))
    if not isinstance(stored, dict) or not isinstance(wanted, dict):
        raise Mistake(f"to={path}: it holds a run that is not a trace; give another folder")
    for key in {**wanted, **stored}:
        if stored.get(key) != wanted.get(key):
            raise Mistake(
                f"to={path}: it holds another run, whose {key} is {stored.get(key)} and not {wanted.get(key)}"
            )
    files.refuse_lost()
    if not len(files.log):
        if any(files.checkpoints) or files.ended.exists():
            raise Damaged(
                f"{files.log.path} is damaged: it has no step, and weights of later ones are kept; give another folder"
            )
        return None

    # the signature of the weights at every place before, between and after the steps; the nearest of them, the last
    # where several are as near, has to be that of these weights
    files.read(files.path / START)
    began = files.read(files.weights_at(0))["weights"]
    signatures = Signatures()
    here = signatures.of(weights)
    signature = dict(
        signatures.of({name: part.to(weights[name].device) for name, part in began.items()})
    )
    places, errors = list[PlaceInTrace](), list[float]()
    for number, event in enumerate(files.events()):
        if event["step"] == len(places):
            places.append(PlaceInTrace(number, len(places)))
            errors.append(distance(here, signature))
        signature |= event["after"]
    places.append(PlaceInTrace(len(files.log), len(places)))
    errors.append(distance(here, signature))
    best = min(range(len(places)), key=lambda place: (errors[place], -place))
    eps = max(torch.finfo(part.dtype).eps for part in here.values())
    if not errors[best] <= SAME * eps:
        raise Mistake(
            f"to={path}: it holds another run: the weights are those of none of its {places[-1].steps} steps; resume "
            "from a checkpoint of that run, or give another folder"
        )
    return places[best]


def join_at(files: TraceFolder, place: PlaceInTrace, weights: Weights) -> None:
    """Go on in one process with what the first one has begun, or goes on with, at this place."""
    if not files.weights_at(place.events).is_file():
        raise Mistake(
            f"rank {files.rank} does not see what rank 0 wrote into {files.folder.path}; give a folder "
            "that all processes share"
        )
    first = files.read(files.weights_at(place.events))["weights"]
    if other := next(
        (name for name, weight in first.items() if not torch.equal(weight, weights[name].cpu())),
        None,
    ):
        raise Mistake(
            f"rank {files.rank} begins at other weights than rank 0 ('{other}' differs); follow what is wrapped "
            "in DistributedDataParallel, which gives all processes those of the first"
        )
    if len(files.log) < place.events:
        raise Mistake(
            f"{files.own.path} of rank {files.rank} was interrupted before step {place.steps}, at which rank "
            "0 goes on; "
            "resume from an earlier checkpoint, or give another folder"
        )
    files.ended.unlink(missing_ok=True)
    files.log.cut(place.events)


# --- Writing: an event for every step, before the next begins, and a checkpoint every few steps.


@dataclass
class StoredCall:
    """A call that an event holds already, by its `key`, and the gradient that was stored of it."""

    key: int
    inputs: Inputs
    gradient: Tensor | None = None


@dataclass
class DiskStore(AbstractStore):
    """Writes a trace; `config` says what is followed, `start` is stored of it once. Where several processes train
    together, each writes what it sees, and the first also the weights, which are those of all."""

    files: TraceFolder
    processes: Processes
    config: Mapping[str, Json]
    start: Mapping[str, object]
    known: Sequence[KnownOptimizer]
    output: str | int | None
    every: int | None
    memory_gb: float
    plan: CheckpointPlan = field(init=False)
    moved: frozenset[str] = frozenset()  # by the latest step, as far as it was taken
    steps: int = 0
    calls: int = 0
    stored_calls: dict[int, StoredCall] = field(default_factory=dict)  # of the latest event
    size_reported: bool = False
    lock: ExitStack = field(default_factory=ExitStack)

    # Checkpoints are written by a thread, while the loop goes on: one at a time. A kill may leave the latest out, and
    # no half of it. A write that failed is reported at the next step.
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "ntkexp-follow")
    )
    pending: Future[object] | None = None
    checkpoints: dict[int, int] = field(
        default_factory=dict
    )  # the steps before which they are, by event
    waiting: set[int] = field(
        default_factory=set
    )  # the optimizers that have not moved since the latest checkpoint

    def __post_init__(self) -> None:
        self.folder: RunFolder = self.files.folder

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        loop = LoopOnDisk(TraceFolder(self.files.folder))
        return ReplayedSteps(loop, module, self.output, self.known, same_kernels)

    @property
    def count(self) -> int:
        return self.steps

    # --- The beginning: of a new trace, or where one goes on

    def begin(
        self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
    ) -> None:
        self.optimizers, self.names, self.latest = optimizers, names, weights
        self.moved = frozenset(weights)  # whatever comes next is a step of its own
        place = PlaceInTrace(
            **self.processes.decided(str(self.files.folder.path.resolve()), self.begin_first)
        )
        self.steps = place.steps
        if self.processes.rank:
            self.lock.enter_context(self.files.own.claim())
            join_at(self.files, place, weights)
        self.calls = sum(len(event["calls"]) for event in self.files.events())

    def begin_first(self) -> dict[str, int]:
        """Begin the trace, or go on with it, at the latest weights, in the first process; what lies before."""
        self.lock.enter_context(self.files.own.claim())
        place = find_place(self.files, self.config, self.latest)
        at_end: dict[str, object] = {}
        if place is None:
            self.files.folder.clear()
            self.files.forget()
            (self.files.path / "weights").mkdir(parents=True)
            own = {TRACE_IDENTITY: token_hex(16), START_WEIGHTS: weights_digest(self.latest)}
            self.files.folder.write_json(CONFIG, {**self.config, **own})
            self.files.write(self.files.path / START, self.start)
        else:
            # what was followed after that place was trained again, or will be
            self.files.folder.reopen()
            self.files.ended.unlink(missing_ok=True)
            self.files.log.cut(place.events)
            for event in self.files.checkpoints:
                if event > place.events:
                    self.files.weights_at(event).unlink(missing_ok=True)
            self.steps = place.steps
            LOG.warning(
                "ntkexp: the trace in %s continues at step %d", self.files.folder.path, self.steps
            )
            if (
                place.events
            ):  # the states that the optimizers had there before, which they may not have now
                path = self.files.weights_at(place.events)
                at_end = {
                    "ended": states_at_end(self.files.read(path))
                    if self.files.whole(path)
                    else None
                }
        steps = [0, *(event["step"] + 1 for event in self.files.events())]
        self.checkpoints = {event: steps[event] for event in self.files.checkpoints}
        self.plan = self.checkpoint_plan(self.latest)
        self.add_checkpoint(self.latest, at_end)
        self.wait()  # a trace begins with these
        return {"events": len(self.files.log), "steps": self.steps}

    def checkpoint_plan(self, weights: Weights) -> CheckpointPlan:
        """How often there is a checkpoint, of weights and up to two numbers that an optimizer remembers of each."""
        size = sum(part.nbytes for part in weights.values())
        free = disk_usage(self.files.path).free
        groups = [
            (isinstance(each, torch.optim.SGD), group)
            for each in self.optimizers
            for group in each.param_groups
        ]
        copies = 3 if any(not sgd or group["momentum"] for sgd, group in groups) else 1
        plan = CheckpointPlan.of(self.every, size, copies * size, free, self.memory_gb)
        if plan.most < plan.every:
            raise Mistake(
                f"every={plan.every}: to replay so many steps takes more than memory_gb={self.memory_gb:g}; raise "
                f"that, or keep weights every {plan.most or 1}"
            )
        if free < 3 * plan.size:
            raise NoPlace(
                f"the trace takes {plan.size / 1e6:.3g} MB each time that weights are kept and {self.files.path} has "
                f"{free / 1e6:.3g} MB free; choose another place"
            )
        return plan

    # --- A step

    def add(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        if self.pending is not None and self.pending.done():
            self.wait()  # raises what it raised
        index, self.moved = placed(step, self.moved, self.steps)
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
        self.steps, self.latest = index + 1, after
        self.waiting.discard(which)
        since = self.steps - max(self.checkpoints.values(), default=0)
        if not self.processes.rank and not self.waiting and since >= self.plan.every:
            self.add_checkpoint(after)

    def call_content(self, call: ModelCall) -> dict[str, object]:
        """What an event holds of a call: all of it the first time, later its key, and a gradient that is another."""
        stored = self.stored_calls.get(id(call.inputs))
        content: dict[str, object] = {}
        if stored is None:
            stored = self.stored_calls[id(call.inputs)] = StoredCall(self.calls, call.inputs)
            self.calls += 1
            named = {} if call.given_names is None else {"names": list(call.given_names)}
            rows = self.files.rows.add(digests(call.inputs), call.inputs)
            content = {
                "at": call.at,
                "how": call.how.content,
                "signed": call.signed,
                **rows,
                **named,
            }
            content["shape"] = call.shape
            content["backward"] = call.backward
            content |= {} if call.statistics is None else {"statistics": call.statistics}
        if call.gradient is not stored.gradient:
            stored.gradient = call.gradient
            content["gradient"] = call.gradient
        return {"key": stored.key, **content}

    def report_size(self, weights: Weights, entry: int) -> None:
        """Say how large the trace grows, before it does."""
        self.size_reported = True
        each = self.plan.size / sum(part.numel() for part in weights.values())
        often = f"after every {self.plan.every} steps{'' if self.plan.fixed else ', or as seldom as fits,'}"
        disk = disk_usage(self.files.path).free
        by = f" in each of {self.processes.world} processes" if self.processes.world > 1 else ""
        limit = "" if self.plan.fixed else f"up to {self.plan.share / 1e9:.3g} GB of "
        LOG.warning(  # without a log, a user would see nothing below a warning
            "ntkexp: the trace in %s takes %.3g MB a step%s, and new examples, and %s %.3g bytes per parameter, "
            "%.3g MB; %s%.3g GB are free",
            *(
                self.files.folder.path,
                entry / 1e6,
                by,
                often,
                each,
                self.plan.size / 1e6,
                limit,
                disk / 1e9,
            ),
        )

    # --- A checkpoint

    def add_checkpoint(self, weights: Weights, more: Mapping[str, object] | None = None) -> None:
        """Store the weights, and the states of the optimizers; every second checkpoint goes where they are too many."""
        self.wait()  # or there would be copies for two
        release_memory(weights.values())
        copies = {name: weight.clone() for name, weight in weights.items()}  # a thread writes them
        memories = optimizer_states(self.optimizers, self.names)
        self.write_checkpoint({"weights": copies, "memories": memories, **(more or {})})
        self.waiting = set(range(len(self.optimizers)))
        if self.plan.too_many(len(self.checkpoints)):
            self.plan.every *= 2
            self.wait()
            for dropped in sorted(self.checkpoints)[1::2]:
                self.files.weights_at(dropped).unlink(missing_ok=True)
                del self.checkpoints[dropped]

    def write_checkpoint(self, content: Mapping[str, object]) -> None:
        """Begin to write a checkpoint after the latest event; its tensors are not to change any more."""
        event, parts = len(self.files.log), written(content)
        self.wait()
        self.pending = self.thread.submit(
            self.files.write_parts, self.files.weights_at(event), parts
        )
        self.plan.size, self.checkpoints[event] = (
            max(self.plan.size, sum(map(len, parts))),
            self.steps,
        )

    def wait(self) -> None:
        """Wait for the write that is under way; raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    # --- The end

    def end(self, outside: Outside, *, whole: bool) -> None:
        with self.lock, suppress(NoPlace), self.thread:  # steps that are on disk are of use without
            self.wait()
            if (
                self.steps
                and not self.processes.rank
                and len(self.files.log) not in self.checkpoints
            ):
                # without the optimizers' states, which by now may be of a step that was refused
                self.write_checkpoint({"weights": self.latest, "memories": None, "ended": None})
                self.wait()
            if whole:
                self.files.log.secure()
                self.files.rows.log.secure()  # before it is said how many entries there are
                counts = {
                    "steps": self.steps,
                    "events": len(self.files.log),
                    "rows": len(self.files.rows.log),
                }
                tensors = {} if self.processes.rank else outside.tensors
                self.files.write(
                    self.files.ended, {**counts, "names": outside.names, "tensors": tensors}
                )


# --- Reading.


@dataclass(frozen=True)
class LoopOnDisk:
    """All that stood in the folder when it was last read."""

    files: TraceFolder

    @cached_property
    def shards(self) -> list[TraceFolder]:
        """What each process wrote."""
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
    def events(self) -> Sequence[Event]:  # each with all that was stored of its calls
        return joined_events(self.shards)

    @cached_property
    def firsts(self) -> list[int]:
        steps = [event["step"] for event in self.events]
        return [place for place, step in enumerate(steps) if place == 0 or steps[place - 1] < step]

    @cached_property
    def checkpoints(self) -> list[int]:
        begin = set(self.firsts)
        found = [event for event in self.files.checkpoints if event in begin]
        if found[:1] != self.firsts[:1]:
            raise Damaged(
                f"{self.files.path} is damaged: its first weights are missing; follow the loop again"
            )
        return found

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        if event not in self.files.checkpoints:
            return None
        content = self.files.read(self.files.weights_at(event))
        states = {
            key: memories_on(content[key], device)
            for key in ("memories", "ended")
            if key in content
        }
        return {
            **content,
            "weights": {name: part.to(device) for name, part in content["weights"].items()},
            **states,
        }

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return tuple(
            ModelCall(
                at=call["at"],
                inputs=map_tensors(
                    lambda tensor: tensor.to(device), self.shards[int(call["rank"])].rows.find(call)
                ),
                given_names=example_names(call),
                how=Circumstances.read(call.get("how", {})),
                gradient=call["gradient"].clone().to(device),
                backward=int(call.get("backward", -1)),
                signed=call.get("signed"),  # traces of before have none, and no shape
                shape=tuple(call.get("shape", ())),
                statistics=statistics_on(call, device),
            )
            for call in event["calls"]
        )

    def names_and_casts(self, event: Event) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        return (
            (example_names(call), Circumstances.read(call.get("how", {})).autocast)
            for call in event["calls"]
        )


def statistics_on(
    content: Mapping[str, Any], device: torch.device
) -> tuple[Weights, Weights] | None:
    """The running statistics before and after a stored call or step, where there are some."""
    stored = content.get("statistics")
    return (
        None
        if stored is None
        else tree_map_only(Tensor, lambda tensor: tensor.clone().to(device), tuple(stored))
    )


def example_names(call: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the examples of a stored call: those that were given, or the digests of its rows."""
    return tuple(
        call["names"] if "names" in call else (key.partition(" ")[0] for key in call["rows"])
    )
