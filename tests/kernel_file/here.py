"""An engine without processes: what is done here is what a worker does, and any worker can be lost at any tile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ntkexp.engine.base import AbstractEngine, Ended, Event, Lost, Stepped, Task, Tell

Loses: TypeAlias = Callable[[int, int], bool]
"""Whether the worker of this task, counted over all, is lost after this tile of it; 0: before the first."""


def none_lost(task: int, tile: int) -> bool:
    """Every worker ends well."""
    return False


@dataclass
class Here(AbstractEngine):
    count: int
    threads: int = 1
    loses: Loses = none_lost
    tasks: int = 0

    @property
    def workers(self) -> int:
        return self.count

    def executor(self, tell: Tell) -> HereExecutor:
        return HereExecutor(self)


@dataclass
class HereExecutor(Executor):
    """What is submitted is done at once."""

    engine: Here

    def submit(self, fn: Callable[..., Any], /, task: Task) -> Future[Any]:  # type: ignore[override]  # tasks alone
        home, future = os.getcwd(), Future[Ended]()
        self.engine.tasks += 1
        if self.engine.loses(self.engine.tasks, 0):  # nobody hears of it again
            future.set_exception(Lost("its process was killed"))
        else:
            future.set_result(fn(replace(task, threads=self.engine.threads), self.heard))
        os.chdir(home)
        return future

    def heard(self, event: Event) -> None:
        """Lose the worker as soon as it has said how far it is."""
        if isinstance(event, Stepped) and self.engine.loses(self.engine.tasks, event.step):
            raise KeyboardInterrupt
