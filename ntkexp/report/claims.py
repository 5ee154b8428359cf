"""Tables of claims, and their verdicts after Holm's correction for multiple tests.

    p₍₁₎ ≤ p₍₂₎ ≤ …        the k-th verdict survives if 2 p₍ⱼ₎ ≤ 5 %/(m − j + 1) for all j ≤ k

The verdict on a claim combines its main test and its second test
(`ClaimRecord.verdict`). p₍ₖ₎ is the k-th smallest of the m p-values of all claims of
one size, including registered claims that are not judged yet. p is doubled, because a
verdict may support or refute a claim. Undecided, unreplicated and unjudged claims have
p = 1. Each further main look at a claim, such as a look at an earlier version, also
enters with p = 1 (`ntkexp.records.register.main_looks`). So looking at a claim until it
is supported makes the correction stricter.

Deterministic claims have no p, and always survive. Identities are exact by
construction, and do not belong to the m claims.

>>> holm_rejections([0.001, None, 0.02, 0.5])
[True, True, False, False]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ntkexp.records.claim import (
    BELOW_MINIMUM,
    DECIDED,
    EXACT,
    NOT_REPLICATED,
    ClaimRecord,
    Judgement,
    pool_of,
)
from ntkexp.records.register import RegisterEntry, main_looks, merged_fields
from ntkexp.report.tables import Column, Table, Value, format_text, text_column
from ntkexp.text import MISSING, counted, listed, short

FAMILY_LEVEL = 0.05
VERDICTS = ("supported", "refuted", BELOW_MINIMUM, NOT_REPLICATED, "undecided")
UNCORRECTED = "not after correction"
SIZES = ("default", "quick", "full")

ON_TERMINAL = (
    *("claim", "verdict", "figure", "95 % interval", "first expected"),
    *("control", "second look", "CPU minutes"),
)


@dataclass(frozen=True)
class ClaimFamily:
    """The tests over which Holm's correction is made, in addition to the shown claims.

    Attributes:
        registered: The number of claims in the register, including identities. It can
            exceed the number of records. The missing claims count as undecided.
        further: For each claim, the number of its main looks at default size, other
            than the first. Looks at identities do not count.
    """

    registered: int = 0
    further: Mapping[str, int] = field(default_factory=dict)

    def further_looks(self, size: str) -> int:
        """Return the number of further looks at claims of this size. Only looks at
        default size are published, so looks of other sizes do not count."""
        return sum(self.further.values()) if size == "default" else 0


def claim_family(entries: Mapping[str, Sequence[RegisterEntry]]) -> ClaimFamily:
    """Return the family of all claims of a register, given the versions of each."""
    further = {
        name: main_looks(attempts) - 1
        for name, attempts in entries.items()
        if merged_fields(attempts)[-1].get("kind") != "identity"
    }
    return ClaimFamily(len(entries), further)


NO_FAMILY = ClaimFamily()
"""The family of claims without a register."""


def tabulate_claims(
    records: Sequence[ClaimRecord], family: ClaimFamily = NO_FAMILY
) -> Table:
    """Return a row for each record.

    The column `stands` says if the verdict survives Holm's correction. If it does not,
    `not after correction` is appended to the verdict."""
    columns = (
        text_column("claim"),
        text_column("verdict"),
        text_column("stands"),
        Column("figure"),
        Column("low"),
        Column("high"),
        Column("95 % interval"),
        text_column("pool"),
        text_column("control"),
        text_column("second look"),
        Column("CPU minutes", spell=format_minutes),
        text_column("size"),
        text_column("source"),
        text_column("expected"),
        text_column("digest"),
        text_column("first expected", heading="expected"),
    )
    verdicts = standing_verdicts(records, family)
    rows = map(row_of, records, verdicts)
    return Table(columns, tuple(rows))


def row_of(record: ClaimRecord, stands: bool | None) -> tuple[Value, ...]:
    main = record.main
    control = record.looks.get("control")
    return (
        record.name,
        verdict_words(record, stands),
        {None: MISSING, True: "yes", False: "no"}[stands],
        main.figure,
        main.low,
        main.high,
        interval(main),
        pool_of(main.draws) or MISSING,
        MISSING if control is None else control.verdict,
        record.looks["second"].verdict,
        record.cpu_minutes,
        record.size,
        record.source,
        main.expected,
        record.digest,
        shortened(main.expected),
    )


def verdict_words(record: ClaimRecord, stands: bool | None) -> str:
    """Return the verdict in words. A confirmed identity is exact. `stands` is False if
    the verdict does not survive the correction.

    >>> from types import SimpleNamespace
    >>> claim = SimpleNamespace(verdict="supported", identity=False)
    >>> verdict_words(claim, True), verdict_words(claim, False)
    ('supported', 'supported, not after correction')
    """
    if record.identity and record.verdict == "supported":
        return EXACT
    return f"{record.verdict}, {UNCORRECTED}" if stands is False else record.verdict


def format_minutes(minutes: float) -> str:
    if math.isnan(minutes):
        return MISSING
    return f"{minutes:.1f}"


def format_claims(
    records: Sequence[ClaimRecord], family: ClaimFamily = NO_FAMILY
) -> str:
    return format_text(tabulate_claims(records, family).select(*ON_TERMINAL))


def interval(judged: Judgement) -> str:
    """Format the confidence interval of a test.

    An identity has a range of errors instead. If every seed gave the same number, there
    is no interval.

    >>> from types import SimpleNamespace
    >>> spell = lambda low, high, p=None: interval(SimpleNamespace(low=low, high=high, p=p, verdict="supported"))
    >>> spell(0.1, 0.2, 1e-3), spell(31.0, 31.0, 0.0), spell(1e-16, 2e-15)
    ('0.1 to 0.2', 'exact, no interval', 'errors 1e-16 to 2e-15')
    """
    if judged.low == judged.high:  # every seed gave the same number
        return "exact, no interval"
    ends = f"{short(judged.low)} to {short(judged.high)}"
    # only a decided test of an identity has no p-value
    identity = judged.p is None and judged.verdict != "undecided"
    if identity:
        return f"errors {ends}"
    return ends


def shortened(expected: str) -> str:
    """Shorten a list of expectations to the first one and the number of others.

    >>> shortened("slope −1 ± 0.1; slope −0.5 ± 0.1"), shortened("≤ 2 ± 0.1")
    ('slope −1 ± 0.1, and 1 more', '≤ 2 ± 0.1')
    """
    first, *others = expected.split("; ")
    if others:
        return f"{first}, and {len(others)} more"
    return first


def summarise_claims(
    records: Sequence[ClaimRecord], family: ClaimFamily = NO_FAMILY
) -> str:
    """Count the verdicts on the claims of each size. Name the claims whose verdicts do
    not survive Holm's correction.

    Identities are counted separately.

    >>> summarise_claims([])
    'No claim was judged.'
    """
    sentences = []
    for size in SIZES:
        sized = [record for record in records if record.size == size]
        identities = [record for record in sized if record.identity]
        empirical = [record for record in sized if not record.identity]
        where = "" if size == "default" else f" at the {size} size"
        verdicts = standing_verdicts(sized, family)
        if empirical:
            counts = counts_of(sized, verdicts)
            sentences.append(f"{counted(len(empirical), 'claim')}{where}: {counts}.")
        uncorrected = [
            record.name.replace("_", " ")
            for record, stands in zip(sized, verdicts, strict=True)
            if stands is False
        ]
        if uncorrected:
            claims = max(len(empirical), family.registered - len(identities))
            looks = family.further_looks(size)
            more = f" and {counted(looks, 'further look')}" if looks else ""
            sentences.append(
                "Verdicts that do not survive Holm's correction at 5 %, over "
                f"{counted(claims, 'claim')}{more}: {listed(uncorrected)}."
            )
        if identities:
            sentences.append(identity_sentence(identities, where))
    return " ".join(sentences) or "No claim was judged."


def counts_of(records: Sequence[ClaimRecord], verdicts: Sequence[bool | None]) -> str:
    """Count the verdicts on empirical claims of one size, after correction.

    The records include identities, which are not counted.
    """
    counts = dict.fromkeys((*VERDICTS[:-2], UNCORRECTED, *VERDICTS[-2:]), 0)
    for record, stands in zip(records, verdicts, strict=True):
        if not record.identity:
            counts[UNCORRECTED if stands is False else record.verdict] += 1
    return listed([f"{count} {word}" for word, count in counts.items() if count])


def identity_sentence(identities: Sequence[ClaimRecord], where: str) -> str:
    """Return a sentence that counts the identities, and those that were confirmed."""
    exact = sum(record.verdict == "supported" for record in identities)
    names = "identity" if len(identities) == 1 else "identities"
    return f"{len(identities)} {names}{where} (exact by construction): {exact} checked."


def outlook(record: ClaimRecord, look: str = "main") -> str:
    """Estimate how many new seeds will decide a test, and their CPU time.

    Return "" if the test is decided.

    The seeds must be new, because adding seeds to an undecided test doubles the rate of
    false verdicts. The time for the main test includes the control and the second test.

    >>> from types import SimpleNamespace
    >>> main = SimpleNamespace(more_seeds=6, seeds=(0, 1, 2))
    >>> outlook(SimpleNamespace(looks={"main": main}, cpu_minutes=1.0))
    '9 fresh seeds, about 3.0 CPU minutes, would probably settle it'
    """
    judged = record.looks[look]
    more = judged.more_seeds
    if not more:
        return ""
    fresh = len(judged.seeds) + more
    spent_minutes = record.cpu_minutes if look == "main" else record.minutes_of(look)
    minutes = spent_minutes / len(judged.seeds) * fresh
    takes = "" if math.isnan(minutes) else f", about {minutes:.1f} CPU minutes,"
    return f"{counted(fresh, 'fresh seed')}{takes} would probably settle it"


def standing_verdicts(
    records: Sequence[ClaimRecord], family: ClaimFamily
) -> list[bool | None]:
    """Apply Holm's correction over all empirical claims of the same size.

    Return True for each verdict that survives.

    Return None for identities, for undecided and unreplicated claims, and for the only
    empirical claim of a size. Registered claims without a record count as undecided."""
    survives: dict[int, bool] = {}
    for size in {record.size for record in records}:
        sized = [place for place, record in enumerate(records) if record.size == size]
        places = [place for place in sized if not records[place].identity]
        if len(places) == 1:
            continue
        unjudged = max(0, family.registered - len(sized))
        others = unjudged + family.further_looks(size)
        chances = [records[place].p for place in places] + [1.0] * others
        survives |= dict(zip(places, holm_rejections(chances), strict=False))
    return [
        survives.get(place) if record.verdict in DECIDED else None
        for place, record in enumerate(records)
    ]


def holm_rejections(chances: Sequence[float | None]) -> list[bool]:
    """Apply Holm's step-down procedure.

    Return the rejections in input order. A missing p counts as rejected.
    """
    rejected = [p is None for p in chances]
    order = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    for rank, (p, place) in enumerate(order):
        if 2 * p > FAMILY_LEVEL / (len(order) - rank):
            break
        rejected[place] = True
    return rejected


# --- All versions of a claim in the register, and all tests of each version.


def tabulate_attempts(attempts: Sequence[RegisterEntry]) -> Table:
    """Return a row for each test of a register entry,
    and a row for each entry without a test."""
    texts = ("claim", "date", "digest", "verdict", "looked", "size")
    more_texts = ("second look", "changed", "reason")
    columns = (
        *map(text_column, texts),
        Column("figure"),
        Column("second figure"),
        *map(text_column, more_texts),
    )
    rows = []
    for attempt in attempts:
        entry = (attempt.name, attempt.date[:10], attempt.digest)
        reason = (shortened("; ".join(attempt.differs)), attempt.reason)
        if not attempt.looks:
            rows.append(
                (*entry, MISSING, MISSING, MISSING, None, None, MISSING, *reason)
            )
        for look in attempt.looks:
            second = look["looks"]["second"]
            outcome = (
                look["verdict"],
                look["date"][:10],
                look["size"],
                look["looks"]["main"]["figure"],
                second["figure"],
                second["verdict"],
            )
            rows.append((*entry, *outcome, *reason))
    return Table(columns, tuple(rows))


def describe_attempt(attempt: RegisterEntry, stands: bool) -> str:
    """Describe an entry of the register in one line: its date, its reason, and the
    verdict of each test."""
    version = f"{attempt.digest}, the current version" if stands else attempt.digest
    sentence = (
        f"Registered on {attempt.date[:10]} as {version}: {attempt.reason.rstrip('.')}."
    )
    if attempt.replaces:
        more = (
            f" and {len(attempt.differs) - 3} more" if len(attempt.differs) > 3 else ""
        )
        sentence += (
            f" It changes {', '.join(attempt.differs[:3])}{more} of {attempt.replaces}."
        )
    for look in attempt.looks:
        main = look["looks"]["main"]
        low, high = main["interval"]
        judged = "Judged again" if "again" in look else "Looked at"
        sentence += f" {judged} on {look['date'][:10]} ({look['size']}): {look['verdict']}, {short(main['figure'])}"
        sentence += "." if low is None else f" ({short(low)} to {short(high)})."
    if attempt.looks:
        return sentence
    return f"{sentence} There is no look at it yet."
