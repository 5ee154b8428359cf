"""Steps are kept as they happen, on disk or in memory: how often weights are written, by which thread, and where a
trace goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule import Signatures, distance
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Damaged, Json, read_object
from ntkexp.records.folder import CONFIG, DONE
from ntkexp.shapes import Weights

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
