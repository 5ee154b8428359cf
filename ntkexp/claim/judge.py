"""The judge: compute the verdict on a claim from the tables
of its statistical tests (looks).

1. One part (rule) of the expectation. Seeds are the independent units, or seeds and examples
   (`over_examples`, see `analysis.two_way`). The rows give one figure per seed, for n seeds with
   mean m and standard deviation s:

       interval = m ± t_{ν, 97.5 %} s/√n,  ν = n − 1      range = value ± margin, or one-sided

   supported      the interval lies inside the range (equivalence: two one-sided tests at 2.5 %)
   refuted        the interval lies entirely outside the range
   below minimum  refuted, but the interval lies between the null value and the range: the
                  direction is significant, and the effect is smaller than the stated minimum
   undecided      the interval crosses an edge of the range, or there is no interval

   p is the probability of a figure at least as far from the edge, if the true value
   lies at the edge (`analysis.estimate.compare`). An identity has neither interval nor
   p: one error above its bound refutes it. If figures have a bounded range, as
   correlations do, the interval is computed on the log-odds scale. A part with `each`
   must hold at each level, and counts as several parts.

2. The m parts of a look, which must all hold:

   supported      every part is supported; p = max p_k (an intersection needs no correction)
   refuted        a part is refuted with p_k ≤ 2.5 %/m (Bonferroni); p = m min p_k
   below minimum  as `refuted`, if all parts with p_k ≤ 2.5 %/m are below their minimum
   undecided      otherwise

   The shown figure and interval belong to the part with this p_k.

3. The looks. A look may be judged at several planned stages with growing numbers of seeds, until it
   is decided. The stages share an error probability of 5 % (`Look.level`), and p is multiplied by
   5 %/level. If the control is supported, has rows without a number or lies far from its null value,
   the main look is undecided. A claim is supported, refuted or below minimum if the main and the
   second look agree (`records.claim.pair_verdict`).

4. All claims. `ntkexp.report.claims.holm_rejections` applies Holm's correction to the p of claims.
   Each main look that was ever taken at a claim is one of the tests (`records.register.main_looks`).
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
    Errors,
    Identity,
    Interval,
    select_rows,
)
from ntkexp.claim.look import CONTROL, MAIN, SECOND, Look, Protocol
from ntkexp.claim.quantity import Measured
from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import (
    LEVEL,
    MAX_REPETITIONS,
    ONE_SIDED_LEVEL,
    compare,
)
from ntkexp.text import short

Word: TypeAlias = Literal["supported", "refuted", "below minimum", "undecided"]
REFUSALS: tuple[Word, ...] = ("refuted", "below minimum")
DIRECTION_ONLY = "direction significant, size below the stated minimum"
UNARGUED = "nobody argued for the margin"
FAR_FROM_NULL = 10.0
"""The factor in the condition of `far_from_null`."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a look (a statistical test) or on one of its parts (a rule), with
    the estimate and interval that led to it.

    Attributes:
        more: For `undecided`, the number of further seeds after which the look would
            probably be decided.
        part: The index of the deciding part of a look. `figure`, `low`,
            `high` and `p` belong to this part.
        missing: The number of rows without a number.
        parts: The findings on the parts of a look.
    """

    verdict: Word
    figure: float
    low: float = math.nan
    high: float = math.nan
    p: float | None = None
    more: int | None = None
    note: str = ""
    part: int = 0
    missing: int = 0
    parts: tuple[Finding, ...] = ()

    def noting(self, *notes: str) -> Finding:
        """Return the finding with `notes` instead of its note. Omit empty notes."""
        return replace(self, note="; ".join(filter(None, notes)))

    def doubted(self, reason: str) -> Finding:
        """Change the verdict to `undecided`, and add the reason to the note."""
        return replace(self, verdict="undecided", p=None, more=None).noting(
            self.note, reason
        )


# --- 1. One part of the expectation.


def judge_part(
    part: AbstractExpectation,
    table: pd.DataFrame,
    level: float = LEVEL,
    null: float | None = None,
) -> Finding:
    """Judge the rows that one part (rule) of the expectation selects.

    If the part has `each`, the rule must hold for every combination of the values of
    these columns. `null` is the part's null value (`Look.direction_null`)."""
    rows = select_rows(table, part.where)
    findings = {
        name: judge_rows(part, group, level, null)
        for name, group in part.levels(rows).items()
    }
    if not part.each:
        return findings[""]
    joined = join_parts([*findings.values()])
    deciding = [*findings][joined.part]
    if joined.verdict == "supported":
        note = f"figure of {deciding}"
    else:
        supported = [name for name in findings if findings[name].verdict == "supported"]
        word = "undecided" if joined.verdict == "undecided" else "fails"
        note = f"{word} at {deciding}"
        if supported:
            note += f", holds at {', '.join(supported)}"
    return replace(joined, part=0).noting(note, joined.note)


def judge_rows(
    part: AbstractExpectation,
    rows: pd.DataFrame,
    level: float,
    null: float | None,
) -> Finding:
    """Judge rows by one part (rule) of the expectation.
    If a row has no finite number, the part is undecided.

    A row is censored if its value is only a bound. If the rule declares no censoring,
    such a row counts as missing.
    """
    finite = np.isfinite(rows["value"].to_numpy(dtype=float))
    censored = np.zeros(len(rows), dtype=bool)
    if "censored" in rows:
        censored = rows["censored"].fillna(0).to_numpy() == 1
    declared = getattr(part, "censored", None)
    if declared is None:
        finite &= ~censored
    try:
        evidence = part.evidence(rows[finite])
        if isinstance(evidence, Errors):
            finding = judge_errors(evidence)
        else:
            finding = judge_interval(replace(evidence, null=null), level)
    except Mistake:
        if finite.all():
            raise
        # the missing rows may be the reason for the error, so the part is undecided
        finding = Finding("undecided", math.nan)
    missing = int((~finite).sum())
    if missing:
        count = f"{missing} of {len(rows)} rows have no number"
        reason = first_reason(rows[~finite])
        return replace(
            finding.doubted(": ".join(filter(None, (count, reason)))), missing=missing
        )
    if censored.any():
        note = f"{int(censored.sum())} of {len(rows)} rows are bounds: the measurement ended there"
        return weigh_censored(part, finding, note)
    return finding


SAFE_SIDES = {"below": "upper", "above": "lower"}
"""The side of the true value relative to its bound → the side of the limits that are
still valid if the true value replaces the bound."""


def weigh_censored(part: AbstractExpectation, finding: Finding, note: str) -> Finding:
    """Set the finding to `undecided` if it depends on censored values. Add the note.

    The finding used the bound of each censored value. If the true values lie below
    their bounds, the true mean is smaller than the mean of the finding. So a supported
    upper limit holds. In the same way, a supported lower limit holds if the true values
    lie above. Every other verdict depends on the unknown values."""
    is_safe = (
        isinstance(part, Bound) and SAFE_SIDES.get(str(part.censored)) == part.side
    )
    if is_safe and finding.verdict == "supported":
        return finding.noting(finding.note, note)
    return finding.doubted(note)


def first_reason(rows: pd.DataFrame) -> str:
    """Return the first reason that a trial gives for a missing number, or ""."""
    if "reason" not in rows:
        return ""
    return next((str(reason) for reason in rows["reason"].dropna() if reason), "")


def judge_interval(evidence: Interval, level: float = LEVEL) -> Finding:
    """Judge by the position of the interval relative to the expected range.

    The interval misses the true value with probability `level`. p is multiplied by
    5 %/level, so that p ≤ 2.5 % decides at every level.

    >>> from ntkexp.records.sweep import Expected
    >>> from ntkexp.report.analysis.estimate import Estimate
    >>> slope = Estimate(-0.97, error=0.02, freedom=4)
    >>> [judge_interval(Interval(slope, Expected(value))).verdict for value in (-1.0, -0.5)]
    ['supported', 'refuted']
    """
    estimate = evidence.estimate
    comparison = compare(
        estimate, evidence.expected, strict=evidence.strict, level=level
    )
    low, high = estimate.interval(level)
    p = None if comparison.p is None else min(1.0, comparison.p * LEVEL / level)
    finding = Finding("undecided", estimate.value, low, high, note=evidence.note)
    if not estimate.known or math.isnan(estimate.value):
        finding = replace(finding, note=evidence.note or "there is no interval")
    elif comparison.where == "inside":
        finding = replace(finding, verdict="supported", p=p)
    elif comparison.where != "across":
        finding = replace(finding, verdict="refuted", p=p)
        if shows_direction(evidence, low, high):
            finding = replace(finding, verdict="below minimum")
            finding = finding.noting(DIRECTION_ONLY, evidence.note)
    elif not evidence.over_examples:  # with examples, more seeds alone may not help
        finding = replace(finding, more=comparison.more)
        if not comparison.more:
            never = f"too close to the threshold: {MAX_REPETITIONS} seeds would not settle it"
            finding = finding.noting(never, evidence.note)

    # log figure → figure
    if evidence.log:
        low, figure, high = np.exp([finding.low, finding.figure, finding.high]).tolist()
        finding = replace(finding, low=low, figure=figure, high=high)
    return finding.doubted(evidence.doubt) if evidence.doubt else finding


def shows_direction(evidence: Interval, low: float, high: float) -> bool:
    """Return whether an interval excludes the null value on the side
    of the expected range."""
    if evidence.null is None:
        return False
    if evidence.expected.bound == "lower":
        return low > evidence.null
    return high < evidence.null


def judge_errors(errors: Errors) -> Finding:
    """Judge an identity: every error must lie below its bound.
    There is no statistical test."""
    if errors.beyond:
        note = f"{errors.beyond} of {errors.rows} errors exceed their bounds"
        return Finding("refuted", errors.worst, errors.least, errors.worst, note=note)
    return Finding("supported", errors.worst, errors.least, errors.worst)


# --- 2. The parts (rules) of a look (statistical test), which must all hold.


def join_parts(findings: Sequence[Finding]) -> Finding:
    """Combine the findings on the m parts (rules) of a look.

    All parts must hold. Return the finding of the deciding part. This is the
    significantly refuted part with the smallest p. If no part is significantly refuted,
    it is the first undecided part. If no part is undecided either, it is the supported
    part with the largest p. Its `more` is the maximum over the undecided parts, or None
    if one of them has none. Its `missing` is the sum over all parts."""
    missing = sum(finding.missing for finding in findings)
    parts = [
        replace(finding, part=part, missing=missing)
        for part, finding in enumerate(findings)
    ]
    refuted = [finding for finding in parts if finding.verdict in REFUSALS]

    # Refuted: some part is an identity (without p), or has p_k ≤ 2.5 %/m. Then p = m
    # min p_k.
    level = ONE_SIDED_LEVEL / len(parts)
    significant = [
        finding for finding in refuted if finding.p is None or finding.p <= level
    ]
    if significant:
        clear = [finding for finding in significant if finding.verdict == "refuted"]
        deciding = min(clear or significant, key=lambda finding: finding.p or 0.0)
        if deciding.p is None:
            return deciding
        return replace(deciding, p=min(1.0, len(parts) * deciding.p))

    # Undecided: some part is undecided, or is refuted with p_k > 2.5 %/m.
    undecided = [
        finding.doubted("refuted only without correction") for finding in refuted
    ]
    undecided += [finding for finding in parts if finding.verdict == "undecided"]
    if undecided:
        needed = [finding.more for finding in undecided if finding.more is not None]
        return replace(
            undecided[0], more=max(needed) if len(needed) == len(undecided) else None
        )

    # Supported: all parts are supported. Then p = max p_k.
    tested = [finding for finding in parts if finding.p is not None]
    return max(tested, key=lambda finding: finding.p or 0.0, default=parts[0])


# --- 3. The three statistical tests (looks): main, control and second.


def judge_look(look: Look, measured: Measured) -> tuple[pd.DataFrame, Finding]:
    """Judge one statistical test (look), and return the judged table and the finding.
    If a run failed or is not finished, the test is undecided."""
    table = look.quantity.of(measured)
    finding = judge_table(look, table)
    if "state" not in measured.table:
        return table, finding
    # rows of a trial have no column `state`
    states = measured.table["state"].fillna("done")
    failed = measured.table[states != "done"]
    if len(failed):
        reason = next(filter(None, map(str, failed["reason"])), "they are not finished")
        count = f"{len(failed)} of {len(measured.table)} runs"
        finding = finding.doubted(f"{count} have no result: {reason}")
    return table, finding


def judge_table(look: Look, table: pd.DataFrame) -> Finding:
    """Judge all parts (rules) of a look, with the error probability
    of its current stage."""
    parts = [
        judge_part(rule, table, look.level, look.direction_null(part))
        for part, rule in enumerate(look.expectation)
    ]
    finding = note_supported_parts(join_parts(parts), look.expectation, parts)
    finding = replace(finding, parts=tuple(parts))
    if not look.planned:
        return finding
    seeds = f"judged with {len(look.seeds_now)} of {len(look.seeds)} seeds"
    interval = f"{100 * (1 - look.level):.3g} % intervals"
    if look.after("undecided") is not look:
        # further seeds are already planned for the next stage
        finding = replace(finding, more=None)
    return finding.noting(f"{seeds}, {interval}", finding.note)


def note_supported_parts(
    finding: Finding, expected: Sequence[AbstractExpectation], parts: Sequence[Finding]
) -> Finding:
    """List the supported parts of a look that is not supported, as a note.

    >>> from ntkexp.claim.expectation import Bound
    >>> rules = [Bound(limit=1, margin=0, side=side) for side in ("upper", "lower")]
    >>> fails, holds = Finding("refuted", 1.2, 1.1, 1.4), Finding("supported", 28.8, 12.0, 69.4)
    >>> note_supported_parts(fails, rules, [fails, holds]).note
    'supported parts: ≥ 1 ± 0 (28.8, 12 to 69.4)'
    """
    if finding.verdict == "supported":
        return finding
    supported = [
        f"{rule.whole_words} ({short(part.figure)}, {short(part.low)} to {short(part.high)})"
        for rule, part in zip(expected, parts, strict=True)
        if part.verdict == "supported"
    ]
    words = f"supported parts: {'; '.join(supported)}" if supported else ""
    return finding.noting(finding.note, words)


def judge_protocol(
    protocol: Protocol, measured: Mapping[str, Measured]
) -> tuple[dict[str, pd.DataFrame], dict[str, Finding]]:
    """Judge all statistical tests (looks), and return the judged tables
    and the findings by name."""
    tables: dict[str, pd.DataFrame] = {}
    findings: dict[str, Finding] = {}
    for name, look in protocol.looks.items():
        tables[name], findings[name] = judge_look(look, measured[name])
    return tables, weigh(findings, protocol)


def weigh(findings: Mapping[str, Finding], protocol: Protocol) -> dict[str, Finding]:
    """Note which verdicts depend on a margin without a reason, and check the control."""
    weighed = dict(findings)
    for name in (MAIN, SECOND):
        finding = findings[name]
        if finding.verdict != "undecided" and protocol.looks[name].unargued(
            finding.part
        ):
            weighed[name] = finding.noting(finding.note, UNARGUED)
    return weigh_control(weighed, protocol)


def weigh_control(
    findings: Mapping[str, Finding], protocol: Protocol
) -> dict[str, Finding]:
    """Set the finding on the main look (test) to `undecided` if the control fails.

    The null value is the value that is expected if the claim is false. A control fails
    if its verdict is `supported`, if it has rows without a number, or if its interval
    lies far from the null value. If the interval only excludes the null value, add a
    note to the control.
    """
    if protocol.control is None:
        return dict(findings)
    control = findings[CONTROL]
    weighed = {
        **findings,
        CONTROL: note_missed_null(control, protocol.control, protocol.main),
    }
    reason = ""
    if control.verdict == "supported":
        reason = "the control is supported too"
    elif control.missing:
        reason = "the control has rows without a number"
    elif far := far_from_null(control, protocol.control, protocol.main):
        reason = f"the control is far from its null value: {far}"
    if reason:
        weighed[MAIN] = findings[MAIN].doubted(
            f"{reason}, so this look decides nothing"
        )
    return weighed


def far_from_null(finding: Finding, control: Look, main: Look) -> str:
    """Describe the first part of the control that lies far from its null value,
    or return "".

    A part lies far from its null value if

        distance(null, interval) > 10 distance(null, expected range)

    Parts are compared only if the control and the main look have the same number of
    parts.
    """
    if not len(main.nulls) == len(control.expectation) == len(finding.parts):
        return ""
    for rule, null, part in zip(
        control.expectation, main.nulls, finding.parts, strict=True
    ):
        if null is None or not rule.edges or math.isnan(part.low):
            continue
        try:
            at_null = rule.scaled(null)
            low = rule.scaled(part.low)
            high = rule.scaled(part.high)
        except Mistake:  # the logarithm does not exist
            continue
        to_range = min(abs(edge - at_null) for edge in rule.edges)
        to_interval = max(0.0, low - at_null, at_null - high)
        if to_interval > FAR_FROM_NULL * to_range > 0:
            return f"{short(part.figure)} instead of {short(null)}"
    return ""


def note_missed_null(control: Finding, look: Look, main: Look) -> Finding:
    """If the interval of the control excludes its null value, add a note to the finding
    on the control.

    The main look states the null value of the control's deciding part (`Look.nulls`).
    If the two looks have different numbers of parts, return the finding unchanged.
    """
    nulls = main.nulls
    if len(nulls) != len(look.expectation) or math.isnan(control.low):
        return control
    null = nulls[control.part]
    if null is None or control.low <= null <= control.high:
        return control
    if isinstance(look.expectation[control.part], Identity):
        return control  # an identity is false at any larger error, not only at the null
    return control.noting(control.note, f"the interval misses the null, {short(null)}")
