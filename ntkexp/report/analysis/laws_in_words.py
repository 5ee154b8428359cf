"""The laws of a sweep in words: each with its interval, the seeds behind it, theory's margin and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ntkexp.records.fit import Bound, Expected
from ntkexp.report.analysis.laws import Fitted
from ntkexp.report.analysis.power_law import PowerLaw
from ntkexp.report.analysis.verdict import Verdict, Word
from ntkexp.report.quantity import describe
from ntkexp.text import counted, short

WORDS: tuple[Word, ...] = ("agrees", "larger", "smaller", "undecided")
SIGN: Mapping[Bound | None, str] = {None: "", "upper": "≤ ", "lower": "≥ "}


def told(found: Fitted, law: PowerLaw) -> str:
    """Tell one law, and how it stands to theory."""
    where = "".join(f", {key}={value}" for key, value in found.others.items())
    bent = "; it bends" if law.curved else ""
    missing = f"; {law.left_out} of {law.runs + law.left_out} runs left out" if law.left_out else ""
    return f"{fitted(found, law)}{bent}{missing}{judged(found, law)}{where}"


def fitted(found: Fitted, law: PowerLaw) -> str:
    """Tell the exponent and its interval."""
    name = found.fit.axis.rpartition(".")[2].replace("_", " ")
    sure = law.exponent.covers(0.0) is False
    verb = "goes" if not sure else "grows" if law.exponent.value > 0 else "falls"
    return (
        f"The {describe(found.fit.quantity)} {verb} as {name} to the power {number(law.exponent.value)} ({over(law)})"
    )


def over(law: PowerLaw) -> str:
    """Tell the interval, and what it is over."""
    many = law.units == law.seeds
    what = counted(law.seeds, "seed") if many else f"{law.seeds} seeds, put together as {law.units}"
    if not law.exponent.known:
        return f"{what}, no interval"
    return f"{number(law.exponent.low)} to {number(law.exponent.high)}, 95 % over {what}"


def judged(found: Fitted, law: PowerLaw) -> str:
    """Tell theory's exponent, its margin, and the verdict."""
    expected, verdict = found.fit.expected, found.verdict
    if expected is None or verdict is None:
        return ""
    return f"; theory {limit(expected)}, margin {short(expected.margin)}: {said(verdict, law)}"


def limit(expected: Expected) -> str:
    """Spell what theory says, in few letters.

    >>> limit(Expected(-0.5, bound="upper")), limit(Expected(1.0))
    ('≤ −0.5', '1')
    """
    return f"{SIGN[expected.bound]}{number(expected.value)}"


def allowed(found: Fitted) -> str | None:
    """Spell theory's exponent with its margin; nothing where it has none."""
    expected = found.fit.expected
    return None if expected is None else f"{limit(expected)} ± {short(expected.margin)}"


def said(verdict: Verdict, law: PowerLaw) -> str:
    """Spell the verdict, and what would decide it."""
    if verdict.word != "undecided" or not law.exponent.known:
        return verdict.word
    if verdict.more is None:
        return "undecided, and more seeds would hardly decide"
    return f"undecided, {counted(verdict.more, 'more seed')} would probably decide"


def summary(laws: Sequence[Fitted], draws: str) -> str:
    """Sum up all laws of a sweep; nothing of none.

    >>> summary([], "each drawing weights alone")
    ''
    """
    if not laws:
        return ""
    fits = [law.law for law in laws if law.law is not None]
    interval = "with 95 % intervals" if any(law.exponent.known for law in fits) else "without intervals"
    many = "seed" + "s" * any(law.seeds != 1 for law in fits)
    over = f", {interval} over {extent([law.seeds for law in fits])} {many}, {draws}" if fits else ""
    without = f"; {len(laws) - len(fits)} of them not fitted" * (len(fits) < len(laws))
    return f"{counted(len(laws), 'law')}{over}{without}.{verdicts(laws)}"


def verdicts(laws: Sequence[Fitted]) -> str:
    """Count how those stand to theory of which it speaks."""
    judged = [(law.fit.expected, law.verdict) for law in laws if law.fit.expected and law.verdict]
    if not judged:
        return ""
    found = Counter(verdict.word for _, verdict in judged)
    words = ", ".join(f"{found[word]} {word}" for word in WORDS if found[word])
    margin = extent([expected.margin for expected, _ in judged])
    return f" Theory speaks of {len(judged)}, with a margin of {margin}: {words}. Each is judged by itself."


def extent(numbers: Sequence[float]) -> str:
    """Spell the extent from the least to the greatest.

    >>> extent([5, 3, 5]), extent([0.1, 0.1])
    ('3–5', '0.1')
    """
    return "–".join(short(number) for number in sorted({min(numbers), max(numbers)}))


def number(exponent: float) -> str:
    """Spell an exponent to two digits after the point.

    >>> number(-0.5), number(1.0)
    ('−0.5', '1')
    """
    return f"{exponent:.2f}".rstrip("0").rstrip(".").replace("-", "−") if abs(exponent) >= 0.005 else "0"
