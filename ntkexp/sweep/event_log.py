"""journal.jsonl: what happened to runs under any sweep, a line an event, appended as it happens.

    {"at": "2026-01-31T12:00:00+00:00", "sweep": "width", "run": "mlp-w32-s0-…", "event": "done", "reason": "",
     "seal": of all this}

A run whose last event is `failed` is not begun again unasked. A line is written in one piece, so that several sweeps
may write at once; one that was cut off by a kill, or is not as it was written, is passed over: its run is tried again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ntkexp.records.atomic import make_folder
from ntkexp.records.seal import SEAL, seal

NAME = "journal.jsonl"


@dataclass(frozen=True)
class EventLog:
    """The log beside the records of all sweeps of a folder."""

    path: Path
    sweep: str

    def write(self, run: str, event: str, reason: str = "") -> None:
        """Append one event."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {"at": at, "sweep": self.sweep, "run": run, "event": event, "reason": reason}
        line = json.dumps(told | {SEAL: seal_of(told)})
        make_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            cut_off = size and os.pread(descriptor, 1, size - 1) != b"\n"  # by a full disk, or a kill
            os.write(descriptor, f"{chr(10) if cut_off else ''}{line}\n".encode())
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, str]]:
        """Every event that can be read."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        for line in filter(None, text.split("\n")):
            try:
                found = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                continue
            if found.pop(SEAL, None) == seal_of(found):
                yield found

    def failures(self) -> dict[str, str]:
        """The runs that failed when they were last heard of, with the reasons."""
        last = {str(event["run"]): event for event in self.events()}
        return {run: str(event["reason"]) for run, event in last.items() if event["event"] == "failed"}


def seal_of(told: dict[str, str]) -> str:
    """The seal of an event."""
    return seal(json.dumps(told).encode()).hex()
