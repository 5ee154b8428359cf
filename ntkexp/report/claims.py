"""Claims as tables, and what they come to together: counts, and which verdicts stand by Holm's correction over all.

    p₍₁₎ ≤ p₍₂₎ ≤ …        the k-th stands while 2 p₍ⱼ₎ ≤ 5 %/(m − j + 1) for all j ≤ k

A verdict is that of a pair, the claim's own look and the second: supported if both are, with the larger p; not
replicated if its own is and the second is not; else that of its own look. Claims of one size are a family, m of them:
all that stand in the register, whether they were judged or not, but those that leave nothing to chance, which stand.
What is undecided or not replicated has p = 1, and p is doubled, because a verdict goes either way.

>>> holm_rejections([0.001, None, 0.02, 0.5])
[True, True, False, False]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ntkexp.records.claim import NOT_REPLICATED, ClaimRecord, Judgement
from ntkexp.records.register import RegisterEntry
from ntkexp.report.tables import Column, Table, format_text
from ntkexp.text import MISSING, counted, listed, short

LEVEL = 0.05
VERDICTS = ("supported", NOT_REPLICATED, "refuted", "undecided")
SIZES = ("default", "quick", "full")

ON_TERMINAL = (
    *("claim", "verdict", "figure", "95 % interval", "first expected"),
    *("control", "second look", "CPU minutes"),
)


def tabulate_claims(records: Sequence[ClaimRecord], registered: int = 0) -> Table:
    """Give a row per claim; `stands` says whether its verdict survives Holm's correction over all registered claims."""
    text = {
        name: Column(name, number=False)
        for name in ("claim", "verdict", "stands", "control", "second look")
    }
    columns = (
        *(
            text["claim"],
            text["verdict"],
            text["stands"],
            Column("figure"),
            Column("low"),
            Column("high"),
        ),
        *(Column("95 % interval"), text["control"], text["second look"]),
        Column(
            "CPU minutes",
            spell=lambda minutes: MISSING if math.isnan(minutes) else f"{minutes:.1f}",
        ),
        *(Column(name, number=False) for name in ("size", "source", "expected", "digest")),
        Column("first expected", number=False, heading="expected"),
    )
    rows = []
    for record, stands in zip(records, standing_verdicts(records, registered), strict=True):
        main = record.main
        verdict_stands = MISSING if stands is None else "yes" if stands else "no"
        rows.append((
            *(record.name, record.verdict, verdict_stands, main.figure, main.low, main.high, interval(main)),
            *(record.looks["control"].verdict, record.looks["second"].verdict, record.cpu_minutes),
            *(record.size, record.source, main.expected, record.digest, shortened(main.expected)),
        ))  # fmt: skip
    return Table(columns, tuple(rows))


def format_claims(records: Sequence[ClaimRecord], registered: int = 0) -> str:
    return format_text(tabulate_claims(records, registered).select(*ON_TERMINAL))


def interval(judged: Judgement) -> str:
    """Spell the interval; where chance has no part, there is none.

    >>> from types import SimpleNamespace
    >>> spell = lambda low, high, p=None: interval(SimpleNamespace(low=low, high=high, p=p, verdict="supported"))
    >>> spell(0.1, 0.2, 1e-3), spell(31.0, 31.0, 0.0), spell(1e-16, 2e-15)
    ('0.1 to 0.2', 'exact, no interval', 'errors 1e-16 to 2e-15')
    """
    if judged.low == judged.high:  # the same number for every seed
        return "exact, no interval"
    ends = f"{short(judged.low)} to {short(judged.high)}"
    identity = judged.p is None and judged.verdict != "undecided"  # decided without a probability
    return f"errors {ends}" if identity else ends


def shortened(expected: str) -> str:
    """Leave the parts but the first to the page.

    >>> shortened("slope −1 ± 0.1; slope −0.5 ± 0.1"), shortened("≤ 2 ± 0.1")
    ('slope −1 ± 0.1, and 1 more', '≤ 2 ± 0.1')
    """
    first, *others = expected.split("; ")
    return f"{first}, and {len(others)} more" if others else first


def summarise_claims(records: Sequence[ClaimRecord], registered: int = 0) -> str:
    """Sum up claims in a sentence or two for each size: verdicts of pairs, and how many stand.

    >>> summarise_claims([])
    'No claim was judged.'
    """
    sentences = []
    for size in SIZES:
        sized = [record for record in records if record.size == size]
        if not sized:
            continue
        counts = {word: sum(record.verdict == word for record in sized) for word in VERDICTS}
        words = listed([f"{count} {word}" for word, count in counts.items() if count])
        where = "" if size == "default" else f" at the {size} size"
        sentences.append(f"{counted(len(sized), 'claim')}{where}: {words}.")
        stands = [stood for stood in standing_verdicts(sized, registered) if stood is not None]
        if len(sized) > 1 and stands:
            family = max(len(sized), registered)
            sentences.append(
                f"By Holm's correction over all {family}, {sum(stands)} of {len(stands)} verdicts stand at 5 %."
            )
    return " ".join(sentences) or "No claim was judged."


def outlook(record: ClaimRecord, look: str = "main") -> str:
    """Say how many fresh seeds would probably settle a claim, and how long they take if each takes as long as
    those so far, seeds of the claim being seeds of all its looks; nothing where that is not the question.

    They are fresh because a look that was judged is spent: to judge it again with more seeds, which was not planned,
    doubles the false verdicts.

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
    minutes = (
        (record.cpu_minutes if look == "main" else record.minutes_of(look))
        / len(judged.seeds)
        * fresh
    )
    takes = "" if math.isnan(minutes) else f", about {minutes:.1f} CPU minutes,"
    return f"{counted(fresh, 'fresh seed')}{takes} would probably settle it"


def standing_verdicts(records: Sequence[ClaimRecord], registered: int = 0) -> list[bool | None]:
    """Find which verdicts survive Holm's correction over all claims of their size; None where nothing was decided.

    Claims that are registered and not among the records count as undecided.
    """
    stood: dict[int, bool] = {}
    for size in {record.size for record in records}:
        places = [place for place, record in enumerate(records) if record.size == size]
        chances = [records[place].p for place in places] + [1.0] * (registered - len(places))
        stood |= dict(zip(places, holm_rejections(chances), strict=False))
    decided = ("supported", "refuted")
    return [
        stood[place] if record.verdict in decided else None for place, record in enumerate(records)
    ]


def holm_rejections(chances: Sequence[float | None]) -> list[bool]:
    """Apply Holm's step-down procedure. Return the rejections in input order; a missing p counts as rejected."""
    rejected = [p is None for p in chances]
    order = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    for rank, (p, place) in enumerate(order):
        if 2 * p > LEVEL / (len(order) - rank):
            break
        rejected[place] = True
    return rejected


# --- What was said of a claim from its first version on, and what every look at each version found.


def tabulate_attempts(attempts: Sequence[RegisterEntry]) -> Table:
    """Give a row per look at an entry of the register, and one for an entry that was never looked at."""
    columns = (
        *(
            Column(name, number=False)
            for name in ("claim", "date", "digest", "verdict", "looked", "size")
        ),
        *(Column("figure"), Column("second figure")),
        *(Column(name, number=False) for name in ("second look", "changed", "reason")),
    )
    rows = []
    for attempt in attempts:
        about = (attempt.name, attempt.date[:10], attempt.digest)
        why = (shortened("; ".join(attempt.differs)), attempt.reason)
        if not attempt.looks:
            rows.append((*about, MISSING, MISSING, MISSING, None, None, MISSING, *why))
        for look in attempt.looks:
            main, second = look["looks"]["main"], look["looks"]["second"]
            found = (
                look["verdict"],
                look["date"][:10],
                look["size"],
                main["figure"],
                second["figure"],
            )
            rows.append((*about, *found, second["verdict"], *why))
    return Table(columns, tuple(rows))


def describe_attempt(attempt: RegisterEntry, stands: bool) -> str:
    """Say in a sentence or two what an entry of the register said, why, and what every look at it found."""
    said = "Stands since" if stands else "Said on"
    sentence = f"{said} {attempt.date[:10]} under {attempt.digest}: {attempt.reason.rstrip('.')}."
    if attempt.replaces:
        more = f" and {len(attempt.differs) - 3} more" if len(attempt.differs) > 3 else ""
        sentence += f" Other than {attempt.replaces} in {', '.join(attempt.differs[:3])}{more}."
    for look in attempt.looks:
        main = look["looks"]["main"]
        low, high = main["interval"]
        sentence += f" Looked at on {look['date'][:10]} ({look['size']}): {look['verdict']}, {short(main['figure'])}"
        sentence += "." if low is None else f" ({short(low)} to {short(high)})."
    return sentence if attempt.looks else f"{sentence} No look at it is on record."
