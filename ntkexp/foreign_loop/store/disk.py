"""Steps are kept as they happen, on disk or in memory: how often weights are written, by which thread, and where a
trace goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from shutil import disk_usage
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ntkexp.foreign_loop.calls import Autocast, Circumstances, ModelCall
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signatures, Signed
from ntkexp.foreign_loop.step import AbstractKeeper, AbstractSteps, FollowedStep, placed
from ntkexp.foreign_loop.store.events import AbstractKeptLoop, Event, EventPlace, event_of, names_of_kept, read_calls
from ntkexp.foreign_loop.store.files import TraceFolder, written
from ntkexp.foreign_loop.store.replay import KeepingPlan, ReplayedSteps, copies_of, ended, groups_of, memories_of
from ntkexp.foreign_loop.store.resume import PlaceInTrace, begin_anew, drop_later, find_place, join_at, kept_steps
from ntkexp.foreign_loop.store.shards import Shards, Together, refuse_absent
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import Damaged, Json
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Inputs, Weights


@dataclass
class KnownCall:
    """A call that was kept, and the gradient that was kept of it."""

    key: int
    inputs: Inputs
    gradient: Tensor | None = None


@dataclass
class EventWriter:
    """Makes plain content of steps; a call and its gradient are part of the first step that uses them."""

    files: TraceFolder
    known: dict[int, KnownCall] = field(default_factory=dict)
    calls: int = 0

    def event(self, step: FollowedStep, taken: EventPlace, signed: Signed) -> dict[str, object]:
        """What is to be kept of a step."""
        used = [self.call(call) for call in step.calls]
        self.known = {id(call.inputs): self.known[id(call.inputs)] for call in step.calls}
        return {**event_of(step, taken, signed), "calls": used}

    def call(self, call: ModelCall) -> dict[str, object]:
        """What is to be kept of a call that is not kept already."""
        found = self.known.get(id(call.inputs))
        kept: dict[str, object] = {}
        if found is None:
            found = self.known[id(call.inputs)] = KnownCall(self.calls, call.inputs)
            self.calls += 1
            named = {} if call.called is None else {"names": list(call.called)}
            rows = self.files.rows.keep(digests(call.inputs), call.inputs)
            kept = {"at": call.at, "how": call.how.kept, "signed": call.signed, **rows, **named}
        if call.gradient is not found.gradient:
            found.gradient = call.gradient
            kept["gradient"] = call.gradient
        return {"key": found.key, **kept}


# --- What is kept of a loop in the folder of its trace.


@dataclass(frozen=True)
class LoopOnDisk(AbstractKeptLoop):
    """All that stood there when it was last looked at."""

    files: TraceFolder

    @cached_property
    def shards(self) -> Shards:
        """What each process wrote."""
        return Shards(self.files)

    def refresh(self) -> None:
        self.files.forget()
        for name in ("shards", "events", "firsts", "borders"):
            vars(self).pop(name, None)

    @property
    def processes(self) -> int:
        return self.files.processes

    @property
    def outside(self) -> Outside:
        if not self.files.ended.exists():
            return Outside()
        found = self.files.read(self.files.ended)
        return Outside(tuple(found["names"]), found["tensors"])

    @cached_property
    def events(self) -> Sequence[Event]:  # each with all that was kept of its calls
        return self.shards.events()

    @cached_property
    def firsts(self) -> list[int]:
        steps = [event["step"] for event in self.events]
        return [place for place, step in enumerate(steps) if place == 0 or steps[place - 1] < step]

    @cached_property
    def borders(self) -> list[int]:
        begin = set(self.firsts)
        found = [event for event in self.files.kept if event in begin]
        if found[:1] != self.firsts[:1]:
            raise Damaged(f"{self.files.path} is damaged: its first weights are missing; follow anew")
        return found

    def weights(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        if event not in self.files.kept:
            return None
        found = self.files.read(self.files.weights_at(event))
        return dict(tree_map_only(Tensor, lambda tensor: tensor.to(device), found))

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return read_calls(event, self.shards.find, lambda tensor: tensor.to(device))

    def names(self, event: Event) -> Iterator[str]:
        return (name for call in event["calls"] for name in names_of_kept(call))

    def autocasts(self, event: Event) -> Iterator[Autocast | None]:
        return (Circumstances.read(call.get("how", {})).autocast for call in event["calls"])


# --- What need not be on disk before a step ends is written by a thread, while the loop goes on: one file at a time.
#
# A kill may leave the latest of these files out, and no half of it. A write that failed is told at the next step.


@dataclass
class Behind:
    """Writes one thing at a time.

    >>> behind, done = Behind(), []
    >>> for number in range(3):
    ...     behind.do(lambda number=number: done.append(number))
    >>> behind.wait()
    >>> done
    [0, 1, 2]
    """

    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ntkexp-follow"))
    pending: Future[object] | None = None

    def do(self, write: Callable[[], object]) -> None:
        """Begin a write, once the one before is done."""
        self.wait()
        self.pending = self.thread.submit(write)

    def wait(self) -> None:
        """Wait for the write that is under way; raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def look(self) -> None:
        """Raise what a write raised that is done by now."""
        if self.pending is not None and self.pending.done():
            self.wait()


# --- Steps are kept on disk as they happen: a killed training leaves all that were written.


LOG = logging.getLogger("ntkexp.follow")


@dataclass
class KeeperOnDisk(AbstractKeeper):
    """Writes a trace; `config` says what is followed, `start` what is kept of it once. Where several processes train
    together, each writes what it sees, and the first also the weights, which are those of all."""

    files: TraceFolder
    together: Together
    config: Mapping[str, Json]
    start: Mapping[str, object]
    events: EventWriter
    output: str | int | None
    every: int | None
    memory_gb: float
    plan: KeepingPlan = field(init=False)
    moved: frozenset[str] = frozenset()
    steps: int = 0
    told: bool = False
    claim: ExitStack = field(default_factory=ExitStack)
    behind: Behind = field(default_factory=Behind)
    kept: dict[int, int] = field(default_factory=dict)  # the steps before which weights are kept, by event
    waiting: set[int] = field(default_factory=set)  # the optimizers that have not moved since weights were kept

    def steps_of(self, module: nn.Module) -> AbstractSteps:
        kinds = [type(each).__name__ for each in self.optimizers]
        return ReplayedSteps(LoopOnDisk(TraceFolder(self.files.folder)), module, self.output, kinds)

    @property
    def folder(self) -> RunFolder:
        return self.files.folder

    @property
    def count(self) -> int:
        return self.steps

    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers, self.names, self.latest = optimizers, names, weights
        self.moved = frozenset(weights)  # whatever comes next is a step of its own
        place = PlaceInTrace(**self.together.decided(str(self.files.folder.path.resolve()), self.opened))
        self.steps = place.steps
        if self.together.rank:
            self.claim.enter_context(self.files.own.claim())
            join_at(self.files, place, weights)
        self.events.calls = sum(len(event["calls"]) for event in self.files.events())

    def opened(self) -> dict[str, int]:
        """Begin the trace, or go on with it, at the latest weights; what lies before."""
        self.claim.enter_context(self.files.own.claim())
        here = Signatures().of(self.latest)
        place = find_place(self.files, self.config, here)
        if place is None:
            begin_anew(self.files, self.config, self.start)
        else:
            drop_later(self.files, place)
            self.steps = place.steps
            LOG.warning("ntkexp: the trace in %s goes on at step %d", self.files.folder.path, self.steps)
        self.kept = kept_steps(self.files)
        self.plan = self.planned(self.latest)
        self.keep(self.latest, self.ended(place))
        self.behind.wait()  # a trace begins with these
        return {"events": len(self.files.log), "steps": self.steps}

    def ended(self, place: PlaceInTrace | None) -> dict[str, object]:
        """What the optimizers remembered where a loop is resumed, if that was kept."""
        if place is None or not place.events:
            return {}
        path = self.files.weights_at(place.events)
        return {"ended": ended(self.files.read(path)) if self.files.whole(path) else None}

    def planned(self, weights: Weights) -> KeepingPlan:
        """How often weights are kept."""
        size = sum(part.nbytes for part in weights.values())
        free = disk_usage(self.files.path).free
        copies = 1 + max(copies_of(optimizer) for optimizer in self.optimizers)
        plan = KeepingPlan.of(self.every, size, copies * size, free, self.memory_gb)
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

    def take(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        self.behind.look()
        index, self.moved = placed(step, self.moved, self.steps)
        taken = EventPlace(index, which, groups_of(self.optimizers[which], self.names))
        entry = written(self.events.event(step, taken, signed))
        if not self.told and not self.together.rank:
            refuse_absent(self.files)
            self.tell(after, sum(map(len, entry)))
        self.files.log.append(*entry)
        self.steps, self.latest = index + 1, after
        self.waiting.discard(which)
        if not self.together.rank and not self.waiting and self.plan.due(self.steps - max(self.kept.values())):
            self.keep(after)

    def tell(self, weights: Weights, entry: int) -> None:
        """Say how large the trace grows, before it does."""
        self.told = True
        numbers = sum(part.numel() for part in weights.values())
        each = self.plan.size / numbers
        often = f"after every {self.plan.every} steps{'' if self.plan.fixed else ', or as seldom as fits,'}"
        disk = disk_usage(self.files.path).free
        by = f" in each of {self.together.world} processes" if self.together.world > 1 else ""
        limit = "" if self.plan.fixed else f"up to {self.plan.share / 1e9:.3g} GB of "
        LOG.warning(  # nobody who has not asked for a log would see anything less
            "ntkexp: the trace in %s takes %.3g MB a step%s, and new examples, and %s %.3g bytes per parameter, "
            "%.3g MB; %s%.3g GB are free",
            *(self.files.folder.path, entry / 1e6, by, often, each, self.plan.size / 1e6, limit, disk / 1e9),
        )

    def keep(self, weights: Weights, more: Mapping[str, object] | None = None) -> None:
        """Keep the weights, and what the optimizers remember."""
        copies = {name: weight.clone() for name, weight in weights.items()}  # a thread writes them
        self.write({"weights": copies, "memories": memories_of(self.optimizers, self.names), **(more or {})})
        self.waiting = set(range(len(self.optimizers)))
        if self.plan.too_many(len(self.kept)):
            self.plan.every *= 2
            self.behind.wait()
            for dropped in sorted(self.kept)[1::2]:
                self.files.drop_weights(dropped)
                del self.kept[dropped]

    def write(self, content: Mapping[str, object]) -> None:
        """Write what is kept after the latest event, which nothing writes to any more."""
        event, parts = len(self.files.log), written(content)
        self.behind.do(partial(self.files.write_parts, self.files.weights_at(event), parts))
        self.plan.size, self.kept[event] = max(self.plan.size, sum(map(len, parts))), self.steps

    def end(self, outside: Outside, *, whole: bool) -> None:
        """Keep the last weights; what the optimizers remember by now may be of a step that was refused."""
        with self.claim, suppress(NoPlace), self.behind.thread:  # steps that are on disk are of use without
            self.behind.wait()
            if self.steps and not self.together.rank and len(self.files.log) not in self.kept:
                self.write({"weights": self.latest, "memories": None, "ended": None})
                self.behind.wait()
            if whole:
                self.files.log.secure()
                self.files.rows.log.secure()  # before it is said how many entries there are
                self.files.write(self.files.ended, self.content_of_end(outside))

    def content_of_end(self, outside: Outside) -> dict[str, object]:
        """What a trace that has come to its end says: how much there is of it, and what changed after its last step."""
        changed = {"names": outside.names, "tensors": {} if self.together.rank else outside.tensors}
        return {"steps": self.steps, "events": len(self.files.log), "rows": len(self.files.rows.log), **changed}
