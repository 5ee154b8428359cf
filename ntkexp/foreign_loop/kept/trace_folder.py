"""What a trace is on disk, in its run folder:

    config.json              what is followed: the model, its optimizers, the queries
    trace/start.bin          the queries, and what the model holds besides the weights that move
    trace/rows.log           the examples, each once
    trace/steps.log          each step: calls, the gradients of their outputs, the settings of then, signatures
    trace/weights/<n>.bin    the weights and the optimizers' states before event n, for some n
    trace/asked.bin          what the model itself gave at the queries, at both ends
    trace/ended.bin          that the loop came to its end
    trace/sweep.bin          how far a sweep back for effects has come

An event is a step of one optimizer; several of them may be one step. Everything is sealed for this trace. Where several
processes train together, each after the first has rows, steps and an end of its own, in trace/rank-<r>/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from typing import Any

from ntkexp.foreign_loop.kept.content import read, written
from ntkexp.foreign_loop.kept.rows import KeptRows
from ntkexp.mistake import NoPlace
from ntkexp.records.folder import CONFIG, RunFolder
from ntkexp.records.json_file import read_object
from ntkexp.records.seal import WIDTH, Damaged, being_sealed, seal, sealed_for
from ntkexp.records.sealed_log import SealedLog

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
        """The file that says that the loop came to its end in this process."""
        return self.shard / "ended.bin"

    @property
    def processes(self) -> int:
        """How many trained together."""
        return int(read_object(self.folder.path / CONFIG)["follow"]["processes"])

    @cached_property
    def of(self) -> str:
        """What the files are sealed for."""
        return seal((self.folder.path / CONFIG).read_bytes()).hex()

    @property
    def whose(self) -> str:
        """What the files of one process are sealed for."""
        return f"{self.of} rank {self.rank}"

    @cached_property
    def rows(self) -> KeptRows:
        """The examples."""
        return KeptRows(SealedLog.opened(self.shard / "rows.log", f"rows of {self.whose}"))

    @cached_property
    def log(self) -> SealedLog:
        """The events."""
        return SealedLog.opened(self.shard / "steps.log", f"steps of {self.whose}")

    def refuse_lost(self) -> None:
        """Refuse a trace that has come to its end, and has not as many entries as it had then."""
        if not self.ended.exists():
            return
        kept = self.read(self.ended)
        for log, count in ((self.log, kept["events"]), (self.rows.log, kept["rows"])):
            if len(log) != count:
                raise Damaged(f"{log.path} is damaged: {len(log)} of its {count} entries are left; follow anew")

    def forget(self) -> None:
        """What was read of the folder is no longer there."""
        for name in ("of", "rows", "log"):
            vars(self).pop(name, None)

    def events(self) -> Iterator[dict[str, Any]]:
        """What is known of each event."""
        return map(read, self.log.entries())

    def weights_at(self, event: int) -> Path:
        """The file of the weights before an event."""
        return self.path / "weights" / f"{event:08d}.bin"

    @property
    def kept(self) -> list[int]:
        """The events before which weights are kept, whole or not."""
        return sorted(int(path.stem) for path in (self.path / "weights").glob("[0-9]*.bin"))

    @property
    def asked(self) -> Path:
        """The file of what the model itself gave at the queries."""
        return self.path / "asked.bin"

    @property
    def sweep(self) -> Path:
        """The file of a sweep that is under way."""
        return self.path / "sweep.bin"

    def drop_weights(self, event: int) -> None:
        """Keep these weights no more."""
        self.weights_at(event).unlink(missing_ok=True)

    def write(self, path: Path, content: Mapping[str, object]) -> int:
        """Write a file, whole or not at all, whatever happens to the power; how many bytes it has."""
        return self.write_parts(path, written(content))

    def write_parts(self, path: Path, parts: Sequence[bytes | memoryview]) -> int:
        """Write a file of these parts; how many bytes it has."""
        size = sum(map(len, parts))
        free = disk_usage(self.folder.path).free
        try:
            if free < size:
                raise OSError(None, f"{size / 1e6:.3g} MB are asked for, {free / 1e6:.3g} MB are free")
            with being_sealed(path, self.of_file(path)) as file:
                for part in parts:
                    file.write(part)
        except OSError as error:
            raise NoPlace(f"{path} cannot be written ({error.strerror}); choose another place") from error
        return size + WIDTH

    def read(self, path: Path) -> Any:
        """What a file holds, which has to be as it was written."""
        if not self.whole(path):
            raise Damaged(f"{path} is missing, or not as it was written; follow anew, into another folder")
        return read(path.read_bytes()[:-WIDTH])

    def whole(self, path: Path) -> bool:
        """Whether a file is as it was written."""
        return path.is_file() and sealed_for(path, self.of_file(path))

    def of_file(self, path: Path) -> str:
        """What a file is sealed for."""
        return f"{path.name} of {self.of}"
