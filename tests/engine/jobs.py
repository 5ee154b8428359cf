"""Jobs of the tests of engines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from ntkexp.engine.base import AbstractJob, Ending, ReportEvent


@dataclass(frozen=True)
class Waiting(AbstractJob):
    """A job that waits for an interrupt."""

    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        time.sleep(600)
        return "done"


@dataclass(frozen=True)
class Loading(Waiting):
    """A job whose modules take long to load."""

    loads: ClassVar[tuple[str, ...]] = ("tests.engine.loading",)
