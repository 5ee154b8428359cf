"""Processes that train together (distributed data parallel).

Only the first process makes decisions, for example where a trace continues. The other
processes read its decisions. Each process stores a part of the trace (a shard). When
the trace is read, the shards are merged."""

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

# torch has no public access to the store
from torch.distributed.distributed_c10d import Store, _get_default_store

from ntkexp.foreign_loop.clipping import SUM_EPS
from ntkexp.foreign_loop.signatures import distance
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import is_held
from ntkexp.records.folder import LOCK, Held

LOG = logging.getLogger("ntkexp.follow")

# --- Decisions of the first process.
#
# The other processes read them from the key-value store of `torch.distributed`. A
# collective operation would be simpler, but would hang if a process does not call
# `follow`.


Decision: TypeAlias = dict[str, int]
# seconds that the other processes wait for the first one, which may have to read a long
# trace
PATIENCE = 300.0
DECISIONS: Counter[str] = Counter()
"""The number of decisions so far about each subject, in this process."""


@dataclass(frozen=True)
class Processes:
    """Process `rank` of `world` processes that train together."""

    rank: int = 0
    world: int = 1
    store: Store | None = None

    def decided(self, about: str, decide: Callable[[], Decision]) -> Decision:
        """Call `decide` in the first process only,
        and return its result in all processes.

        If `decide` raises `Mistake`, all processes raise.
        `about` is the subject of the decision.

        >>> Processes().decided("a walk", lambda: {"miles": 3})
        {'miles': 3}
        """
        if self.store is None:
            return decide()
        subject = f"{about} in {self.rank}"
        key = f"ntkexp/{DECISIONS[subject]}/{about}"
        DECISIONS[subject] += 1
        if self.rank == 0:
            try:
                decision = decide()
            except Mistake as error:
                self.store.set(key, json.dumps({"refused": str(error)}))
                raise
            self.store.set(key, json.dumps({"said": decision}))
            return decision
        try:
            self.store.wait([key], timedelta(seconds=PATIENCE))
            answer = json.loads(self.store.get(key))
        except RuntimeError as error:
            raise Mistake(
                f"rank {self.rank} follows into {about}, but rank 0 did not within "
                f"{PATIENCE:g} s; call ntkexp.follow in every process, with the same "
                "to="
            ) from error
        if "refused" in answer:
            raise Mistake(f"rank 0: {answer['refused']}")
        return Decision(answer["said"])


def current_processes() -> Processes:
    """Return the rank of this process, and the number of processes
    that train together."""
    if not (is_available() and is_initialized()) or get_world_size() == 1:
        return Processes()
    return Processes(get_rank(), get_world_size(), _get_default_store())


# --- Shards: the parts of the trace that each process stores.
#
#     gradient that the optimizer used = c Σ_ranks Σ_calls Jᵀℓ′
#
# DistributedDataParallel averages the gradients of the processes, so the factor is c =
# 1/world. Proof (a) accepts such a factor. A merged step has the calls of all ranks.
# The stored signatures show if all processes had the same weights.


UNTIL_ENDED = 60.0  # seconds to wait for the other processes after the first has ended
POLL_INTERVAL = 0.05  # seconds between checks whether a process has ended


def find_shards(files: TraceFolder) -> list[TraceFolder]:
    """Return the shards of all processes. Raise if one is missing
    or still being written."""
    shards = [TraceFolder(files.folder, rank) for rank in range(files.processes)]
    for shard in shards[1:]:
        if not (shard.shard / "steps.log").is_file():
            raise Mistake(
                f"{files.folder.path}: the part of rank {shard.rank} (of {len(shards)}) "
                "is missing, and no step can be explained without it; copy it here, or "
                "follow the loop again in every process, with the same to="
            )

        # if the first process has ended, wait until the process of this shard ends too
        until = time.monotonic() + UNTIL_ENDED
        while is_held(shard.own.path / LOCK) and not is_held(shard.folder.path / LOCK):
            if time.monotonic() > until:
                raise Held(
                    f"{shard.own.path} is being written by rank {shard.rank}; wait for it"
                )
            time.sleep(POLL_INTERVAL)
    return shards


def joined_events(shards: Sequence[TraceFolder]) -> list[dict[str, Any]]:
    """Return the events of the first process, with the calls of all processes."""
    events = [shard_events(shard) for shard in shards]
    refuse_other_length(shards, events)
    joined = list[dict[str, Any]]()
    for first, *others in zip(*events, strict=False):
        for rank, other in enumerate(others, 1):
            refuse_other_step(first, other, rank)
        calls = [call for event in (first, *others) for call in event["calls"]]
        joined.append({**first, "calls": calls})
    return joined


def shard_events(shard: TraceFolder) -> list[dict[str, Any]]:
    """Return the stored events of one process, with complete calls.

    An event (a step of one optimizer) stores only what has changed in a call since the
    previous event. Fill in the rest."""
    shard.refuse_lost()
    if shard.rank == 0:  # only the first process writes checkpoints
        shard.refuse_cut()
    known: dict[int, dict[str, Any]] = {}
    events = list[dict[str, Any]]()
    for event in shard.events():
        for call in event["calls"]:
            known[call["key"]] = {
                **known.get(call["key"], {}),
                **call,
                "rank": shard.rank,
            }
        events.append(
            {**event, "calls": [known[call["key"]] for call in event["calls"]]}
        )
    return events


def refuse_other_length(
    shards: Sequence[TraceFolder], events: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Raise if a process ended its loop after fewer steps than another process. If it
    was killed before the end, only warn that the trace is shorter."""
    steps = [shard[-1]["step"] + 1 if shard else 0 for shard in events]
    fewest = min(steps)
    most = max(steps)
    if fewest == most:
        return
    rank = steps.index(fewest)
    if shards[rank].ended.is_file():
        raise Mistake(
            f"step {fewest}: rank {rank} took no part in this and later steps, but "
            f"another rank took {most} steps; give every process as many batches "
            "(drop_last=True, or a sampler that fills up), without join()"
        )
    LOG.warning(
        "ntkexp: rank %d of the trace in %s was stopped after %d steps, and another after %d; "
        "the trace has %d",
        *(rank, shards[0].folder.path, fewest, most, fewest),
    )


def refuse_other_step(
    first: Mapping[str, Any], other: Mapping[str, Any], rank: int
) -> None:
    """Raise if a process took another step than the first process,
    or reached other weights."""
    step = first["step"]
    ours = first["after"]
    theirs = other["after"]
    same_step = step == other["step"] and first["optimizer"] == other["optimizer"]
    if not same_step or ours.keys() != theirs.keys():
        raise Mistake(
            f"step {step}: rank {rank} took another step than rank 0; let all processes take the "
            "same steps"
        )
    gaps = {name: distance({name: theirs[name]}, {name: ours[name]}) for name in ours}
    worst = max(gaps, key=lambda name: gaps[name], default="")
    if worst and not gaps[worst] <= SUM_EPS * torch.finfo(ours[worst].dtype).eps:
        raise Mistake(
            f"step {step}: after this step, the weights of rank {rank} differ from "
            f"those of rank 0: '{worst}' by {gaps[worst]:.2g} of its size; was the step "
            "taken under no_sync(), without DistributedDataParallel, or with other "
            "settings?"
        )


def refuse_absent(files: TraceFolder) -> None:
    """Raise if one of the processes that train together does
    not write to this folder."""
    for rank in range(1, files.processes):
        shard = TraceFolder(files.folder, rank)
        if not is_held(shard.own.path / LOCK) and not shard.ended.is_file():
            raise Mistake(
                f"rank {rank} of {files.processes} does not follow into "
                f"{files.folder.path}, so its examples would be missing; call "
                "ntkexp.follow in every process, with the same to="
            )
