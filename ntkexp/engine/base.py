"""Engines take tasks, and tell what becomes of them.

    Began → Stepped, Stepped, … → Ended     for each task, mixed with those of others

A job is plain data, since it may travel; what it brings about lies in a folder that all workers share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from ntkexp.mistake import WrongArgument

Ending: TypeAlias = Literal["done", "found", "held", "stopped", "killed", "broken", "failed"]
"""How a task ended:

done      carried out            found   another process had finished it
held      another process is at it
stopped   it was asked to; it goes on from its checkpoint
killed    its process is gone    broken  the machine's fault: a full disk
failed    its own fault: it would fail again
"""


class WrongEngine(WrongArgument):
    """There is no such engine, or it cannot be had: the message begins with how it was spelled."""

    def __init__(self, message: str) -> None:
        super().__init__(f"engine={message}", "engine")


@dataclass(frozen=True)
class Began:
    """A worker has taken a task."""

    name: str


@dataclass(frozen=True)
class Stepped:
    """A task has come so far."""

    name: str
    step: int
    steps: int


@dataclass(frozen=True)
class Ended:
    """A worker is through with a task."""

    name: str
    how: Ending
    reason: str = field(default="")


Event: TypeAlias = Began | Stepped | Ended
Tell: TypeAlias = Callable[[Event], None]


class AbstractJob(ABC):
    """A job is what a worker does, as plain data: a frozen dataclass that can be pickled."""

    loads: ClassVar[tuple[str, ...]] = ()
    """Modules that it imports late, and that a server of workers loads once for all."""

    @abstractmethod
    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        """Do it in this process, with so many threads; `tell` hears how far the task of this name is."""


@dataclass(frozen=True)
class Task:
    """A job for a worker, under a name that no other task of the command has."""

    name: str
    job: AbstractJob
    home: str
    """The folder in which the command was given: paths start from there."""

    logs: str
    """The folder for what engines write by themselves."""

    threads: int = 1


class AbstractEngine(ABC):
    """A place where jobs are done."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many jobs are done at once."""

    @property
    @abstractmethod
    def near(self) -> bool:
        """Whether its workers are on this machine."""

    @abstractmethod
    def limit_threads(self) -> None:
        """Leave jobs their cores: libraries read their number of threads when torch is imported, which comes next."""

    @abstractmethod
    def refuse_longer(self, seconds: float) -> None:
        """Refuse work that cannot be kept before so many seconds are over, if no worker has them."""

    @abstractmethod
    def perform(self, tasks: Iterator[Task]) -> Generator[Event]:
        """Carry out tasks, asking for the next one when a worker is free.

        Closing the generator, or an exception inside it, asks jobs to keep what they have and to end within seconds.
        """


class AbstractElsewhere(AbstractEngine):
    """Jobs are done on other machines, `count` at once."""

    count: int

    @property
    def workers(self) -> int:
        return self.count

    @property
    def near(self) -> bool:
        return False

    def limit_threads(self) -> None:
        pass  # nothing is computed here
