"""Steps are kept as they happen, on disk or in memory: how often weights are written, by which thread, and where a
trace goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from shutil import disk_usage
from typing import Any

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.kept.loop import EventPlace, EventWriter, LoopInMemory, LoopOnDisk, event_of
from ntkexp.foreign_loop.kept.replay import ReplayedSteps, copies_of, ended, groups_of, memories_of
from ntkexp.foreign_loop.kept.shards import Together, refuse_absent
from ntkexp.foreign_loop.kept.trace_folder import START, TraceFolder, written
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signatures, Signed, distance
from ntkexp.foreign_loop.step import AbstractKeeper, AbstractSteps, FollowedStep, placed
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import Damaged, Json, read_object
from ntkexp.records.folder import CONFIG, DONE, RunFolder
from ntkexp.shapes import Weights

# --- How often weights are kept on disk: after every few steps, and more seldom when that takes more than its share.
#
# Whenever the share is used up, every second of the kept is dropped, and so the trace of a loop of any length
# fits.


SHARE, MOST = 0.25, 50e9  # of what is free on the disk, and in bytes
FIRST = 8  # steps: to seal and write all weights costs more time than a small step of training
IN_MEMORY = 3  # copies of the weights that a replayed step takes: itself, its gradient, scales of elements


@dataclass
class KeepingPlan:
    """Weights are kept after `every` steps, each time `size` bytes; `most` is the largest such number that memory is
    enough for when the steps between are replayed."""

    every: int
    fixed: bool
    most: int
    size: float
    share: float

    @classmethod
    def of(cls, every: int | None, weights: float, size: float, free: float, memory_gb: float) -> KeepingPlan:
        """The plan for weights of so many bytes, which take `size` with what is kept beside them.

        >>> KeepingPlan.of(None, 1e6, 3e6, free=1e9, memory_gb=0.03).most
        10
        """
        most = int(1e9 * memory_gb / (IN_MEMORY * weights)) if weights else 1
        return cls(every or max(1, min(FIRST, most)), every is not None, most, size, min(SHARE * free, MOST))

    def due(self, since: int) -> bool:
        """Whether weights are to be kept, so many steps after the last."""
        return since >= self.every

    def too_many(self, kept: int) -> bool:
        """Whether every second one is to be dropped, of so many."""
        return not self.fixed and 2 * self.every <= self.most and kept > 2 and kept * self.size > self.share


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


# --- Where a trace goes on: at the step whose weights a loop begins with, if its folder holds one of the same
# training.


SAME = 16  # eps: of sums that are taken in another order


@dataclass(frozen=True)
class PlaceInTrace:
    """So many events, and steps, lie before it."""

    events: int
    steps: int


def find_place(files: TraceFolder, config: Mapping[str, Json], here: Mapping[str, Tensor]) -> PlaceInTrace | None:
    """Where the weights with this signature are in the trace of a folder; nowhere, if it holds none."""
    path = files.folder.path
    if not (path / CONFIG).is_file():
        return None
    found, asked = (each.get("follow") for each in (read_object(path / CONFIG), config))
    if not isinstance(found, dict) or not isinstance(asked, dict):
        raise Mistake(f"to={path}: it holds a run that is no trace; give another folder")
    for key, value in asked.items():
        if found.get(key) != value:
            raise Mistake(f"to={path}: it holds another run, whose {key} is {found.get(key)} and not {value}")
    files.refuse_lost()
    if not len(files.log):
        refuse_later(files)
        return None
    files.read(files.path / START)
    first = Signatures().of(files.read(files.weights_at(0))["weights"])
    places = list(boundaries(files, first))
    missed = [distance(here, signature) for _, signature in places]
    best = min(range(len(missed)), key=lambda place: (missed[place], -place))
    eps = max(torch.finfo(part.dtype).eps for part in here.values())
    if not missed[best] <= SAME * eps:
        steps = places[-1][0].steps
        raise Mistake(
            f"to={path}: it holds another run: the weights are those of none of its {steps} steps; resume from a "
            "checkpoint of that run, or give another folder"
        )
    return places[best][0]


def refuse_later(files: TraceFolder) -> None:
    """Refuse to begin a trace anew where steps were kept before, of which the log has none."""
    if any(files.kept) or files.ended.exists():
        raise Damaged(
            f"{files.log.path} is damaged: it has no step, and weights of later ones are kept; give another folder"
        )


def boundaries(files: TraceFolder, first: Mapping[str, Tensor]) -> Iterator[tuple[PlaceInTrace, Mapping[str, Tensor]]]:
    """Every place before, between and after the steps, with the signature of the weights there."""
    signature, steps, number = dict(first), 0, 0
    for number, event in enumerate(files.events()):
        if event["step"] == steps:
            yield PlaceInTrace(number, steps), dict(signature)
            steps += 1
        signature |= event["after"]
    yield PlaceInTrace(len(files.log), steps), signature


def drop_later(files: TraceFolder, place: PlaceInTrace) -> None:
    """Drop what was followed after a place: it was trained again, or will be."""
    (files.folder.path / DONE).unlink(missing_ok=True)
    files.ended.unlink(missing_ok=True)
    files.log.cut(place.events)
    for event in files.kept:
        if event > place.events:
            files.drop_weights(event)


def join_at(files: TraceFolder, place: PlaceInTrace, weights: Weights) -> None:
    """Go on in one process with what the first one has begun, or goes on with, at this place."""
    if not files.weights_at(place.events).is_file():
        raise Mistake(
            f"rank {files.rank} does not see what rank 0 wrote into {files.folder.path}; give a folder "
            "that all processes share"
        )
    first = files.read(files.weights_at(place.events))["weights"]
    if other := next((name for name, weight in first.items() if not torch.equal(weight, weights[name].cpu())), None):
        raise Mistake(
            f"rank {files.rank} begins at other weights than rank 0 ('{other}' is otherwise); follow what is wrapped "
            "in DistributedDataParallel, which gives all processes those of the first"
        )
    if len(files.log) < place.events:
        raise Mistake(
            f"{files.own.path} of rank {files.rank} was broken off before step {place.steps}, at which rank 0 goes on; "
            "resume from an earlier checkpoint, or give another folder"
        )
    files.ended.unlink(missing_ok=True)
    files.log.cut(place.events)


def begin_anew(files: TraceFolder, config: Mapping[str, Json], start: Mapping[str, object]) -> None:
    """Begin a trace in a folder that holds none."""
    files.folder.clear()
    files.forget()
    (files.path / "weights").mkdir(parents=True)
    files.folder.write_json(CONFIG, config)
    files.write(files.path / START, start)


def kept_steps(files: TraceFolder) -> dict[int, int]:
    """The steps before which weights are kept, by event."""
    steps = [0, *(event["step"] + 1 for event in files.events())]
    return {event: steps[event] for event in files.kept}


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

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        kinds = [type(each).__name__ for each in self.optimizers]
        loop = LoopOnDisk(TraceFolder(self.files.folder))
        return ReplayedSteps(loop, module, self.output, kinds, same_kernels)

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


# --- Steps are kept in memory, as they are on disk: some of their weights, and what the steps between took in.


@dataclass
class KeeperInMemory(AbstractKeeper):
    """All steps are held, up to `memory_gb`."""

    output: str | int | None
    every: int | None
    memory_gb: float
    kept: LoopInMemory = field(default_factory=LoopInMemory)
    moved: frozenset[str] = frozenset()
    latest: Weights = field(default_factory=dict)
    since: int = 0  # the step before which weights were kept last
    waiting: set[int] = field(default_factory=set)  # the optimizers that have not moved since then

    @property
    def folder(self) -> RunFolder | None:
        return None

    @property
    def count(self) -> int:
        return len(self.kept.firsts)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        kinds = [type(each).__name__ for each in self.optimizers]
        return ReplayedSteps(self.kept, module, self.output, kinds, same_kernels)

    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers, self.names = optimizers, names
        self.moved = frozenset(weights)  # whatever comes next is a step of its own
        size = sum(weight.nbytes for weight in weights.values())
        self.plan = KeepingPlan.of(self.every, size, size, inf, self.memory_gb)
        self.keep(weights)

    def take(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        index, self.moved = placed(step, self.moved, self.count)
        taken = EventPlace(index, which, groups_of(self.optimizers[which], self.names))
        event = event_of(step, taken, signed)
        self.kept.put({**event, "calls": step.calls, "whole": cloned(event["whole"])})
        self.latest = after
        self.refuse_too_much(index)
        self.waiting.discard(which)
        if not self.waiting and self.plan.due(self.count - self.since):
            self.keep(after)

    def keep(self, weights: Weights) -> None:
        """Keep the weights, and what the optimizers remember."""
        self.kept.keep({"weights": cloned(weights), "memories": memories_of(self.optimizers, self.names)})
        self.since, self.waiting = self.count, set(range(len(self.optimizers)))

    def end(self, outside: Outside, *, whole: bool) -> None:
        self.kept.left = outside
        if self.latest:  # what the optimizers remember by now may be of a step that was refused
            self.kept.keep({"weights": cloned(self.latest), "memories": None, "ended": None})

    def refuse_too_much(self, index: int) -> None:
        """Refuse to hold more than was allowed."""
        if self.kept.held > 1e9 * self.memory_gb:
            raise Mistake(
                f"step {index}: the steps followed so far take more than memory_gb={self.memory_gb:g}, about "
                f"{self.kept.held / 1e6 / self.count:.3g} MB each; raise it, follow fewer, or give a folder, to=…"
            )


def cloned(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of some weights, or gradients."""
    return {name: weight.clone() for name, weight in weights.items()}
