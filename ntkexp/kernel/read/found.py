"""What was found out of a function that is read again and again, so that nothing is asked twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.record.routing import Routes
from ntkexp.kernel.secant.ownership import Owners


@dataclass(frozen=True)
class Found:
    """What was found out of a function, by the structure of tapes and by the values on them that decide it."""

    routes: Answers[Routes] = field(default_factory=Answers)
    owners: Answers[Owners] = field(default_factory=Answers)
    independent: Answers[bool] = field(default_factory=Answers)  # operations that were found to couple no examples
    structures: Answers[Owners] = field(default_factory=Answers)  # the latest owners, of any routing
    graphs: Answers[bool] = field(default_factory=Answers)
    faithful: Answers[Owners | None] = field(default_factory=Answers)
    sizes: Answers[float] = field(default_factory=Answers)
    fits: Answers[bool] = field(default_factory=Answers)  # features, at once
