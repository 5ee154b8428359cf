"""What claims come to together: counts, and which verdicts stand by Holm's correction over all of them.

    p₍₁₎ ≤ p₍₂₎ ≤ …        the k-th stands while 2 p₍ⱼ₎ ≤ 5 %/(m − j + 1) for all j ≤ k

m counts all claims but identities, the undecided too, and p is doubled, because a verdict goes either way. Identities
leave nothing to chance: they stand.

>>> standing([0.001, None, 0.02, 0.5])
[True, True, False, False]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ntkexp.records.claim import ClaimRecord
from ntkexp.text import counted, listed

LEVEL = 0.05
VERDICTS = ("supported", "refuted", "undecided")


def summary(records: Sequence[ClaimRecord]) -> str:
    """Sum up claims in a sentence or two.

    >>> summary([])
    'No claim was judged.'
    """
    if not records:
        return "No claim was judged."
    counts = {word: sum(record.main.verdict == word for record in records) for word in VERDICTS}
    told = listed([f"{count} {word}" for word, count in counts.items() if count])
    many = f"{counted(len(records), 'claim')}: {told}"
    decided = [record for record in records if record.main.verdict != "undecided"]
    stand = sum(s for s, record in zip(standing(chances(records)), records, strict=True) if record in decided)
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


def standing(chances: Sequence[float | None]) -> list[bool]:
    """Find which stand, in the order given."""
    found = [p is None for p in chances]
    order = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    for rank, (p, place) in enumerate(order):
        if 2 * p > LEVEL / (len(order) - rank):
            break
        found[place] = True
    return found
