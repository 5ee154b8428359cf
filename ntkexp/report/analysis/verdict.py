"""How an estimate stands to what was expected of it: the expectation leaves a range, and the whole interval counts.

    inside     the interval lies in the range             (equivalence: two one-sided tests, each at 2.5 %)
    outside    the interval lies beyond it
    across     anything else; nothing is known if there is one repetition alone

Laws of sweeps say of it `agrees`, `larger` or `smaller`, `undecided`; claims `supported`, `refuted`, `undecided`.

An exponent leaves exponent ± margin; one that bounds from above leaves (−∞, exponent + margin], one from below
[exponent − margin, ∞). So few repetitions are never evidence for anything: their interval is too wide.

>>> law = Estimate(-0.97, error=0.02, freedom=4)
>>> [judge(law, expected).word for expected in (Expected(-1.0), Expected(-0.5), Expected(-0.5, bound="upper"))]
['agrees', 'smaller', 'agrees']
>>> judge(Estimate(-0.97, error=0.1, freedom=1), Expected(-1.0))
Verdict(word='undecided', more=43)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.fit import Expected
from ntkexp.report.analysis.estimate import CONFIDENCE, Estimate

Place: TypeAlias = Literal["inside", "outside", "across"]
Word: TypeAlias = Literal["agrees", "larger", "smaller", "undecided"]

CHANCE = (1 - CONFIDENCE) / 2
POWER = 0.8
MOST = 1000
"""Repetitions that nobody will ask for."""


@dataclass(frozen=True)
class Verdict:
    """The verdict is a word, and says of what is undecided how many more repetitions would probably decide it; None if
    far too many.
    """

    word: Word
    more: int | None = None


def place(estimate: Estimate, expected: Expected, *, strict: bool = False) -> tuple[Place, float]:
    """Where the interval lies, and p: the probability of so good an estimate by chance, were the truth at the edge.

    p ≤ 2.5 % is where the whole 95 % interval lies inside or outside. The edges belong to the range, unless it is
    `strict`: then an exact estimate at an edge lies outside.

    >>> equal = Estimate(0.0, error=0.0, freedom=4)
    >>> [place(equal, Expected(0.0, 0.0, "lower"), strict=strict)[0] for strict in (False, True)]
    ['inside', 'outside']
    """
    value = estimate.value
    if not estimate.known or math.isnan(value):
        return "across", math.nan
    at_edge = strict and value in {expected.low, expected.high} and not estimate.error
    inside = 1.0 if at_edge else max(tail(estimate, value - expected.low), tail(estimate, expected.high - value))
    outside = min(tail(estimate, expected.low - value), tail(estimate, value - expected.high))
    if inside <= CHANCE:
        return "inside", inside
    return ("outside", outside) if outside <= CHANCE else ("across", math.nan)


def tail(estimate: Estimate, way: float) -> float:
    """The probability of an estimate so far beyond an edge, were the truth at that edge."""
    from scipy.special import stdtr  # noqa: PLC0415  slow, and a report without intervals needs none

    if math.isinf(way) or not estimate.error:
        return 0.0 if way >= 0 else 1.0
    return float(stdtr(estimate.freedom, -way / estimate.error))


def judge(estimate: Estimate, expected: Expected) -> Verdict:
    """Judge an estimate by what was expected."""
    match place(estimate, expected)[0]:
        case "inside":
            return Verdict("agrees")
        case "outside":
            return Verdict("larger" if estimate.value > expected.high else "smaller")
    return Verdict("undecided", missing(estimate, expected) if estimate.known else None)


def missing(estimate: Estimate, expected: Expected) -> int | None:
    """Find how many more repetitions decide with a probability of 80 %, if value and spread are what they seem.

        (t_{m−1, 97.5 %} + t_{m−1, 90 %}) s/√m  ≤  the way from the value to the nearest end of the range

    90 %, because of two ends that are equally near an interval may miss either.
    """
    way = min(abs(estimate.value - expected.low), abs(estimate.value - expected.high))
    have = estimate.freedom + 1
    enough = np.flatnonzero(reaches()[have:] * estimate.error * math.sqrt(have) <= way)
    return int(enough[0]) + 1 if len(enough) else None


@cache
def reaches() -> NDArray[np.float64]:
    """Find what is asked of way/s above, for m = 1, 2, …"""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    total = np.arange(1, MOST + 1)
    quantiles = stdtrit(total[1:] - 1, (1 + CONFIDENCE) / 2) + stdtrit(total[1:] - 1, (1 + POWER) / 2)
    return np.append(math.inf, quantiles / np.sqrt(total[1:]))
