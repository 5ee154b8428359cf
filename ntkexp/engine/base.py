"""Engines take tasks, and tell what becomes of them.

    Began → Stepped, Stepped, … → Ended     for each task, mixed with those of others

A task is plain data, since it may travel; what it brings about lies in a folder that all workers share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ntkexp.mistake import WrongArgument

Ending: TypeAlias = Literal["done", "found", "held", "stopped", "killed", "broken", "failed"]
"""How a run ended:

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
class Task:
    """A run to be carried out."""

    name: str
    """Of its folder; a worker that would give it another one sees other data, or is another version."""

    fields: dict[str, Any]
    overrides: tuple[str, ...]
    out: str
    home: str
    """The folder in which the command was given: paths start from there."""

    trust: tuple[str, ...]
    threads: int | None
    options: tuple[str, ...] = ()
    """Those of `ntkexp train` that repeat the run from that folder."""


@dataclass(frozen=True)
class Began:
    """A worker has taken a task."""

    name: str


@dataclass(frozen=True)
class Stepped:
    """A run has come so far."""

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


class AbstractEngine(ABC):
    """A place where runs happen."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many runs happen at once."""

    @abstractmethod
    def limit_threads(self) -> None:
        """Leave runs their cores: libraries read their number of threads when torch is imported, which comes next."""

    @abstractmethod
    def perform(self, tasks: Iterator[Task]) -> Generator[Event]:
        """Carry out tasks, asking for the next one when a worker is free.

        Closing the generator, or an exception inside it, asks runs to write a checkpoint and to end within seconds.
        """


class AbstractElsewhere(AbstractEngine):
    """Runs happen on other machines, `count` at once."""

    count: int

    @property
    def workers(self) -> int:
        return self.count

    def limit_threads(self) -> None:
        pass  # nothing is computed here
