"""What was found out of a function that is read again and again, so that nothing is asked twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.record.routing import Routes
from ntkexp.kernel.secant.ownership import Owners

LATEST = 64  # questions that are remembered: one for every block of a run, where values route rows


@dataclass(frozen=True)
class Found:
    """What was found out of a function, by the structure of tapes and by the values on them that decide it."""

    routes: Answers[Routes] = field(default_factory=lambda: Answers(LATEST))
    owners: Answers[Owners] = field(default_factory=lambda: Answers(LATEST))
    structures: Answers[Owners] = field(default_factory=lambda: Answers(LATEST))  # the latest owners, of any routing
    graphs: Answers[bool] = field(default_factory=lambda: Answers(LATEST))
    faithful: Answers[Owners | None] = field(default_factory=lambda: Answers(LATEST))
    sizes: Answers[float] = field(default_factory=lambda: Answers(LATEST))
