"""The files of a trace in a run folder.

    config.json              the model, its optimizers and the queries; a digest of the weights at
                             the start; a random identity, which stays when the trace continues
    trace/start.bin          the queries, and the tensors of the model that no optimizer moves
    trace/rows.log           the examples, each stored once
    trace/steps.log          each step: calls, gradients of their outputs, settings, signatures
    trace/weights/<n>.bin    checkpoints: weights and optimizer states before some events n (an
                             event is a step of one optimizer)
    trace/asked.bin          fingerprints of the user's model's outputs at the queries, at both ends
    trace/ended.bin          the end of the loop
    trace/sweep.bin          the state of a backward sweep for leave-out effects

Each file ends with a seal, a digest of the file and of the trace to which it belongs.
If several processes train together, each process after the first has its own rows,
steps and end in trace/rank-<r>/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.host_reads import to_host
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.tape import map_tensors, tensors
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.optimizer.base import IDLE
from ntkexp.records.atomic import (
    WIDTH,
    Damaged,
    Sealing,
    being_sealed,
    is_held,
    seal,
    sealed_for as is_sealed_for,
)
from ntkexp.records.folder import CONFIG, LOCK, START_WEIGHTS, RunFolder
from ntkexp.records.sealed_log import SealedLog
from ntkexp.shapes import Inputs, Weights

TRACE = "trace"  # name of the subfolder that holds the files of a trace
START = "start.bin"


@dataclass(frozen=True)
class TraceFolder:
    """The files of a trace, as process `rank` writes them."""

    folder: RunFolder
    rank: int = 0

    @property
    def path(self) -> Path:
        """The subfolder for the files of a trace."""
        return self.folder.path / TRACE

    @property
    def own(self) -> RunFolder:
        """The folder that this process locks:
        the run folder for the first process, else `rank-<r>`."""
        return RunFolder(self.path / f"rank-{self.rank}") if self.rank else self.folder

    @property
    def shard(self) -> Path:
        """The folder with the examples and steps that this process writes."""
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
        """The indices of the events with a checkpoint file before them.
        The files may be damaged."""
        return sorted(
            int(path.stem) for path in (self.path / "weights").glob("[0-9]*.bin")
        )

    @property
    def processes(self) -> int:
        """The number of processes that train together."""
        return int(self.folder.config["follow"]["processes"])

    @cached_property
    def sealed_for(self) -> str:
        """The identity of this trace. The seals (digests) of all files include it."""
        return seal((self.folder.path / CONFIG).read_bytes()).hex()

    @cached_property
    def rows(self) -> ExampleLog:
        name = f"rows of {self.sealed_for} rank {self.rank}"
        return ExampleLog(SealedLog.read(self.shard / "rows.log", name))

    @cached_property
    def log(self) -> SealedLog:
        name = f"steps of {self.sealed_for} rank {self.rank}"
        return SealedLog.read(self.shard / "steps.log", name)

    def events(self) -> Iterator[dict[str, Any]]:
        return map(read, self.log.entries())

    def forget(self) -> None:
        """Drop cached content of the files, after they have changed."""
        for name in ("sealed_for", "rows", "log"):
            vars(self).pop(name, None)

    # --- Checks

    def refuse_lost(self) -> None:
        """Raise if a trace that has ended has fewer entries than it had at its end."""
        if not self.ended.exists():
            return
        end = self.read(self.ended)
        for log, count in ((self.log, end["events"]), (self.rows.log, end["rows"])):
            if len(log) != count:
                raise Damaged(
                    f"{log.path} is damaged: {len(log)} of its {count} entries are left; follow "
                    "the loop again"
                )

    def refuse_cut(self) -> None:
        """Raise if there is a checkpoint after the last stored event, and no process
        writes the trace any more. Then events were lost."""
        last = max(self.checkpoints, default=0)
        if last > len(self.log) and not is_held(self.folder.path / LOCK):
            raise Damaged(
                f"{self.log.path} is damaged: it has {len(self.log)} entries, but there "
                f"are weights after entry {last}; follow the loop again"
            )

    def refuse_other_start(self, weights: Weights) -> None:
        """Raise unless the trace began with these weights. Traces of earlier versions
        have no digest of the weights, and are not checked."""
        digest = self.folder.config.get(START_WEIGHTS)
        if digest is not None and digest != weights_digest(weights):
            raise Damaged(
                f"{self.weights_at(0)} does not hold the weights with which the trace "
                "began; follow the loop again"
            )

    # --- Files

    def write(self, path: Path, content: Mapping[str, object]) -> int:
        return self.write_parts(path, written(content))

    def write_parts(self, path: Path, parts: Sequence[bytes | memoryview]) -> int:
        """Write a file atomically, and return its size in bytes.
        Raise if the disk is too small."""
        size = sum(map(len, parts))
        free = disk_usage(self.folder.path).free
        try:
            if free < size:
                raise OSError(
                    None,
                    f"{size / 1e6:.3g} MB are needed, {free / 1e6:.3g} MB are free",
                )
            with being_sealed(path, f"{path.name} of {self.sealed_for}") as file:
                for part in parts:
                    file.write(part)
        except OSError as error:
            raise NoPlace(
                f"{path} cannot be written ({error.strerror}); choose another place"
            ) from error
        return size + WIDTH

    def read(self, path: Path) -> Any:
        """Return the content of a file. Raise if it is missing or damaged."""
        if not self.whole(path):
            raise Damaged(
                f"{path} is missing or damaged; follow the loop again, into another "
                "folder"
            )
        return read_file(path)

    def whole(self, path: Path) -> bool:
        """Return True if a file exists and ends with the digest of its content."""
        return path.is_file() and is_sealed_for(
            path, f"{path.name} of {self.sealed_for}"
        )


# --- Lists, tuples and dicts of tensors and plain values as bytes. Unlike with pickle,
# reading them runs no code.
#
#     length of the head (8 bytes)
#     head: JSON, with the dtype, shape and offset of each tensor
#     the tensors' bytes


LENGTH_BYTES = 8
# the lengths of the head and of each tensor are padded to multiples of this many bytes
ALIGNMENT = 16
PLAIN_TYPES = (bool, int, float, str, type(None))
CONTAINERS: Mapping[str, Callable[[list[Any]], Any]] = {"dict": dict, "tuple": tuple}
"""The container types that can be restored, by name.
All other containers become lists."""


def written(content: object) -> list[bytes | memoryview]:
    """Return content as a list of bytes. CPU tensors are not copied: the bytes share
    the memory of the tensors.

    >>> content = read(b"".join(written({"x": torch.ones(2), "more": (1, None, "text")})))
    >>> content["x"].tolist(), content["more"]
    ([1.0, 1.0], (1, None, 'text'))
    """
    found = list[Tensor]()
    size = 0  # size of the tensors so far, in bytes

    def described(part: object) -> object:
        """Replace every tensor by its dtype, shape and offset."""
        nonlocal size
        # the most frequent case comes first,
        # because this runs at every step of the training
        if type(part) in PLAIN_TYPES:
            return part
        if isinstance(part, Tensor):
            offset = size
            found.append(part.detach())
            size += part.nbytes + padding(part.nbytes)
            return {
                "tensor": [
                    str(part.dtype).removeprefix("torch."),
                    list(part.shape),
                    offset,
                ]
            }
        if isinstance(part, Mapping):
            return {
                "dict": [
                    [described(key), described(value)] for key, value in part.items()
                ]
            }
        if isinstance(part, list | tuple):
            return {type(part).__name__: [described(item) for item in part]}
        if not isinstance(part, PLAIN_TYPES):
            raise Mistake(
                f"a {type(part).__name__} cannot be stored in a file; follow "
                "without to="
            )
        return part

    head = json.dumps(described(content)).encode()
    head += b" " * padding(LENGTH_BYTES + len(head))
    parts: list[bytes | memoryview] = [len(head).to_bytes(LENGTH_BYTES, "little"), head]
    for tensor in to_host(found):
        data = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data
        parts += [data, b"\0" * padding(len(data))]
    return parts


def padding(size: int) -> int:
    """Return the number of bytes up to the next multiple of `ALIGNMENT`."""
    return -size % ALIGNMENT


def weights_digest(weights: Weights) -> str:
    """Return a digest of the names, dtypes and bits of weights."""
    sealing = Sealing("start weights")
    for part in written(dict(sorted(weights.items()))):
        sealing.update(part)
    return sealing.digest.hex()


def read(content: bytes | memoryview) -> Any:
    """Return the content that some bytes store. Do not write to its tensors, because
    they share memory with the bytes."""
    view = memoryview(content)
    # torch would warn that the memory is read-only
    view = memoryview(bytearray(view)) if view.readonly else view
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    data = view[LENGTH_BYTES + length :]

    def tensor_at(dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(
            shape
        )

    return restored(bytes(view[LENGTH_BYTES : LENGTH_BYTES + length]), tensor_at)


def read_file(path: Path) -> Any:
    """Return the content of a file. Each tensor has its own memory."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")

        def tensor_at(dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype)
            file.seek(LENGTH_BYTES + length + offset)
            file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return tensor

        return restored(file.read(length), tensor_at)


def restored(
    head: bytes, tensor_at: Callable[[torch.dtype, Sequence[int], int], Tensor]
) -> Any:
    """Return the content that a head (JSON) describes. The function `tensor_at` returns
    the tensor at an offset."""

    def part(described: dict[str, Any]) -> Any:
        """Return a tensor, or a container whose items were already restored."""
        ((kind, items),) = described.items()
        if kind == "tensor":
            name, shape, offset = items
            return tensor_at(getattr(torch, name), shape, offset)
        return CONTAINERS.get(kind, list)(items)

    return json.loads(head, object_hook=part)


# --- Examples on disk. Each example is stored once,
# even if the model is called with it repeatedly.


@dataclass
class ExampleLog:
    """A log of examples. The key of an example consists of its digest, and the dtypes
    and shapes of its tensors."""

    log: SealedLog

    @cached_property
    def entries(self) -> list[Any]:
        return [read(entry) for entry in self.log.entries()]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The position (entry, row) of each example in the log, by its key."""
        return {
            key: (entry, row)
            for entry, content in enumerate(self.entries)
            for row, key in enumerate(content["keys"])
        }

    def add(self, digests: Sequence[str], inputs: Inputs) -> dict[str, object]:
        """Add the examples of a call that are new.
        Return the stored form of the call's inputs."""
        kinds = row_kinds(inputs)
        keys = [f"{digest} {kinds}" for digest in digests]
        new = {key: row for row, key in enumerate(keys) if key not in self.places}
        if new:
            rows = torch.tensor(list(new.values()))
            chosen = [tensor[rows.to(tensor.device)] for tensor in tensors(inputs)]
            entry = self.log.append(*written({"keys": list(new), "tensors": chosen}))
            self.places.update({key: (entry, row) for row, key in enumerate(new)})
        return {"rows": keys, "form": map_tensors(lambda tensor: tensor[:0], inputs)}

    def find(self, call: Mapping[str, Any]) -> Inputs:
        """Return the inputs of a stored call."""
        lost = [key for key in call["rows"] if key not in self.places]
        if lost:
            raise Damaged(
                f"{self.log.path} is damaged: {len(lost)} of the {len(call['rows'])} examples of a "
                "call are missing; follow the loop again"
            )
        rows = list[list[Tensor]]()
        for key in call["rows"]:
            entry, row = self.places[key]
            rows.append(
                [tensor[row : row + 1] for tensor in self.entries[entry]["tensors"]]
            )
        columns = iter([torch.cat(list(column)) for column in zip(*rows, strict=True)])
        return map_tensors(lambda _: next(columns), call["form"])


def row_kinds(inputs: Inputs) -> str:
    """Return the dtypes and shapes of the tensors of one example.

    >>> row_kinds({"x": torch.ones(2, 3), "mask": torch.ones(2)})
    'float32[3] float32[]'
    """
    return " ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
        for tensor in tensors(inputs)
    )


# --- Events, the form in which steps are stored in memory and on disk.


Event: TypeAlias = Mapping[str, Any]
"""A stored step of one optimizer. If several optimizers step together, their events
have the same step index."""


def event_of(
    step: FollowedStep,
    index: int,
    which: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    signed: Signed,
) -> dict[str, Any]:
    """Return the stored form of step `index` of optimizer number `which`,
    without its calls.

    If calls were made at other weights than those of this step, all gradients are
    stored in full. Otherwise a replay can recompute them, and the gradient of a matrix
    is stored only as a signature (random projection). Gradients of vectors, such as
    biases, are small and still stored in full. They may be only rounding errors, which
    another machine does not reproduce. An example is the last bias if the loss depends
    only on differences of outputs.

    The gradients are not copied.
    """
    replayable = all(call.at == index for call in step.calls)
    with_grad = set(step.with_grad)
    whole = step.gradient
    if replayable:
        vectors = {
            name: step.gradient[name]
            for name in step.with_grad
            if step.gradient[name].dim() <= 1
        }
        not_received = {
            name: part
            for name, part in step.gradient.items()
            if name not in with_grad and bool(part.any())
        }
        whole = not_received | vectors
    groups = list[dict[str, Any]]()
    for group in optimizer.param_groups:
        members = [names.get(id(weight), "") for weight in group["params"]]
        members = [name for name in members if name in step.settings]
        if members:
            stored = {"names": members, "settings": dict(step.settings[members[0]])}
            if members[0] in step.settings_before:
                stored["before"] = dict(step.settings_before[members[0]])
            groups.append(stored)
    return {
        "step": index,
        "optimizer": which,
        "groups": groups,
        "idle": [name for name, linear in step.linear.items() if linear is IDLE],
        "silent": sorted(step.without_grad),
        "gradient": {name: signed.gradient[name] for name in step.with_grad},
        "whole": whole,
        "after": {name: signed.after[name] for name in step.linear},
        "rule_error": step.rule_error,
        "square_outside": step.square_outside,
        "admitted": step.admitted,
        "statistics": step.statistics,
    }


class StoredLoop(Protocol):
    """The interface of a stored loop: its events and checkpoints."""

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def firsts(self) -> Sequence[int]:
        """The indices of the events that begin a new step."""

    @property
    def checkpoints(self) -> Sequence[int]:
        """The indices of the events that begin a new step and have
        a checkpoint before them."""

    @property
    def outside(self) -> Outside: ...

    @property
    def processes(self) -> int: ...

    def refresh(self) -> None:
        """Reread the store, because a running loop may have added events."""

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        """Return the checkpoint before an event, or None if there is none."""

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]: ...

    def names_and_casts(
        self, event: Event
    ) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        """Yield the names of the examples and the autocast context of each call."""
