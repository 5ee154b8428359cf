"""Medians of alternating measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from statistics import median
from typing import TypeAlias

Act: TypeAlias = Callable[[], object]


def medians(acts: Mapping[str, Act], times: int, within: float = inf) -> dict[str, float]:
    """The median seconds of each act; they take turns, after one round that does not count. No round begins after that
    many seconds, but for the first.
    """
    for act in acts.values():
        act()
    end, rounds = time.perf_counter() + within, [{name: seconds(act) for name, act in acts.items()}]
    while len(rounds) < times and time.perf_counter() < end:
        rounds.append({name: seconds(act) for name, act in acts.items()})
    return {name: median(each[name] for each in rounds) for name in acts}


def seconds(act: Act) -> float:
    """How long it takes once."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def milliseconds(value: float) -> str:
    """As many digits as mean something.

    >>> milliseconds(0.00123456), milliseconds(12.3456)
    ('1.23', '12346')
    """
    return f"{1000 * value:.3g}" if value < 1 else f"{1000 * value:.0f}"
