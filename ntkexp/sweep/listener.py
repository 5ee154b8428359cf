"""What a sweep tells whoever waits for it. How that looks is the business of who listens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ntkexp.engine.base import Event


class AbstractSweepListener(ABC):
    """A listener hears `begin`, any number of events and remarks, and `end`."""

    @abstractmethod
    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        """A sweep of so many runs goes on, some of them done; about how long the others take, in all, if known."""

    @abstractmethod
    def see(self, event: Event, ahead: float | None) -> None:
        """Something happened to a run; about how many seconds remain, if known."""

    @abstractmethod
    def say(self, text: str) -> None:
        """There is a remark of one line."""

    @abstractmethod
    def end(self) -> None:
        """The sweep is over, or was interrupted."""


class NoListener(AbstractSweepListener):
    """Nobody listens."""

    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        pass

    def see(self, event: Event, ahead: float | None) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass
