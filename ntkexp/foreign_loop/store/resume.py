"""Where a trace goes on: at the step whose weights a loop begins with, if its folder holds one of the same training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule import Signatures, distance
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Damaged, Json, read_object
from ntkexp.records.folder import CONFIG, DONE
from ntkexp.shapes import Weights

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
    stored, wanted = (each.get("follow") for each in (read_object(path / CONFIG), config))
    if not isinstance(stored, dict) or not isinstance(wanted, dict):
        raise Mistake(f"to={path}: it holds a run that is no trace; give another folder")
    for key, value in wanted.items():
        if stored.get(key) != value:
            raise Mistake(f"to={path}: it holds another run, whose {key} is {stored.get(key)} and not {value}")
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
    signature = dict(Signatures().of(files.read(files.weights_at(0))["weights"]))
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


def drop_later(files: TraceFolder, place: PlaceInTrace) -> None:
    """Drop what was followed after a place: it was trained again, or will be."""
    (files.folder.path / DONE).unlink(missing_ok=True)
    files.ended.unlink(missing_ok=True)
    files.log.cut(place.events)
    for event in files.checkpoints:
        if event > place.events:
            files.weights_at(event).unlink(missing_ok=True)


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
