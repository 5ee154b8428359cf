"""The judge: from the tables of a claim's looks to its verdict. All that is decided of a claim is decided here.

1. One part of what is expected. Seeds are the independent units: the rows give a figure for each seed, and

       interval = mean ± t_{ν, 97.5 %} s/√n,  ν = n − 1         range = value ± margin, or one side of it

   supported   the interval lies inside of the range (equivalence: two one-sided tests, each at 2.5 %)
   refuted     it lies wholly outside
   undecided   it lies across an edge, or there is none

   p is the probability of so good a figure by chance, were the truth at the edge (`analysis.estimate.compare`). An
   identity has neither interval nor p: one error above its bound refutes it.

2. Several parts, m of them, which must all hold:

   supported   every part is; p = max p_k (an intersection of tests needs no correction)
   refuted     a part is, beyond chance among m parts: p_k ≤ 2.5 %/m (Bonferroni); p = m min p_k

3. The looks. Where the control comes out supported too, the claim's own look decides nothing. The second look is judged
   by itself, and shown beside the first.

4. All claims together. Verdicts are counted with Holm's correction over their p, by
   `ntkexp.report.claims.holm_rejections`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from ntkexp.claim.claim import CONTROL, MAIN, Look, Protocol
from ntkexp.claim.expectation import (
    AbstractExpectation,
    Bound,
    Equality,
    Errors,
    Identity,
    Interval,
    Location,
    Order,
    Slope,
    select_rows,
)
from ntkexp.claim.quantity import Measured
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json
from ntkexp.report.analysis.estimate import CHANCE, MOST, compare

Word: TypeAlias = Literal["supported", "refuted", "undecided"]


@dataclass(frozen=True)
class Finding:
    """What was found of a part, or of a look: a verdict, and the figure that it rests on, with its interval.

    `more` is how many more seeds would probably decide what is undecided.
    """

    verdict: Word
    figure: float
    low: float = math.nan
    high: float = math.nan
    p: float | None = None
    more: int | None = None
    note: str = ""
    part: int = 0  # of a look: the one that decides, whose figure this is

    def doubted(self, reason: str) -> Finding:
        """The figure stays, and nothing is concluded from it."""
        note = "; ".join(filter(None, [self.note, reason]))
        return replace(self, verdict="undecided", p=None, more=None, note=note)


# --- 1. One part of what is expected.


def judge_part(part: AbstractExpectation, table: pd.DataFrame) -> Finding:
    """Judge one part by the rows that it speaks of; where some of them have no number, nothing is decided."""
    rows = select_rows(table, part.where)
    finite = np.isfinite(rows["value"].to_numpy(dtype=float))
    try:
        evidence = part.evidence(rows[finite])
        finding = judge_errors(evidence) if isinstance(evidence, Errors) else judge_interval(evidence)
    except Mistake:
        if finite.all():
            raise
        finding = Finding("undecided", math.nan)  # what is left may be no whole table
    without = int((~finite).sum())
    return finding.doubted(f"{without} of {len(rows)} rows have no number") if without else finding


def judge_interval(evidence: Interval) -> Finding:
    """Judge whether the whole interval lies in the range that was expected, outside of it, or neither.

    >>> from ntkexp.records.sweep import Expected
    >>> from ntkexp.report.analysis.estimate import Estimate
    >>> slope = Estimate(-0.97, error=0.02, freedom=4)
    >>> [judge_interval(Interval(slope, Expected(value))).verdict for value in (-1.0, -0.5)]
    ['supported', 'refuted']
    """
    estimate, expected = evidence.estimate, evidence.expected
    finding = Finding("undecided", estimate.value, estimate.low, estimate.high, note=evidence.note)
    compared = compare(estimate, expected, strict=evidence.strict)
    if not estimate.known or math.isnan(estimate.value):
        finding = replace(finding, note=evidence.note or "there is no interval")
    elif compared.where != "across":
        finding = replace(finding, verdict="supported" if compared.where == "inside" else "refuted", p=compared.p)
    else:
        never = "" if compared.more else f"so near an edge of what is expected that {MOST} seeds would hardly decide"
        finding = replace(finding, more=compared.more, note="; ".join(filter(None, [never, evidence.note])))
    if evidence.log:  # what was judged are logarithms, what is shown is not
        low, figure, high = np.exp([finding.low, finding.figure, finding.high]).tolist()
        finding = replace(finding, low=low, figure=figure, high=high)
    return finding.doubted(evidence.doubt) if evidence.doubt else finding


def judge_errors(errors: Errors) -> Finding:
    """Judge an identity: all errors lie under their bounds, or one does not, and chance has no part in it."""
    note = f"{errors.beyond} of {errors.rows} rows lie beyond" if errors.beyond else ""
    return Finding("refuted" if errors.beyond else "supported", errors.worst, errors.least, errors.worst, note=note)


# --- 2. Several parts, which must all hold.


def join_parts(findings: Sequence[Finding]) -> Finding:
    """Join the m parts of a look: all must hold, and one that fails beyond chance among m refutes it.

    The figure is that of the part which decides: of the first that is refuted, else undecided, else of the first. As
    many more seeds are asked for as the part needs that needs most.
    """
    parts = [replace(finding, part=part) for part, finding in enumerate(findings)]
    refuted = [finding for finding in parts if finding.verdict == "refuted"]

    # Refuted: p_k ≤ 2.5 %/m of one part (an identity has no p), and then p = m min p_k.
    beyond = [finding for finding in refuted if finding.p is None or finding.p <= CHANCE / len(parts)]
    if beyond:
        chances = [finding.p for finding in beyond if finding.p is not None]
        certain = len(chances) < len(beyond)
        return replace(beyond[0], p=None if certain else min(1.0, len(parts) * min(chances)))

    # Undecided: a part is, or is refuted by itself but not beyond chance among m parts.
    undecided = [finding.doubted("refuted alone, not among so many parts") for finding in refuted]
    undecided += [finding for finding in parts if finding.verdict == "undecided"]
    if undecided:
        needed = [finding.more for finding in undecided if finding.more is not None]
        return replace(undecided[0], more=max(needed) if len(needed) == len(undecided) else None)

    # Supported: every part is, and p = max p_k.
    chances = [finding.p for finding in parts if finding.p is not None]
    return replace(parts[0], p=max(chances) if chances else None)


# --- 3. The looks: the claim's own, its control, and the second.


def judge_look(look: Look, measured: Measured) -> tuple[pd.DataFrame, Finding]:
    """Judge one look by the table of its quantity; runs that failed leave it undecided, with the first reason."""
    table = look.quantity.of(measured)
    finding = join_parts([judge_part(part, table) for part in look.expectation])
    states = measured.table["state"] if "state" in measured.table else pd.Series("done", measured.table.index)
    failed = measured.table[states.fillna("done") != "done"]  # rows of a trial have no state
    if len(failed):
        reason = next(filter(None, map(str, failed["reason"])), "they are not finished")
        finding = finding.doubted(f"{len(failed)} of {len(measured.table)} runs have no result: {reason}")
    return table, finding


def judge_protocol(
    protocol: Protocol, measured: Mapping[str, Measured]
) -> tuple[dict[str, pd.DataFrame], dict[str, Finding]]:
    """Judge all looks at a claim: the tables that were judged, and what was found, by the names of the looks."""
    judged = {name: judge_look(look, measured[name]) for name, look in protocol.looks.items()}
    findings = {name: finding for name, (_, finding) in judged.items()}
    if findings[CONTROL].verdict == "supported":  # figures that would support anything say nothing of the claim
        findings[MAIN] = findings[MAIN].doubted("the control comes out supported too, so this look decides nothing")
    return {name: table for name, (table, _) in judged.items()}, findings


# --- The judge is tried: rules judge invented tables whose truth is known, inside, outside and at the edge.
#
# false verdicts        the worst share, over places of the truth, of verdicts that are wrong; at the edge, of any
# support, refute       the share of tables that are decided, well inside and outside of what was expected


TABLES = 500
WRONG = {-1.0: ("refuted",), 0.0: ("supported", "refuted"), 1.0: ("supported",)}
"""The verdicts that are wrong, by where the truth is."""

RULES: tuple[AbstractExpectation, ...] = (
    Identity(),
    Slope(along="width", value=-1.0, margin=0.2),
    Slope(along="width", value=-0.5, margin=0.2, bound="upper"),
    Bound(limit=1.0, margin=0.1, side="upper"),
    Order(along="rule", above="left", below="secant", margin=0.1),
    Order(along="rule", above="left", below="secant", margin=0.5, scale="log"),
    Equality(value=1.0, margin=0.1),
    Location(along="width", value=64.0, margin=0.25),
)


@dataclass(frozen=True)
class Tried:
    """How a rule did on tables at each place: the shares of verdicts."""

    rule: str
    tables: int
    false: float
    support: float
    refute: float

    @property
    def fields(self) -> dict[str, Json]:
        return {
            "rule": self.rule,
            "tables": self.tables,
            "false_verdicts": self.false,
            "power_to_support": self.support,
            "power_to_refute": self.refute,
        }


def try_judging(rule: AbstractExpectation, tables: int = TABLES, seed: int = 0) -> Tried:
    """Judge tables whose truth is at each place."""
    generator = np.random.default_rng(seed)
    rates: dict[float, list[str]] = {
        truth: [judge_part(rule, rule.invent(truth, generator)).verdict for _ in range(tables)] for truth in rule.places
    }
    false = max(rates[truth].count(word) for truth in rule.places for word in WRONG[truth]) / tables
    return Tried(
        rule=f"{rule.option}: {rule.words}",
        tables=tables,
        false=false,
        support=rates[-1.0].count("supported") / tables,
        refute=rates[1.0].count("refuted") / tables,
    )
