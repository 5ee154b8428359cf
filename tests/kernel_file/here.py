"""An engine without processes: what is done here is what a worker does, and any worker can be lost at any tile."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from ntkexp.engine.base import AbstractEngine, Began, Ended, Event, Stepped, Task, work

Loses: TypeAlias = Callable[[int, int], bool]
"""Whether the worker of this task, counted over all, is lost after this tile of it; 0: before the first."""


def none_lost(task: int, tile: int) -> bool:
    """Every worker ends well."""
    return False


@dataclass
class Here(AbstractEngine):
    """So many workers, one after the other."""

    count: int
    threads: int = 1
    loses: Loses = none_lost
    tasks: int = 0

    @property
    def workers(self) -> int:
        return self.count

    @property
    def near(self) -> bool:
        return False

    def limit_threads(self) -> None:
        pass

    def refuse_longer(self, seconds: float) -> None:
        pass

    def perform(self, tasks: Iterator[Task]) -> Generator[Event]:
        home = os.getcwd()
        for task in tasks:
            self.tasks += 1
            yield Began(task.name)
            yield (
                self.lost(task) if self.loses(self.tasks, 0) else work(replace(task, threads=self.threads), self.heard)
            )
            os.chdir(home)

    def heard(self, event: Event) -> None:
        """Lose the worker as soon as it has said how far it is."""
        if isinstance(event, Stepped) and self.loses(self.tasks, event.step):
            raise KeyboardInterrupt

    def lost(self, task: Task) -> Ended:
        """A worker that nobody hears of again."""
        return Ended(task.name, "killed", "its process was killed")
