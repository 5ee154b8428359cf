"""What a sweep reports while it runs, and how long it will still take."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from ntkexp.engine.base import Began, Ended, Event, Stepped

# --- What a sweep tells whoever waits for it. How that looks is the business of who listens.


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


# --- How long it will still take: what is left of the estimated work, at the speed of the work that was seen.
#
# ahead = max(left / workers, longest that is left) / speed       speed = estimated / measured worker seconds
#
# Where costs are in no known unit, as those of jobs that are taken to be alike, nothing is known until one has
# ended.


TRAINING = 0.9  # the share of a run until its last step; then it is written and drawn
PRIOR = 20.0  # worker seconds for which an estimate is believed until runs have been seen


@dataclass
class RemainingTime:
    """An estimate watches runs go by, and says how long the others will take."""

    costs: Mapping[str, float]
    workers: int
    believed: float = PRIOR  # worker seconds for which the estimate stands; 0 if costs are in no known unit
    shares: dict[str, float] = field(default_factory=dict)  # of the runs at work and those that ended here
    begun: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0  # worker seconds of runs that ended

    def see(self, event: Event) -> None:
        """Take an event into account."""
        match event:
            case Began():
                self.begun[event.name], self.shares[event.name] = time.monotonic(), 0.0
            case Stepped():
                self.shares[event.name] = TRAINING * event.step / event.steps
            case Ended() if event.how == "held":  # it comes again
                self.begun.pop(event.name, None)
                self.shares.pop(event.name, None)
            case Ended():
                self.spent += time.monotonic() - self.begun.pop(event.name, time.monotonic())
                self.shares[event.name] = 1.0

    @property
    def ahead(self) -> float | None:
        """The seconds that the sweep will still take, about, once that can be told."""
        left = {name: cost * (1 - self.shares.get(name, 0.0)) for name, cost in self.costs.items()}
        seen = sum(self.costs.values()) - sum(left.values())
        busy = self.spent + sum(time.monotonic() - start for start in self.begun.values())
        if seen + self.believed == 0:
            return None
        speed = (seen + self.believed) / (busy + self.believed)
        return max(sum(left.values()) / self.workers, *left.values(), 0.0) / speed
