"""The judge: from the tables of a claim's looks to its verdict. All that is decided of a claim is decided here.

1. One part of what is expected. Seeds are the independent units: the rows give a figure for each seed, and

       interval = mean ± t_{ν, 97.5 %} s/√n,  ν = n − 1         range = value ± margin, or one side of it

   supported   the interval lies inside of the range (equivalence: two one-sided tests, each at 2.5 %)
   refuted     it lies wholly outside
   undecided   it lies across an edge, or there is none

   p is the probability of so good a figure by chance, were the truth at the edge (`analysis.estimate.compare`). An
   identity has neither interval nor p: one error above its bound refutes it. The interval of figures that lie within
   two ends, such as correlations, is Student's of their log odds. A part that must hold `each` by each is several.

2. Several parts, m of them, which must all hold:

   supported   every part is; p = max p_k (an intersection of tests needs no correction)
   refuted     a part is, beyond chance among m parts: p_k ≤ 2.5 %/m (Bonferroni); p = m min p_k

3. The looks. One may be planned to be judged several times, with more and more of its seeds, until it is decided; 5 %
   are split over the times (`Look.level`), and p is multiplied by 5 %/level. Where the control comes out supported too,
   the claim's own look decides nothing. A claim is supported if its own look and the second one are.

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
from ntkexp.claim.look import CONTROL, MAIN, Look, Protocol
from ntkexp.claim.quantity import Column, Measured
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json
from ntkexp.records.claim import pair_verdict
from ntkexp.report.analysis.estimate import LEVEL, MAX_REPETITIONS, ONE_SIDED_LEVEL, compare
from ntkexp.text import short

Word: TypeAlias = Literal["supported", "refuted", "undecided"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a part or on a look, and the figure that it rests on, with its interval.

    If the verdict is undecided, `more` is the number of further seeds that would probably decide it.
    """

    verdict: Word
    figure: float
    low: float = math.nan
    high: float = math.nan
    p: float | None = None
    more: int | None = None
    note: str = ""
    part: int = 0  # of a look: the one that decides, whose figure this is

    def noting(self, *notes: str) -> Finding:
        """The same, with a note of these, as far as they say anything."""
        return replace(self, note="; ".join(filter(None, notes)))

    def doubted(self, reason: str) -> Finding:
        """The figure stays, and nothing is concluded from it."""
        return replace(self, verdict="undecided", p=None, more=None).noting(self.note, reason)


# --- 1. One part of what is expected.


def judge_part(part: AbstractExpectation, table: pd.DataFrame, level: float = LEVEL) -> Finding:
    """Judge one part by the rows that it speaks of; of one that must hold at each level of columns, all must."""
    rows = select_rows(table, part.where)
    each = {place: judge_rows(part, group, level) for place, group in part.levels(rows).items()}
    if not part.each:
        return each[""]
    found = join_parts([*each.values()])
    holds = [place for place, one in each.items() if one.verdict == "supported" != found.verdict]
    place, where = [*each][found.part], f", and it holds at {', '.join(holds)}" if holds else ""
    note = f"the figure is of {place}" if found.verdict == "supported" else f"at {place}{where}"
    return replace(found, part=0).noting(note, found.note)


def judge_rows(part: AbstractExpectation, rows: pd.DataFrame, level: float = LEVEL) -> Finding:
    """Judge rows by a part of what is expected; where some of them have no number, nothing is decided."""
    finite = np.isfinite(rows["value"].to_numpy(dtype=float))
    try:
        evidence = part.evidence(rows[finite])
        finding = (
            judge_errors(evidence)
            if isinstance(evidence, Errors)
            else judge_interval(evidence, level)
        )
    except Mistake:
        if finite.all():
            raise
        finding = Finding("undecided", math.nan)  # what is left may be no whole table
    without = int((~finite).sum())
    return finding.doubted(f"{without} of {len(rows)} rows have no number") if without else finding


def judge_interval(evidence: Interval, level: float = LEVEL) -> Finding:
    """Judge whether the whole interval lies in the range that was expected, outside of it, or neither.

    The interval misses the truth with a probability of `level`, and p is multiplied by 5 %/level: a verdict has
    p ≤ 2.5 % at every level.

    >>> from ntkexp.records.sweep import Expected
    >>> from ntkexp.report.analysis.estimate import Estimate
    >>> slope = Estimate(-0.97, error=0.02, freedom=4)
    >>> [judge_interval(Interval(slope, Expected(value))).verdict for value in (-1.0, -0.5)]
    ['supported', 'refuted']
    """
    estimate, expected = evidence.estimate, evidence.expected
    finding = Finding("undecided", estimate.value, *estimate.interval(level), note=evidence.note)
    compared = compare(estimate, expected, strict=evidence.strict, level=level)
    if not estimate.known or math.isnan(estimate.value):
        finding = replace(finding, note=evidence.note or "there is no interval")
    elif compared.where != "across":
        p = None if compared.p is None else min(1.0, compared.p * LEVEL / level)
        finding = replace(
            finding, verdict="supported" if compared.where == "inside" else "refuted", p=p
        )
    else:
        never = (
            ""
            if compared.more
            else f"too close to the threshold: {MAX_REPETITIONS} seeds would not settle it"
        )
        finding = replace(finding, more=compared.more).noting(never, evidence.note)
    if evidence.log:  # what was judged are logarithms, what is shown is not
        low, figure, high = np.exp([finding.low, finding.figure, finding.high]).tolist()
        finding = replace(finding, low=low, figure=figure, high=high)
    return finding.doubted(evidence.doubt) if evidence.doubt else finding


def judge_errors(errors: Errors) -> Finding:
    """Judge an identity: all errors lie under their bounds, or one does not, and chance has no part in it."""
    note = f"{errors.beyond} of {errors.rows} rows lie beyond" if errors.beyond else ""
    return Finding(
        "refuted" if errors.beyond else "supported",
        errors.worst,
        errors.least,
        errors.worst,
        note=note,
    )


# --- 2. Several parts, which must all hold.


def join_parts(findings: Sequence[Finding]) -> Finding:
    """Join the m parts of a look: all must hold, and one that fails beyond chance among m refutes it.

    The figure is that of the part which decides: of the first that is refuted, else undecided, else of the first. As
    many more seeds are asked for as the part needs that needs most.
    """
    parts = [replace(finding, part=part) for part, finding in enumerate(findings)]
    refuted = [finding for finding in parts if finding.verdict == "refuted"]

    # Refuted: p_k ≤ 2.5 %/m of one part (an identity has no p), and then p = m min p_k.
    beyond = [
        finding
        for finding in refuted
        if finding.p is None or finding.p <= ONE_SIDED_LEVEL / len(parts)
    ]
    if beyond:
        chances = [finding.p for finding in beyond if finding.p is not None]
        certain = len(chances) < len(beyond)
        return replace(beyond[0], p=None if certain else min(1.0, len(parts) * min(chances)))

    # Undecided: a part is, or is refuted by itself but not beyond chance among m parts.
    undecided = [finding.doubted("refuted alone, not among all its parts") for finding in refuted]
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
    finding = judge_table(look, table)
    states = (
        measured.table["state"]
        if "state" in measured.table
        else pd.Series("done", measured.table.index)
    )
    failed = measured.table[states.fillna("done") != "done"]  # rows of a trial have no state
    if len(failed):
        reason = next(filter(None, map(str, failed["reason"])), "they are not finished")
        finding = finding.doubted(
            f"{len(failed)} of {len(measured.table)} runs have no result: {reason}"
        )
    return table, finding


def judge_table(look: Look, table: pd.DataFrame) -> Finding:
    """Judge all parts of a look, at the level of the planned time that it is at."""
    parts = [judge_part(part, table, look.level) for part in look.expectation]
    finding = say_what_holds(join_parts(parts), look.expectation, parts)
    if not look.planned:
        return finding
    times = f"judged with {len(look.seeds_now)} of {len(look.seeds)} seeds, by {100 * (1 - look.level):.3g} % intervals"
    goes_on = (
        look.after("undecided") is not look
    )  # as planned, so that no other seeds are called for
    more = None if goes_on else finding.more
    return replace(finding, more=more).noting(times, finding.note)


def say_what_holds(
    finding: Finding, expected: Sequence[AbstractExpectation], parts: Sequence[Finding]
) -> Finding:
    """Say which other parts hold, and with what figures, where one does not.

    >>> falls, holds = Finding("refuted", 1.2, 1.1, 1.4), Finding("supported", 28.8, 12.0, 69.4)
    >>> say_what_holds(falls, RULES[3:5], [falls, holds]).note
    'what holds: left − secant > 0.1 (28.8, 12 to 69.4)'
    """
    if finding.verdict == "supported":
        return finding
    holding = [
        f"{part.whole_words} ({short(found.figure)}, {short(found.low)} to {short(found.high)})"
        for part, found in zip(expected, parts, strict=True)
        if found.verdict == "supported"
    ]
    words = f"what holds: {'; '.join(holding)}" if holding else ""
    return finding.noting(finding.note, words)


def judge_protocol(
    protocol: Protocol, measured: Mapping[str, Measured]
) -> tuple[dict[str, pd.DataFrame], dict[str, Finding]]:
    """Judge all looks at a claim: the tables that were judged, and what was found, by the names of the looks."""
    judged = {name: judge_look(look, measured[name]) for name, look in protocol.looks.items()}
    findings = weigh_control({name: finding for name, (_, finding) in judged.items()}, protocol)
    return {name: table for name, (table, _) in judged.items()}, findings


def weigh_control(findings: Mapping[str, Finding], protocol: Protocol) -> dict[str, Finding]:
    """Withhold the verdict of the claim's own look where the control is supported, and say where it is off the null."""
    weighed = {**findings, CONTROL: say_if_off_null(findings[CONTROL], protocol)}
    if (
        findings[CONTROL].verdict == "supported"
    ):  # figures that would support anything say nothing of the claim
        weighed[MAIN] = findings[MAIN].doubted(
            "the control comes out supported too, so this look decides nothing"
        )
    return weighed


def say_if_off_null(control: Finding, protocol: Protocol) -> Finding:
    """Say of a control that it does not lie at the null; one with other parts than the claim has none."""
    nulls = protocol.main.nulls
    if len(nulls) != len(protocol.control.expectation) or math.isnan(control.low):
        return control
    null = nulls[control.part]
    exact = isinstance(
        protocol.control.expectation[control.part], Identity
    )  # where any error will do
    if null is None or exact or control.low <= null <= control.high:
        return control
    return control.noting(control.note, f"it does not lie at the null, {short(null)}")


# --- The judge is tried: rules judge invented tables whose truth is known, inside, outside and at the edge.
#
# false verdicts        the worst share, over places of the truth, of verdicts that are wrong; at the edge, of any
# support, refute       the share of tables that are decided, well inside and outside of what was expected


TABLES, TRIALS = 500, 200
"""Invented tables for a rule, and for a design, whose tables are many."""
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
        truth: [judge_part(rule, rule.invent(truth, generator)).verdict for _ in range(tables)]
        for truth in rule.places
    }
    false = max(rates[truth].count(word) for truth in rule.places for word in WRONG[truth]) / tables
    return Tried(
        rule=f"{rule.option}: {rule.words}",
        tables=tables,
        false=false,
        support=rates[-1.0].count("supported") / tables,
        refute=rates[1.0].count("refuted") / tables,
    )


# --- Designs are tried as well: what is done to decide a claim in the end.


@dataclass(frozen=True)
class JudgingDesign:
    """How often a claim is judged, of how many parts, and whether by a pair of looks.

    `shared` parts are of the same draws, as quantities of one run are, others of draws of their own.
    """

    name: str
    look: Look
    pair: bool = False
    shared: bool = False

    def judge(
        self, truths: Sequence[float], seconds: Sequence[float], generator: np.random.Generator
    ) -> str:
        """Invent what the looks see, where the truths of their parts are at these places; the verdict of the pair."""
        main = self.judge_look(truths, generator)
        return pair_verdict(main, self.judge_look(seconds, generator)) if self.pair else main

    def judge_look(self, truths: Sequence[float], generator: np.random.Generator) -> str:
        # A table of all seeds, of which the first are seen first
        draw = int(generator.integers(2**32))
        tables = []
        for place, (part, truth) in enumerate(zip(self.look.expectation, truths, strict=True)):
            of_part = np.random.default_rng([draw, 0 if self.shared else place])
            tables.append(part.invent(truth, of_part, len(self.look.seeds)).assign(quantity=place))
        table = pd.concat(tables, ignore_index=True)

        # As often as planned, until it is decided
        look = self.look.at(0)
        while True:
            finding = judge_table(look, table[table["seed"].isin(look.seeds_now)])
            then = look.after(finding.verdict)
            if then is look:
                return finding.verdict
            look = then


def look_of(*parts: AbstractExpectation, planned: tuple[int, ...] = (5,)) -> Look:
    """A look at invented tables, each part at rows of its own."""
    placed = tuple(
        part.model_copy(update={"where": {"quantity": place}}) for place, part in enumerate(parts)
    )
    return Look(
        {}, None, tuple(range(planned[-1])), Column(column="value"), placed, planned=planned
    )


EQUAL, FALLS = Equality(value=1.0, margin=0.1), Slope(along="width", value=-1.0, margin=0.2)
ABOVE = Order(along="rule", above="left", below="secant", margin=0.1)
DESIGNS = (
    JudgingDesign("looks at 6 and 24 seeds", look_of(EQUAL, planned=(6, 24))),
    JudgingDesign("looks at 6, 12, 24 and 48 seeds", look_of(EQUAL, planned=(6, 12, 24, 48))),
    JudgingDesign("a pair of looks", look_of(EQUAL), pair=True),
    JudgingDesign("three parts", look_of(EQUAL, FALLS, ABOVE)),
    JudgingDesign("three parts of the same draws", look_of(EQUAL, EQUAL, EQUAL), shared=True),
    JudgingDesign(
        "a pair of looks at 6 and 24 seeds, of two parts",
        look_of(EQUAL, FALLS, planned=(6, 24)),
        pair=True,
    ),
)


def try_design(design: JudgingDesign, tables: int = TRIALS, seed: int = 0) -> Tried:
    """Judge tables at which a design could err: all parts at their edges, one of them, or the second look alone.

    At an edge every verdict is wrong but `not replicated` and `undecided`. Where the claim is true but for the second
    look, to support it is wrong.
    """
    generator, parts = np.random.default_rng(seed), len(design.look.expectation)
    inside, edges, edge, outside = (
        [-1.0] * parts,
        [0.0] * parts,
        [0.0] + [-1.0] * (parts - 1),
        [1.0] + [-1.0] * (parts - 1),
    )

    def share(main: Sequence[float], second: Sequence[float], *words: str) -> float:
        return sum(design.judge(main, second, generator) in words for _ in range(tables)) / tables

    wrong = [
        share(edges, inside, "supported", "refuted"),
        share(edge, inside, "supported", "refuted"),
    ]
    wrong += [share(inside, edge, "supported")] if design.pair else []
    return Tried(
        rule=design.name,
        tables=tables,
        false=max(wrong),
        support=share(inside, inside, "supported"),
        refute=share(outside, inside, "refuted"),
    )
