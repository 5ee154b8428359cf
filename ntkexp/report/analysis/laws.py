"""The power laws of a sweep beside the exponents of theory, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Bound, Expected, Fit, Level, Sweep
from ntkexp.report.analysis.estimate import IntervalComparison, PowerLaw, compare, power_law
from ntkexp.report.analysis.quantities import describe
from ntkexp.text import counted, short

# --- The power laws of a sweep: a quantity along one axis, for each choice of the others, beside the theory's
# exponent.


@dataclass(frozen=True)
class Fitted:
    """A fit at one choice of the other axes: it has a law, or there is a reason why not."""

    fit: Fit
    others: Mapping[str, Level]
    law: PowerLaw | None
    reason: str = ""

    @property
    def comparison(self) -> IntervalComparison | None:
        """The exponent beside theory's, where there is one."""
        expected = self.fit.expected
        return (
            None if self.law is None or expected is None else compare(self.law.exponent, expected)
        )


def fitted(fit: Fit, table: pd.DataFrame, sweep: Sweep) -> list[Fitted]:
    """Fit the law along one axis, for each choice of the others."""
    others = [key for key in sweep.axes if key != fit.axis]
    if fit.axis not in sweep.axes:
        return [Fitted(fit, {}, None, f"{fit.axis} is not an axis of {sweep.name}")]
    groups = [tuple(run.axes[key] for key in others) for run in sweep.runs]
    fits = []
    for group in dict.fromkeys(groups):
        chosen = dict(zip(others, group, strict=True))
        try:
            fits.append(Fitted(fit, chosen, law_of(fit, table[[each == group for each in groups]])))
        except Mistake as mistake:
            fits.append(Fitted(fit, chosen, None, str(mistake)))
    return fits


def law_of(fit: Fit, table: pd.DataFrame) -> PowerLaw:
    """Fit the law of a quantity along an axis of numbers."""
    describe(fit.quantity)
    levels = table[fit.axis].tolist()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels):
        raise Mistake(f"{fit.axis} is not an axis of numbers")
    if fit.quantity not in table:
        raise Mistake(f"no run yields {fit.quantity}")
    numbers = table[fit.quantity].to_numpy(dtype=float)
    seeds = table["seed"].to_numpy(dtype=np.int64)
    return power_law(np.array(levels, dtype=float), numbers, seeds)


def row_of(fitted: Fitted) -> dict[str, Level]:
    fit, law, comparison = fitted.fit, fitted.law, fitted.comparison
    row: dict[str, Level] = {"quantity": fit.quantity, "axis": fit.axis, **fitted.others}
    if fit.expected is not None:
        row |= {
            "theory": fit.expected.value,
            "margin": fit.expected.margin,
            "bound": fit.expected.bound,
        }
    if law is None:
        return row | {"note": fitted.reason}
    return row | {
        "exponent": law.exponent.value,
        "low": law.exponent.low,
        "high": law.exponent.high,
        "verdict": None if comparison is None else VERDICT[comparison.where],
        "more_seeds": None if comparison is None else comparison.more,
        "curvature": law.curvature.value,
        "curvature_low": law.curvature.low,
        "curvature_high": law.curvature.high,
        "curved": law.curved,
        "prefactor": law.prefactor,
        "from": law.start,
        "to": law.stop,
        "points": law.points,
        "runs": law.runs,
        "seeds": law.seeds,
        "left_out": law.left_out,
    }


# --- The laws of a sweep in words: each with its interval, the seeds behind it, theory's margin and the verdict.


VERDICT = {"inside": "agrees", "above": "larger", "below": "smaller", "across": "undecided"}
"""What is said of an exponent, by where its interval lies beside theory's range."""

SIGN: Mapping[Bound | None, str] = {None: "", "upper": "≤ ", "lower": "≥ "}


def law_in_words(fitted: Fitted, law: PowerLaw) -> str:
    """One law: its exponent with the interval, what was left out, and how it stands to theory."""
    exponent, axis = law.exponent, fitted.fit.axis.rpartition(".")[2].replace("_", " ")
    verb = (
        "goes" if exponent.covers(0.0) is not False else "grows" if exponent.value > 0 else "falls"
    )
    seeds = (
        counted(law.seeds, "seed")
        if law.units == law.seeds
        else f"{law.seeds} seeds, put together as {law.units}"
    )
    interval = f"{seeds}, no interval"
    if exponent.known:
        interval = f"{number(exponent.low)} to {number(exponent.high)}, 95 % over {seeds}"
    parts = [
        f"The {describe(fitted.fit.quantity)} {verb} as {axis} to the power {number(exponent.value)} ({interval})"
    ]
    if law.curved:
        parts.append("it bends")
    if law.left_out:
        parts.append(f"{law.left_out} of {law.runs + law.left_out} runs left out")
    expected, comparison = fitted.fit.expected, fitted.comparison
    if expected is not None and comparison is not None:
        verdict = VERDICT[comparison.where]
        if comparison.where == "across" and exponent.known:
            more = (
                ""
                if comparison.more is None
                else f", {counted(comparison.more, 'more seed')} would probably settle it"
            )
            verdict += more or ", and more seeds would not settle it"
        parts.append(f"theory {limit(expected)}, margin {short(expected.margin)}: {verdict}")
    return "; ".join(parts) + "".join(f", {key}={value}" for key, value in fitted.others.items())


def limit(expected: Expected) -> str:
    """Spell what theory says, in few letters.

    >>> limit(Expected(-0.5, bound="upper")), limit(Expected(1.0))
    ('≤ −0.5', '1')
    """
    return f"{SIGN[expected.bound]}{number(expected.value)}"


def summary(laws: Sequence[Fitted], draws: str) -> str:
    """Sum up all laws of a sweep, and how those stand to theory of which it speaks; nothing of none.

    >>> summary([], "each drawing weights alone")
    ''
    """
    if not laws:
        return ""
    text = counted(len(laws), "law")
    fits = [law.law for law in laws if law.law is not None]
    if fits:
        interval = (
            "with 95 % intervals"
            if any(law.exponent.known for law in fits)
            else "without intervals"
        )
        many = "seed" + "s" * any(law.seeds != 1 for law in fits)
        text += f", {interval} over {extent([law.seeds for law in fits])} {many}, {draws}"
    if len(fits) < len(laws):
        text += f"; {len(laws) - len(fits)} of them not fitted"
    judged = [
        (law.fit.expected, law.comparison) for law in laws if law.fit.expected and law.comparison
    ]
    if not judged:
        return f"{text}."
    counts = Counter(VERDICT[comparison.where] for _, comparison in judged)
    words = ", ".join(f"{counts[word]} {word}" for word in VERDICT.values() if counts[word])
    margin = extent([expected.margin for expected, _ in judged])
    return f"{text}. Theory speaks of {len(judged)}, with a margin of {margin}: {words}. Each is judged by itself."


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
    return (
        f"{exponent:.2f}".rstrip("0").rstrip(".").replace("-", "−")
        if abs(exponent) >= 0.005
        else "0"
    )
