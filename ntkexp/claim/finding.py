"""What a rule finds in a table: supported, refuted or undecided, with a figure and its interval over seeds.

    p    the probability of so good a figure by chance, were the truth at the edge of what was expected

A verdict is given where p ≤ 2.5 %, which is where the whole 95 % interval lies inside or outside; an identity has none.

>>> decide(Estimate(-0.97, error=0.02, freedom=4), Expected(-1.0)).verdict
'supported'
>>> decide(Estimate(-0.97, error=0.02, freedom=4), Expected(-0.5)).verdict
'refuted'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ntkexp.records.sweep import Expected
from ntkexp.report.analysis.estimate import CHANCE, MOST, Estimate, missing, place

Word: TypeAlias = Literal["supported", "refuted", "undecided"]


@dataclass(frozen=True)
class Finding:
    """A rule has come to this; `more` is how many more seeds would probably decide what is undecided."""

    verdict: Word
    figure: float
    low: float = math.nan
    high: float = math.nan
    p: float | None = None
    more: int | None = None
    note: str = ""
    part: int = 0  # of a claim: the one that decides, whose figure this is

    def mapped(self, low: float, figure: float, high: float) -> Finding:
        """The same finding is given on another scale."""
        return replace(self, low=low, figure=figure, high=high)

    def noted(self, note: str) -> Finding:
        """The same finding is given with a remark."""
        return replace(self, note="; ".join(filter(None, [self.note, note])))

    def doubted(self, reason: str) -> Finding:
        """The figure stays, and nothing is concluded from it."""
        return replace(self.noted(reason), verdict="undecided", p=None, more=None)


def decide(estimate: Estimate, expected: Expected, *, strict: bool = False) -> Finding:
    """Decide whether the whole interval lies in the range that was expected, outside of it, or neither."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if not estimate.known or math.isnan(value):
        return Finding("undecided", value, low, high, note="there is no interval")
    where, p = place(estimate, expected, strict=strict)
    if where != "across":
        return Finding("supported" if where == "inside" else "refuted", value, low, high, p)
    more = missing(estimate, expected)
    note = "" if more else f"so near an edge of what is expected that {MOST} seeds would hardly decide"
    return Finding("undecided", value, low, high, more=more, note=note)


def together(findings: Sequence[Finding]) -> Finding:
    """Join the parts of a claim: all must hold, and one that fails beyond chance, of so many, refutes it.

    The figure is that of the part which decides: of the first that is refuted, else undecided, else of the first. As
    many more seeds are asked for as the part needs that needs most.
    """
    parts = [replace(found, part=part) for part, found in enumerate(findings)]
    refuted = [found for found in parts if found.verdict == "refuted"]
    beyond = [found for found in refuted if found.p is None or found.p <= CHANCE / len(parts)]
    if beyond:
        p = None if any(found.p is None for found in beyond) else min(1.0, len(parts) * smallest(beyond))
        return replace(beyond[0], p=p)
    open_ = [found.doubted("refuted alone, not among so many parts") for found in refuted]
    open_ += [found for found in parts if found.verdict == "undecided"]
    if open_:
        wanted = [found.more for found in open_]
        return replace(open_[0], more=None if None in wanted else max(filter(None, wanted)))
    return replace(parts[0], p=None if all(found.p is None for found in parts) else largest(parts))


def smallest(findings: Sequence[Finding]) -> float:
    """Find the smallest p."""
    return min(found.p for found in findings if found.p is not None)


def largest(findings: Sequence[Finding]) -> float:
    """Find the largest p."""
    return max(found.p for found in findings if found.p is not None)
