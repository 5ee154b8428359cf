"""Medians of alternating measurements, and tables of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned to the right, under a title.

    >>> print(table("Speeds", ["w", "ms"], [["8", "0.25"]]), end="")
    Speeds
      w    ms
      8  0.25
    """
    lines = [header, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    text = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([title, *(f"  {line}" for line in text)]) + "\n"


def milliseconds(value: float) -> str:
    """As many digits as mean something.

    >>> milliseconds(0.00123456), milliseconds(12.3456)
    ('1.23', '12346')
    """
    return f"{1000 * value:.3g}" if value < 1 else f"{1000 * value:.0f}"
