"""Claims as tables, and what they come to together: counts, and which verdicts stand by Holm's correction over all.

    p₍₁₎ ≤ p₍₂₎ ≤ …        the k-th stands while 2 p₍ⱼ₎ ≤ 5 %/(m − j + 1) for all j ≤ k

m counts all claims but identities, the undecided too, and p is doubled, because a verdict goes either way. Identities
leave nothing to chance: they stand.

>>> holm_rejections([0.001, None, 0.02, 0.5])
[True, True, False, False]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ntkexp.records.claim import ClaimRecord, Judgement
from ntkexp.report.tables import Column, Table, format_text
from ntkexp.text import MISSING, counted, listed, short

LEVEL = 0.05
VERDICTS = ("supported", "refuted", "undecided")

ON_TERMINAL = (
    *("claim", "verdict", "figure", "95 % interval", "first expected"),
    *("control", "second look", "CPU minutes"),
)


def tabulate_claims(records: Sequence[ClaimRecord]) -> Table:
    """Give a row per claim; `stands` says whether the verdict survives Holm's correction over all of them."""
    text = {name: Column(name, number=False) for name in ("claim", "verdict", "stands", "control", "second look")}
    columns = (
        *(text["claim"], text["verdict"], text["stands"], Column("figure"), Column("low"), Column("high")),
        *(Column("95 % interval"), text["control"], text["second look"]),
        Column("CPU minutes", spell=lambda minutes: MISSING if math.isnan(minutes) else f"{minutes:.1f}"),
        *(Column(name, number=False) for name in ("size", "source", "expected", "digest")),
        Column("first expected", number=False, heading="expected"),
    )
    rows = []
    for record, stands in zip(records, holm_rejections(chances(records)), strict=True):
        main = record.main
        verdict_stands = MISSING if main.verdict == "undecided" else "yes" if stands else "no"
        rows.append((
            *(record.name, main.verdict, verdict_stands, main.figure, main.low, main.high, interval(main)),
            *(record.looks["control"].verdict, record.looks["second"].verdict, record.cpu_minutes),
            *(record.size, record.source, main.expected, record.digest, shortened(main.expected)),
        ))  # fmt: skip
    return Table(columns, tuple(rows))


def format_claims(records: Sequence[ClaimRecord]) -> str:
    return format_text(tabulate_claims(records).select(*ON_TERMINAL))


def interval(judged: Judgement) -> str:
    return f"{short(judged.low)} to {short(judged.high)}"


def shortened(expected: str) -> str:
    """Leave the parts but the first to the page.

    >>> shortened("slope −1 ± 0.1; slope −0.5 ± 0.1"), shortened("≤ 2 ± 0.1")
    ('slope −1 ± 0.1, and 1 more', '≤ 2 ± 0.1')
    """
    first, *others = expected.split("; ")
    return f"{first}, and {len(others)} more" if others else first


def summarise_claims(records: Sequence[ClaimRecord]) -> str:
    """Sum up claims in a sentence or two.

    >>> summarise_claims([])
    'No claim was judged.'
    """
    if not records:
        return "No claim was judged."
    counts = {word: sum(record.main.verdict == word for record in records) for word in VERDICTS}
    words = listed([f"{count} {word}" for word, count in counts.items() if count])
    many = f"{counted(len(records), 'claim')}: {words}"
    decided = [record for record in records if record.main.verdict != "undecided"]
    stand = sum(s for s, record in zip(holm_rejections(chances(records)), records, strict=True) if record in decided)
    if len(records) == 1 or not decided:
        return f"{many}."
    return f"{many}. By Holm's correction over all {len(records)}, {stand} of {len(decided)} verdicts stand at 5 %."


def outlook(record: ClaimRecord, look: str = "main") -> str:
    """Say how many more seeds would probably decide a look at a claim, and how long they take if each takes as long as
    those so far, more seeds of the claim being more of all its looks; nothing where that is not the question.

    >>> from types import SimpleNamespace
    >>> main = SimpleNamespace(more_seeds=6, seeds=(0, 1, 2))
    >>> outlook(SimpleNamespace(looks={"main": main}, cpu_minutes=1.0))
    '6 more seeds, about 2.0 CPU minutes, would probably decide'
    """
    judged = record.looks[look]
    more = judged.more_seeds
    if not more:
        return ""
    minutes = (record.cpu_minutes if look == "main" else record.minutes_of(look)) / len(judged.seeds) * more
    takes = "" if math.isnan(minutes) else f", about {minutes:.1f} CPU minutes,"
    return f"{counted(more, 'more seed')}{takes} would probably decide"


def chances(records: Sequence[ClaimRecord]) -> list[float | None]:
    """Find the p of each verdict: 1 where there is none, nothing where chance has no part in it."""
    return [1.0 if record.main.verdict == "undecided" else record.main.p for record in records]


def holm_rejections(chances: Sequence[float | None]) -> list[bool]:
    """Find which stand, in the order given."""
    unknown = [p is None for p in chances]
    order = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    for rank, (p, place) in enumerate(order):
        if 2 * p > LEVEL / (len(order) - rank):
            break
        unknown[place] = True
    return unknown
