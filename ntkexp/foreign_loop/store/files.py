"""A trace on disk: its files in a run folder, tensors as bytes that run no code when they are read, and examples, each
once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from shutil import disk_usage
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.host_reads import to_host
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.tape import map_tensors, tensors
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.optimizer.base import IDLE
from ntkexp.records.atomic import WIDTH, Damaged, SealedLog, Sealing, being_sealed, is_held, seal
from ntkexp.records.atomic import sealed_for as is_sealed_for
from ntkexp.records.folder import CONFIG, LOCK, START_WEIGHTS, RunFolder
from ntkexp.shapes import Inputs, Weights

# --- The files of a trace, in its run folder:
#
#     config.json              what is followed: the model, its optimizers, the queries; the digest of the start
#                              weights, and a random identity that is drawn when the trace begins and stays when it
#                              goes on
#     trace/start.bin          the queries, and what the model holds besides the weights that move
#     trace/rows.log           the examples, each once
#     trace/steps.log          each step: calls, the gradients of their outputs, the settings of then, signatures
#     trace/weights/<n>.bin    the weights and the optimizers' states before event n, for some n
#     trace/asked.bin          what the model itself gave at the queries, at both ends
#     trace/ended.bin          that the loop came to its end
#     trace/sweep.bin          how far a sweep back for effects has come
#
# An event is a step of one optimizer; several of them may be one step. Everything is sealed for this trace. Where
# several processes train together, each after the first has rows, steps and an end of its own, in
# trace/rank-<r>/.


PLACE, START = "trace", "start.bin"


@dataclass(frozen=True)
class TraceFolder:
    """The files of a trace; of what each process writes by itself, those of the process of this `rank`."""

    folder: RunFolder
    rank: int = 0

    @property
    def path(self) -> Path:
        """Where the files lie that only a trace has."""
        return self.folder.path / PLACE

    @property
    def own(self) -> RunFolder:
        """What one process alone writes, and locks: the first the whole, any other its part."""
        return RunFolder(self.path / f"rank-{self.rank}") if self.rank else self.folder

    @property
    def shard(self) -> Path:
        """Where that lies which one process saw."""
        return self.own.path if self.rank else self.path

    @property
    def ended(self) -> Path:
        return self.shard / "ended.bin"

    @property
    def outputs_at_ends(self) -> Path:
        return self.path / "asked.bin"

    @property
    def sweep(self) -> Path:
        return self.path / "sweep.bin"

    def weights_at(self, event: int) -> Path:
        return self.path / "weights" / f"{event:08d}.bin"

    @property
    def checkpoints(self) -> list[int]:
        """The events before which there is one, whole or not."""
        return sorted(int(path.stem) for path in (self.path / "weights").glob("[0-9]*.bin"))

    @property
    def processes(self) -> int:
        """How many trained together."""
        return int(self.folder.config["follow"]["processes"])

    @cached_property
    def sealed_for(self) -> str:
        """What the files are sealed for: this trace."""
        return seal((self.folder.path / CONFIG).read_bytes()).hex()

    @cached_property
    def rows(self) -> ExampleLog:
        return ExampleLog(
            SealedLog.opened(self.shard / "rows.log", f"rows of {self.sealed_for} rank {self.rank}")
        )

    @cached_property
    def log(self) -> SealedLog:
        return SealedLog.opened(
            self.shard / "steps.log", f"steps of {self.sealed_for} rank {self.rank}"
        )

    def events(self) -> Iterator[dict[str, Any]]:
        return map(read, self.log.entries())

    def refuse_lost(self) -> None:
        """Refuse a trace that has come to its end, and has not as many entries as it had then."""
        if not self.ended.exists():
            return
        end = self.read(self.ended)
        for log, count in ((self.log, end["events"]), (self.rows.log, end["rows"])):
            if len(log) != count:
                raise Damaged(
                    f"{log.path} is damaged: {len(log)} of its {count} entries are left; follow the loop again"
                )

    def refuse_cut(self) -> None:
        """Raise if there are weights of a place behind the last entry, unless the loop still runs."""
        last = max(self.checkpoints, default=0)
        if last > len(self.log) and not is_held(self.folder.path / LOCK):
            raise Damaged(
                f"{self.log.path} is damaged: it has {len(self.log)} entries, and there are weights of a later place, "
                f"{last}; follow the loop again"
            )

    def refuse_other_start(self, weights: Weights) -> None:
        """Raise unless the trace began with these weights; earlier versions did not store with which it did."""
        digest = self.folder.config.get(START_WEIGHTS)
        if digest is not None and digest != weights_digest(weights):
            raise Damaged(
                f"{self.weights_at(0)} holds other weights than those with which the trace began; follow the loop again"
            )

    def forget(self) -> None:
        """Forget what was read of the folder, which holds something else by now."""
        for name in ("sealed_for", "rows", "log"):
            vars(self).pop(name, None)

    def write(self, path: Path, content: Mapping[str, object]) -> int:
        return self.write_parts(path, written(content))

    def write_parts(self, path: Path, parts: Sequence[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, whatever happens to the power; how many bytes it has."""
        size = sum(map(len, parts))
        free = disk_usage(self.folder.path).free
        try:
            if free < size:
                raise OSError(None, f"{size / 1e6:.3g} MB are needed, {free / 1e6:.3g} MB are free")
            with being_sealed(path, f"{path.name} of {self.sealed_for}") as file:
                for part in parts:
                    file.write(part)
        except OSError as error:
            raise NoPlace(
                f"{path} cannot be written ({error.strerror}); choose another place"
            ) from error
        return size + WIDTH

    def read(self, path: Path) -> Any:
        """The content of a file, which has to be as it was written."""
        if not self.whole(path):
            raise Damaged(
                f"{path} is missing, or not as it was written; follow the loop again, into another folder"
            )
        return read_file(path)

    def whole(self, path: Path) -> bool:
        """Whether a file is as it was written."""
        return path.is_file() and is_sealed_for(path, f"{path.name} of {self.sealed_for}")


# --- Tensors in lists, tuples and dicts as bytes, and back, without running any code on reading.
#
#     length of the head (8 bytes)   head: JSON, with the kind, shape and place of each tensor   the tensors' bytes


LENGTH, ALIGNED = 8, 16
SMALL = 1 << 14  # bytes, which are copied sooner than written by themselves
PLAIN = (bool, int, float, str, type(None))


def written(content: object) -> list[bytes | memoryview]:
    """The bytes of some content, in parts; those of large tensors are their own, until they are written to.

    >>> content = read(b"".join(written({"x": torch.ones(2), "more": (1, None, "text")})))
    >>> content["x"].tolist(), content["more"]
    ([1.0, 1.0], (1, None, 'text'))
    """
    met, size = list[Tensor](), 0  # the tensors, one behind another, and the bytes that they take

    def described(part: object) -> object:
        """The same with the place of every tensor in its stead."""
        nonlocal size
        if type(part) in PLAIN:  # most of it is, at every step of a user's training
            return part
        if isinstance(part, Tensor):
            place = size
            met.append(part.detach())
            size += part.nbytes + -part.nbytes % ALIGNED
            return {"tensor": [str(part.dtype).removeprefix("torch."), list(part.shape), place]}
        if isinstance(part, Mapping):
            return {"dict": [[described(key), described(value)] for key, value in part.items()]}
        if isinstance(part, list | tuple):
            return {type(part).__name__: [described(each) for each in part]}
        if not isinstance(part, PLAIN):
            raise Mistake(f"a {type(part).__name__} cannot be kept in a file; follow without to=")
        return part

    head = json.dumps(described(content)).encode()
    head += b" " * (-(LENGTH + len(head)) % ALIGNED)
    behind = list[bytes | memoryview]()
    for flat in (tensor.reshape(-1).contiguous() for tensor in to_host(met) if tensor.numel()):
        found = flat.view(torch.uint8).numpy().data
        behind.extend(
            [found if len(found) > SMALL else bytes(found), b"\0" * (-len(found) % ALIGNED)]
        )
    runs = groupby(
        [len(head).to_bytes(LENGTH, "little"), head, *behind], lambda part: len(part) > SMALL
    )
    return [part for large, run in runs for part in (run if large else [b"".join(run)])]


def weights_digest(weights: Weights) -> str:
    """Return the digest of all names, kinds and bits of some weights."""
    sealing = Sealing("start weights")
    for part in written(dict(sorted(weights.items()))):
        sealing.take(part)
    return sealing.digest.hex()


def read(content: bytes | memoryview) -> Any:
    """The content that these are the bytes of; its tensors lie in those bytes, and are not to be written to."""
    view = memoryview(content)
    view = memoryview(bytearray(view)) if view.readonly else view  # torch wants to be able to write
    length = int.from_bytes(view[:LENGTH], "little")
    behind = view[LENGTH + length :]

    def found(dtype: torch.dtype, shape: Sequence[int], place: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.frombuffer(behind, dtype=dtype, count=count, offset=place).reshape(shape)

    return restored(json.loads(bytes(view[LENGTH : LENGTH + length])), found)


def read_file(path: Path) -> Any:
    """The same of a file. Each tensor has memory of its own, which is free as soon as that tensor is not used: weights
    do not hold the optimizers' states that lie beside them."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        head = json.loads(file.read(length))

        def found(dtype: torch.dtype, shape: Sequence[int], place: int) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype)
            file.seek(LENGTH + length + place)
            file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return tensor

        return restored(head, found)


def restored(head: Any, found: Callable[[torch.dtype, Sequence[int], int], Tensor]) -> Any:
    """The content that a head describes; tensors are `found` by their numbers, shapes and places."""
    if not isinstance(head, dict):
        return head
    ((kind, parts),) = head.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, parts[0]), parts[1]
        return (
            found(dtype, shape, parts[2])
            if torch.Size(shape).numel()
            else torch.empty(shape, dtype=dtype)
        )
    if kind == "dict":
        return {restored(key, found): restored(value, found) for key, value in parts}
    several = [restored(part, found) for part in parts]
    return tuple(several) if kind == "tuple" else several


# --- Examples on disk, each once by what it holds, however often and in whatever batch the model is called with it.


@dataclass
class ExampleLog:
    """A log of batches of examples that had not been seen before, by their digests and the kinds of their tensors."""

    log: SealedLog

    @cached_property
    def entries(self) -> list[Any]:
        return [read(entry) for entry in self.log.entries()]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The entry and the row of every example."""
        keys = [(place, entry["keys"]) for place, entry in enumerate(self.entries)]
        return {key: (place, row) for place, here in keys for row, key in enumerate(here)}

    def add(self, digests: Sequence[str], inputs: Inputs) -> dict[str, object]:
        """Add those that are new; what an event holds of the inputs of a call."""
        kinds = row_kinds(inputs)
        keys = [f"{digest} {kinds}" for digest in digests]
        new = {key: row for row, key in enumerate(keys) if key not in self.places}
        if new:
            rows = torch.tensor(list(new.values()))
            chosen = [tensor[rows.to(tensor.device)] for tensor in tensors(inputs)]
            place = self.log.append(*written({"keys": list(new), "tensors": chosen}))
            self.places.update({key: (place, row) for row, key in enumerate(new)})
        return {"rows": keys, "form": map_tensors(lambda tensor: tensor[:0], inputs)}

    def find(self, call: Mapping[str, Any]) -> Inputs:
        """The inputs of a call, from what an event holds of it."""
        if lost := [key for key in call["rows"] if key not in self.places]:
            raise Damaged(
                f"{self.log.path} is damaged: {len(lost)} of the {len(call['rows'])} examples of a call are missing; "
                "follow the loop again"
            )
        places = [self.places[key] for key in call["rows"]]
        rows = [
            [tensor[row : row + 1] for tensor in self.entries[entry]["tensors"]]
            for entry, row in places
        ]
        found = iter([torch.cat(list(column)) for column in zip(*rows, strict=True)])
        return map_tensors(lambda _: next(found), call["form"])


def row_kinds(inputs: Inputs) -> str:
    """The kinds of the tensors of one example.

    >>> row_kinds({"x": torch.ones(2, 3), "mask": torch.ones(2)})
    'float32[3] float32[]'
    """
    return " ".join(
        f"{str(each.dtype).removeprefix('torch.')}{list(each.shape[1:])}"
        for each in tensors(inputs)
    )


# --- What is stored of a loop, wherever that is: an event for every step, and checkpoints before some of them.


Event: TypeAlias = Mapping[str, Any]
"""What is stored of a step of one optimizer; several may be one step."""


def event_of(
    step: FollowedStep,
    index: int,
    which: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    signed: Signed,
) -> dict[str, Any]:
    """What is stored, besides its calls, of a step that the `which`-th optimizer took, as the step `index` of the loop.

    Of the gradient and the weights after it signatures are enough, where calls give the gradient when they are
    replayed: where all were made at the weights of this very step. Gradients in it are those that the loop has.

    Gradients of vectors are stored as they are. They are small, and where the gradients of examples cancel, as in the
    last bias under a loss of differences, the remainder is rounding, which no replay elsewhere would reproduce.
    """
    with_grad = set(step.with_grad)
    replayable = all(call.at == index for call in step.calls)
    unheard = {
        name: part
        for name, part in step.gradient.items()
        if name not in with_grad and bool(part.any())
    }
    vectors = {
        name: step.gradient[name] for name in step.with_grad if step.gradient[name].dim() <= 1
    }
    named = ([names[id(weight)] for weight in each["params"]] for each in optimizer.param_groups)
    groups = [
        group for each in named if (group := [name for name in each if name in step.settings])
    ]
    return {
        "step": index,
        "optimizer": which,
        "groups": [{"names": group, "settings": dict(step.settings[group[0]])} for group in groups],
        "idle": [name for name, linear in step.linear.items() if linear is IDLE],
        "silent": sorted(step.without_grad),
        "gradient": {name: signed.gradient[name] for name in step.with_grad},
        "whole": unheard | vectors if replayable else step.gradient,
        "after": {name: signed.after[name] for name in step.linear},
        "rule_error": step.rule_error,
        "statistics": step.statistics,
    }


class StoredLoop(Protocol):
    """A loop as it is stored, from which its steps are replayed: its events, those of them that begin a step, and those
    that begin a step and have a checkpoint before them."""

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def firsts(self) -> Sequence[int]: ...

    @property
    def checkpoints(self) -> Sequence[int]: ...

    @property
    def outside(self) -> Outside: ...

    @property
    def processes(self) -> int: ...

    def refresh(self) -> None:
        """Read again, as events may have come."""

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        """The one before an event, if there is one."""

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]: ...

    def names_and_casts(self, event: Event) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        """The names of the examples of each of its calls, and the autocast in which it was made."""
