"""The power laws of a sweep, compared with theory, as table rows and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Bound, Expected, Fit, Level, Sweep
from ntkexp.report.analysis.estimate import IntervalComparison, compare
from ntkexp.report.analysis.power_law import PowerLaw, power_law
from ntkexp.report.analysis.quantities import describe
from ntkexp.text import counted, short


@dataclass(frozen=True)
class Fitted:
    """The power law of a quantity along one axis of a sweep,
    at fixed values of the other axes.

    `law` is None if the fit failed; `reason` then explains why.
    """

    fit: Fit
    others: Mapping[str, Level]
    law: PowerLaw | None
    reason: str = ""

    @property
    def comparison(self) -> IntervalComparison | None:
        """The comparison of the exponent with theory, or None if either is missing."""
        if self.law is None or self.fit.expected is None:
            return None
        return compare(self.law.exponent, self.fit.expected)


def fitted(fit: Fit, table: pd.DataFrame, sweep: Sweep) -> list[Fitted]:
    """Fit a power law along one axis, for each combination of values
    of the other axes."""
    if fit.axis not in sweep.axes:
        return [Fitted(fit, {}, None, f"{fit.axis} is not an axis of {sweep.name}")]
    other_axes = [key for key in sweep.axes if key != fit.axis]
    choices = [tuple(run.axes[key] for key in other_axes) for run in sweep.runs]
    fits = []
    for choice in dict.fromkeys(choices):
        others = dict(zip(other_axes, choice, strict=True))
        rows = table[[other == choice for other in choices]]
        try:
            fits.append(Fitted(fit, others, law_of(fit, rows)))
        except Mistake as mistake:
            fits.append(Fitted(fit, others, None, str(mistake)))
    return fits


def law_of(fit: Fit, table: pd.DataFrame) -> PowerLaw:
    describe(fit.quantity)  # raises if there is no such quantity
    levels = table[fit.axis].tolist()
    if not all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in levels
    ):
        raise Mistake(f"{fit.axis} is not an axis of numbers")
    if fit.quantity not in table:
        raise Mistake(f"no run yields {fit.quantity}")
    x = np.array(levels, dtype=float)
    y = table[fit.quantity].to_numpy(dtype=float)
    return power_law(x, y, table["seed"].to_numpy(dtype=np.int64))


def row_of(fitted: Fitted) -> dict[str, Level]:
    """Return the row of a fit in <sweep>.fits.csv."""
    fit = fitted.fit
    law = fitted.law
    comparison = fitted.comparison
    row: dict[str, Level] = {
        "quantity": fit.quantity,
        "axis": fit.axis,
        **fitted.others,
    }
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
        "verdict": None if comparison is None else WORD_OF_PLACE[comparison.where],
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


# --- The laws of a sweep in words.


WORD_OF_PLACE = {
    "inside": "agrees",
    "above": "larger",
    "below": "smaller",
    "across": "undecided",
}
"""The verdict on an exponent, by the position of its interval relative to the range of
theory (see `compare`)."""

SIGN: Mapping[Bound | None, str] = {None: "", "upper": "≤ ", "lower": "≥ "}


def law_in_words(fitted: Fitted, law: PowerLaw) -> str:
    """Describe a law in one sentence: exponent, interval, omitted runs,
    comparison with theory."""
    axis = fitted.fit.axis.rpartition(".")[2].replace("_", " ")
    exponent = law.exponent
    verb = "grows" if exponent.value > 0 else "falls"
    if exponent.covers(0.0) is not False:
        verb = "goes"

    seeds = counted(law.seeds, "seed")
    if law.units != law.seeds:
        seeds = f"{law.seeds} seeds in {law.units} groups"
    interval = f"{seeds}, no interval"
    if exponent.known:
        interval = (
            f"{number(exponent.low)} to {number(exponent.high)}, 95 % over {seeds}"
        )

    parts = [
        f"The {describe(fitted.fit.quantity)} {verb} as {axis} to the power "
        f"{number(exponent.value)} ({interval})"
    ]
    if law.curved:
        parts.append("it bends")
    if law.left_out:
        parts.append(f"{law.left_out} of {law.runs + law.left_out} runs left out")
    if (expected := fitted.fit.expected) is not None:
        verdict = verdict_in_words(compare(exponent, expected), known=exponent.known)
        parts.append(
            f"theory {limit(expected)}, margin {short(expected.margin)}: {verdict}"
        )
    return "; ".join(parts) + "".join(
        f", {key}={value}" for key, value in fitted.others.items()
    )


def verdict_in_words(comparison: IntervalComparison, *, known: bool) -> str:
    verdict = WORD_OF_PLACE[comparison.where]
    if comparison.where != "across" or not known:
        return verdict
    if comparison.more is None:
        return f"{verdict}, and more seeds would not settle it"
    return (
        f"{verdict}, {counted(comparison.more, 'more seed')} would probably settle it"
    )


def limit(expected: Expected) -> str:
    """Format the exponent that theory predicts, after ≤ or ≥ if theory gives a bound.

    >>> limit(Expected(-0.5, bound="upper")), limit(Expected(1.0))
    ('≤ −0.5', '1')
    """
    return f"{SIGN[expected.bound]}{number(expected.value)}"


def summary(laws: Sequence[Fitted], draws: str) -> str:
    """Summarise the laws of a sweep and their verdicts. Return "" if there are no laws.

    `draws` describes what each seed draws at random.

    >>> summary([], "each drawing weights alone")
    ''
    """
    if not laws:
        return ""
    text = counted(len(laws), "law")
    fits = [law.law for law in laws if law.law is not None]
    if fits:
        known = any(law.exponent.known for law in fits)
        interval = "with 95 % intervals" if known else "without intervals"
        many = "seed" + "s" * any(law.seeds != 1 for law in fits)
        text += (
            f", {interval} over {extent([law.seeds for law in fits])} {many}, {draws}"
        )
    if len(fits) < len(laws):
        text += f"; {len(laws) - len(fits)} not fitted"

    margins = []
    verdicts = Counter[str]()
    for law in laws:
        if law.fit.expected is not None and law.comparison is not None:
            margins.append(law.fit.expected.margin)
            verdicts[WORD_OF_PLACE[law.comparison.where]] += 1
    if not margins:
        return f"{text}."
    counts = ", ".join(
        f"{verdicts[word]} {word}" for word in WORD_OF_PLACE.values() if verdicts[word]
    )
    return (
        f"{text}. Theory predicts {len(margins)}, with a margin of {extent(margins)}: {counts}. "
        "Each verdict is without correction for the number of laws."
    )


def extent(numbers: Sequence[float]) -> str:
    """Format the range from the smallest to the largest number.

    >>> extent([5, 3, 5]), extent([0.1, 0.1])
    ('3–5', '0.1')
    """
    return "–".join(short(number) for number in sorted({min(numbers), max(numbers)}))


def number(exponent: float) -> str:
    """Format an exponent with two decimals.

    >>> number(-0.5), number(1.0)
    ('−0.5', '1')
    """
    if abs(exponent) < 0.005:
        return "0"
    return f"{exponent:.2f}".rstrip("0").rstrip(".").replace("-", "−")
