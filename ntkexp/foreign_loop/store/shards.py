"""Processes that train together (distributed data parallel): which this is, and what each of them stored, joined."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed import get_rank, get_world_size, is_available, is_initialized
from torch.distributed.distributed_c10d import (
    Store,  # there is no public way to the store
    _get_default_store,  # there is no public way to the store
)

from ntkexp.foreign_loop.clipping import SUM_EPS
from ntkexp.foreign_loop.rule import distance
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import is_held
from ntkexp.records.folder import LOCK, Held

# --- Processes that train together, each with a part of every batch: which of them this is, and what the first decides.
#
# The others read its decision from the store through which `torch.distributed` found them; that no collective is needed
# for it keeps a process that does not follow from stopping those that do.


Decision: TypeAlias = dict[str, int]
PATIENCE = 300.0  # seconds: the first may have a long trace to read before it goes on with it
DECISIONS: Counter[str] = Counter()
"""How often this process was part of what is decided about something."""


@dataclass(frozen=True)
class Processes:
    """The process of this `rank`, one of `world`."""

    rank: int = 0
    world: int = 1
    store: Store | None = None

    def decided(self, about: str, decide: Callable[[], Decision]) -> Decision:
        """What the first process decides; what is refused there, is refused in all.

        >>> Processes().decided("a walk", lambda: {"miles": 3})
        {'miles': 3}
        """
        if self.store is None:
            return decide()
        here = f"{about} in {self.rank}"
        key, DECISIONS[here] = f"ntkexp/{DECISIONS[here]}/{about}", DECISIONS[here] + 1
        if not self.rank:
            try:
                decision = decide()
            except Mistake as error:
                self.store.set(key, json.dumps({"refused": str(error)}))
                raise
            self.store.set(key, json.dumps({"said": decision}))
            return decision
        try:
            self.store.wait([key], timedelta(seconds=PATIENCE))
            found = json.loads(self.store.get(key))
        except RuntimeError as error:
            raise Mistake(
                f"rank {self.rank} follows into {about}, and rank 0 did not within {PATIENCE:g} s; call ntkexp.follow "
                "in every process, with the same to="
            ) from error
        if "refused" in found:
            raise Mistake(f"rank 0: {found['refused']}")
        return Decision(found["said"])


def current_processes() -> Processes:
    """Those among which this process is."""
    if not (is_available() and is_initialized()) or get_world_size() == 1:
        return Processes()
    return Processes(get_rank(), get_world_size(), _get_default_store())


# --- Shards: what each of the processes stored that trained together, joined to one trace.
#
#     consumed gradient = c Σ_ranks Σ_calls Jᵀℓ′        c = 1/world where gradients are averaged: found, as for
#                                                       clipping
#
# The calls of a step are those of all ranks. That all had the same weights is seen in the signatures that each took.


LOG = logging.getLogger("ntkexp.follow")
UNTIL_ENDED, PAUSE = 60.0, 0.05  # seconds: other processes end when the first does, or soon


def find_shards(files: TraceFolder) -> list[TraceFolder]:
    """One for every process, if all are there and complete."""
    found = [TraceFolder(files.folder, rank) for rank in range(files.processes)]
    for shard in found[1:]:
        if not (shard.shard / "steps.log").is_file():
            raise Mistake(
                f"{files.folder.path}: rank {shard.rank} of {len(found)} left no part of its trace, without which no "
                "step is explained; bring it here, or follow the loop again in every process, with the same to="
            )

        # wait until a process has ended, if the first one has
        until = time.monotonic() + UNTIL_ENDED
        while is_held(shard.own.path / LOCK) and not is_held(shard.folder.path / LOCK):
            if time.monotonic() > until:
                raise Held(f"{shard.own.path} is being written by rank {shard.rank}; wait for it")
            time.sleep(PAUSE)
    return found


def joined_events(shards: Sequence[TraceFolder]) -> list[dict[str, Any]]:
    """Each event that all have stored: that of the first process, with the calls of all."""
    # the events of each process, each with all that was stored of its calls, there or earlier
    found = list[list[dict[str, Any]]]()
    for shard in shards:
        known: dict[int, dict[str, Any]] = {}
        shard.refuse_lost()
        if not shard.rank:  # which writes the weights of all
            shard.refuse_cut()
        found.append([])
        for event in shard.events():
            for call in event["calls"]:
                known[call["key"]] = {**known.get(call["key"], {}), **call, "rank": shard.rank}
            found[-1].append({**event, "calls": [known[call["key"]] for call in event["calls"]]})

    # a process that was killed takes later steps of others with it; one that has ended before is refused
    steps = [events[-1]["step"] + 1 if events else 0 for events in found]
    few, many = min(steps), max(steps)
    if few < many:
        rank = steps.index(few)
        if shards[rank].ended.is_file():
            raise Mistake(
                f"step {few}: rank {rank} took no part in it, nor in later ones, and another took {many} steps; "
                "give every process as many batches (drop_last=True, or a sampler that fills up), without join()"
            )
        LOG.warning(
            "ntkexp: rank %d of the trace in %s was stopped after %d steps, and another after %d; the trace has %d",
            *(rank, shards[0].folder.path, few, many, few),
        )

    joined = list[dict[str, Any]]()
    for first, *others in zip(*found, strict=False):
        for rank, other in enumerate(others, 1):
            refuse_other_step(first, other, rank)
        joined.append(
            {**first, "calls": [call for event in (first, *others) for call in event["calls"]]}
        )
    return joined


def refuse_other_step(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Refuse a process that went to other weights than the first."""
    ours, theirs, step = first["after"], other["after"], first["step"]
    taken = (
        all(first[key] == other[key] for key in ("step", "optimizer"))
        and ours.keys() == theirs.keys()
    )
    if not taken:
        raise Mistake(
            f"step {step}: rank {rank} took another step than rank 0; let all processes take the same steps"
        )
    missed = {name: distance({name: theirs[name]}, {name: ours[name]}) for name in ours}
    worst = max(missed, key=lambda name: missed[name], default="")
    if worst and not missed[worst] <= SUM_EPS * torch.finfo(ours[worst].dtype).eps:
        raise Mistake(
            f"step {step}: it led rank {rank} to weights other than rank 0's: '{worst}' is off by "
            f"{missed[worst]:.2g} of "
            "itself; was it taken under no_sync(), without DistributedDataParallel, or by other settings?"
        )


def refuse_absent(files: TraceFolder) -> None:
    """Refuse a first step in which a process took part that does not follow it: gradients of all have met by then."""
    for rank in range(1, files.processes):
        shard = TraceFolder(files.folder, rank)
        if not is_held(shard.own.path / LOCK) and not shard.ended.is_file():
            raise Mistake(
                f"rank {rank} of {files.processes} does not follow into {files.folder.path}, and its examples would be "
                "missing; call ntkexp.follow in every process, with the same to="
            )
