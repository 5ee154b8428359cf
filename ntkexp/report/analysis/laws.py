"""The power laws of a sweep beside the theory's exponents, in numbers and in words, and the variance of the first
kernel.

The variance of the first kernel over seeds: how much of K_0 is chance.

    u_k = (k − 1)/k ‖K_k − (K_1 + … + K_{k−1})/(k − 1)‖²/‖K̄‖²,  k = 2 … n,    K̄ the mean of the n kernels at a point

A number of each seed but the first: how far its kernel is from the mean of those before it, among the training
examples. The mean of these numbers is the unbiased variance, relative to ‖K̄‖² (Helmert's transformation), and each seed
has a law of its own. Where all seeds fluctuate alike the differences are independent; distances from K̄ are not. Where
they do not, a seed that is far off would be in every mean after its own. So seeds are taken from the nearest to the
farthest, in one order for the whole sweep, and `dependence` makes up for what two differences still have in common. Two
seeds are one difference. Kernels have entries in common only where the seeds learn the same data.

>>> spread(map(np.atleast_1d, [1.0, 2.0, 3.0]))  # variance 1, mean 2
[0.125, 0.375]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.data import read_data
from ntkexp.records.sweep import Bound, Expected, Fit, Level, Sweep
from ntkexp.report.analysis.estimate import IntervalComparison, PowerLaw, compare, power_law
from ntkexp.report.analysis.quantities import START_VARIANCE, describe
from ntkexp.report.run import Run
from ntkexp.text import counted, short

NEEDS = ", which takes two seeds or more at a point, all on the same data, such as with data.seed=0"

KERNELS = "kernels.zarr"


def start_variances(sweep: Sweep, runs: Mapping[Path, Run]) -> dict[Path, dict[str, float]]:
    """The number u_k of every run that has one, by its name."""
    points = dict.fromkeys(run.point for run in sweep.runs)
    every = [comparable(sweep, runs, point) for point in points]

    # Kernels are large: they are read again rather than held, two at a time
    order = nearest_first([(list(here), squared_distances(here)) for here in every])

    variances: dict[Path, float] = {}
    for here in every:
        seeds = [here[seed] for seed in order if seed in here]
        variances |= zip(
            [run.path for run in seeds[1:]], spread(map(first_kernel, seeds)), strict=True
        )
    return {folder: {START_VARIANCE: value} for folder, value in variances.items()}


def comparable(sweep: Sweep, runs: Mapping[Path, Run], point: tuple[Level, ...]) -> dict[int, Run]:
    """The runs at one point whose first kernels can be compared, by their seeds; none where it is one alone.

    They did not diverge, have the first kernel and the data as they were written, and learned the same data.
    """
    from ntkexp.records.kernels import read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    by_seed, data = {}, set()
    for row in sweep.runs:
        run = runs.get(row.folder)
        if row.point != point or run is None or run.diverged:
            continue
        try:
            if 0 not in read_steps(run.sealed(KERNELS)):
                continue
            data.add(
                sha256(read_data(run.sealed("data.npz"))["train_inputs"].tobytes()).hexdigest()
            )
        except Mistake:
            continue
        by_seed[row.seed] = run
    return by_seed if len(by_seed) > 1 and len(data) == 1 else {}


def squared_distances(here: Mapping[int, Run]) -> NDArray[np.float64]:
    """‖K_s − K_t‖² of every two seeds at a point."""
    found, runs = np.zeros((len(here), len(here))), list(here.values())
    for one, run in enumerate(runs):
        kernel = first_kernel(run)
        for other, another in enumerate(runs[:one]):
            found[one, other] = found[other, one] = ((kernel - first_kernel(another)) ** 2).sum()
    return found


def nearest_first(points: Sequence[tuple[Sequence[int], NDArray[np.float64]]]) -> list[int]:
    """Order seeds by their squared distances from one another at each point, from the nearest to the farthest: the one
    that is farthest from the mean of all is the last; it is left out, and so on. What counts is a seed's share of what
    fluctuates, as a mean over the points at which it is.

    A seed that is far off moves the mean of all, and then the others seem equally far from it: to look once would not
    tell which of them fluctuates most. Here seeds are at 300, 1, 20 and −1.

    >>> places = np.array([300.0, 1.0, 20.0, -1.0])
    >>> nearest_first([(range(4), np.subtract.outer(places, places) ** 2)])
    [1, 3, 2, 0]
    """
    left, order = sorted({seed for seeds, _ in points for seed in seeds}), list[int]()
    while left:
        shares: dict[int, list[float]] = {seed: [] for seed in left}
        for seeds, squares in points:
            kept = [place for place, seed in enumerate(seeds) if seed in shares]
            for place, share in zip(kept, shares_of(squares[np.ix_(kept, kept)]), strict=True):
                shares[seeds[place]].append(share)
        farthest = max(left, key=lambda seed: (np.mean(shares[seed]), seed))
        left.remove(farthest)
        order.insert(0, farthest)
    return order


def shares_of(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """What part of Σ_s ‖K_s − K̄‖² each of n seeds has, from their squared distances.

    ‖K_s − K̄‖² = Σ_t D_st/n − Σ_tu D_tu/2n²
    """
    seeds = len(squares)
    whole = squares.sum() / (2 * seeds) if seeds else 0.0
    return np.asarray((squares.mean(1) - whole / seeds) / whole) if whole else np.zeros(seeds)


def spread(kernels: Iterable[NDArray[np.float64]]) -> list[float]:
    """u_k of every kernel but the first, in this order; each is looked at once."""
    parts, count, total = list[float](), 0, None
    for count, kernel in enumerate(kernels, start=1):
        if total is None:
            total = kernel
            continue
        parts.append((count - 1) / count * float(((kernel - total / (count - 1)) ** 2).sum()))
        total = total + kernel
    size = 0.0 if total is None else float(((total / count) ** 2).sum())
    return [part / size if size else math.nan for part in parts]


def dependence(seeds: int) -> float:
    """The factor by which intervals have to be longer, because n − 1 differences may have something in common.

    They have most where the first seed hardly fluctuates and all others alike. D_k = X_k − (X_2 + … + X_{k−1})/(k − 1),
    so that for k < l

        Cov(D_k, D_l) = −1/((k − 1)(l − 1)),    Var D_k = 1 + (k − 2)/(k − 1)²

    and their squares, and what is found from these, correlate by ρ² at most. A mean of m numbers with correlations of
    r̄ on average varies (1 + (m − 1) r̄)/(1 − r̄) times as much as its spread says.

    >>> round(dependence(3) ** 2, 12), dependence(2)  # ρ² = 1/5
    (1.5, 1.0)
    """
    variance = {k: 1 + (k - 2) / (k - 1) ** 2 for k in range(2, seeds + 1)}
    shared = [
        ((k - 1) * (m - 1)) ** -2 / (variance[k] * variance[m])
        for k, m in combinations(variance, 2)
    ]
    mean = sum(shared) / len(shared) if shared else 0.0
    return math.sqrt((1 + (seeds - 2) * mean) / (1 - mean))


def first_kernel(run: Run) -> NDArray[np.float64]:
    """K_0 among the training examples, or at all points that were read if those were not."""
    from ntkexp.records.kernels import read_snapshot, read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    steps = read_steps(run.path / KERNELS).tolist()
    kernel = read_snapshot(run.path / KERNELS, steps.index(0))
    return kernel[: kernel.shape[2]] if "train" in run.read else kernel


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
        raise Mistake(
            f"no run yields {fit.quantity}{NEEDS if fit.quantity == START_VARIANCE else ''}"
        )
    numbers = table[fit.quantity].to_numpy(dtype=float)
    law = power_law(np.array(levels, dtype=float), numbers, table["seed"].to_numpy(dtype=np.int64))
    if fit.quantity != START_VARIANCE:
        return law

    # The seeds from which the first differences are taken count too, though they have no number; and intervals make
    # up for what differences have in common
    counts = table.groupby(fit.axis)[fit.quantity].count()
    points, seeds = int((counts > 0).sum()), min(law.seeds + 1, table["seed"].nunique())
    whole = replace(law, runs=law.runs + points, left_out=law.left_out - points, seeds=seeds)
    return whole.widened(dependence(int(counts[counts > 0].min()) + 1))


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
