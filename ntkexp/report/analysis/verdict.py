"""How an estimate stands to what was expected of it: the expectation leaves a range, and the whole interval counts.

    agrees           the interval lies in the range             (equivalence: two one-sided tests, each at 2.5 %)
    larger, smaller  the interval lies beyond it
    undecided        anything else; nothing is known if there is one repetition alone

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

Word: TypeAlias = Literal["agrees", "larger", "smaller", "undecided"]

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


def judge(estimate: Estimate, expected: Expected) -> Verdict:
    """Judge an estimate by what was expected."""
    if not estimate.known:
        return Verdict("undecided")
    if expected.low <= estimate.low and estimate.high <= expected.high:
        return Verdict("agrees")
    if estimate.low > expected.high or estimate.high < expected.low:
        return Verdict("larger" if estimate.low > expected.high else "smaller")
    return Verdict("undecided", missing(estimate, expected))


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
