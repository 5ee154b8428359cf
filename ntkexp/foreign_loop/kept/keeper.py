"""Steps are kept on disk as they happen: a killed training leaves all that were written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from shutil import disk_usage

import torch
from torch import nn

from ntkexp.foreign_loop.keeper import AbstractKeeper, placed
from ntkexp.foreign_loop.kept.behind import Behind
from ntkexp.foreign_loop.kept.content import written
from ntkexp.foreign_loop.kept.event import EventPlace, EventWriter
from ntkexp.foreign_loop.kept.loop_on_disk import LoopOnDisk
from ntkexp.foreign_loop.kept.memories import copies_of, groups_of, memories_of
from ntkexp.foreign_loop.kept.plan import KeepingPlan
from ntkexp.foreign_loop.kept.replay import ended
from ntkexp.foreign_loop.kept.replayed_steps import ReplayedSteps
from ntkexp.foreign_loop.kept.resume import PlaceInTrace, begin_anew, drop_later, find_place, join_at, kept_steps
from ntkexp.foreign_loop.kept.shards import refuse_absent
from ntkexp.foreign_loop.kept.signature import Signatures, Signed
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.foreign_loop.together import Together
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.shapes import Weights

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
