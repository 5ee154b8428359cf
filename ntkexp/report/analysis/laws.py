"""The power laws of a sweep with the exponents of theory, in numbers and words, and the variance of the first kernel.

The variance of the first kernel K_0 over seeds is the mean of

    u_k = (k − 1)/k ‖K_k − (K_1 + … + K_{k−1})/(k − 1)‖²/‖K̄‖²,  k = 2 … n,    K̄ the mean of the n kernels at a point

over the training examples. Each seed but the first has one u_k, the distance of its kernel from the mean of the kernels
before it. Their mean is the unbiased variance relative to ‖K̄‖² (Helmert's transformation), and each seed has a law. If
all seeds have the same distribution, the differences are independent, which distances from K̄ are not. Otherwise, an
outlying seed would be part of every later mean. So seeds are sorted from the nearest to the farthest, in one order for
the sweep, and `dependence` corrects intervals for the remaining correlation. Seeds are comparable only if they learn
the same data.

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
    """Return u_k of every run that has one, by folder."""
    points = dict.fromkeys(run.point for run in sweep.runs)
    runs_by_point = [comparable(sweep, runs, point) for point in points]

    # kernels are large: at most two are in memory, and they are read again
    order = nearest_first([(list(here), squared_distances(here)) for here in runs_by_point])

    variances: dict[Path, float] = {}
    for here in runs_by_point:
        ordered = [here[seed] for seed in order if seed in here]
        folders = [run.path for run in ordered[1:]]
        variances |= zip(folders, spread(map(first_kernel, ordered)), strict=True)
    return {folder: {START_VARIANCE: value} for folder, value in variances.items()}


def comparable(sweep: Sweep, runs: Mapping[Path, Run], point: tuple[Level, ...]) -> dict[int, Run]:
    """Return the runs at one point with comparable first kernels, by their seeds; empty if there are fewer than two.

    They did not diverge, have undamaged first kernels and data, and learned the same data.
    """
    from ntkexp.records.kernels import read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    by_seed = {}
    data = set()
    for row in sweep.runs:
        run = runs.get(row.folder)
        if row.point != point or run is None or run.diverged:
            continue
        try:
            if 0 not in read_steps(run.sealed(KERNELS)):
                continue
            inputs = read_data(run.sealed("data.npz"))["train_inputs"]
            data.add(sha256(inputs.tobytes()).hexdigest())
        except Mistake:
            continue
        by_seed[row.seed] = run
    return by_seed if len(by_seed) > 1 and len(data) == 1 else {}


def squared_distances(here: Mapping[int, Run]) -> NDArray[np.float64]:
    """Return ‖K_s − K_t‖² of every two seeds at a point."""
    runs = list(here.values())
    squares = np.zeros((len(runs), len(runs)))
    for s, run in enumerate(runs):
        kernel = first_kernel(run)
        for t, other in enumerate(runs[:s]):
            squares[s, t] = squares[t, s] = ((kernel - first_kernel(other)) ** 2).sum()
    return squares


def nearest_first(points: Sequence[tuple[Sequence[int], NDArray[np.float64]]]) -> list[int]:
    """Sort seeds by their distances from the mean, from the nearest to the farthest, given their squared distances.

    The seed with the largest share of Σ‖K_s − K̄‖², averaged over its points, comes last. It is removed, and the shares
    of the others are computed again, because an outlying seed moves the mean so far that the others seem equally far
    from it. In this example the seeds are at 300, 1, 20 and −1.

    >>> places = np.array([300.0, 1.0, 20.0, -1.0])
    >>> nearest_first([(range(4), np.subtract.outer(places, places) ** 2)])
    [1, 3, 2, 0]
    """
    remaining = sorted({seed for seeds, _ in points for seed in seeds})
    order = list[int]()
    while remaining:
        shares: dict[int, list[float]] = {seed: [] for seed in remaining}
        for seeds, squares in points:
            places = [place for place, seed in enumerate(seeds) if seed in shares]
            of_point = shares_of(squares[np.ix_(places, places)])
            for place, share in zip(places, of_point, strict=True):
                shares[seeds[place]].append(share)
        farthest = max(remaining, key=lambda seed: (np.mean(shares[seed]), seed))
        remaining.remove(farthest)
        order.insert(0, farthest)
    return order


def shares_of(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each seed's share of Σ_s ‖K_s − K̄‖², given the squared distances D of n seeds.

    ‖K_s − K̄‖² = Σ_t D_st/n − Σ_tu D_tu/2n²
    """
    seeds = len(squares)
    total = squares.sum() / (2 * seeds) if seeds else 0.0
    return np.asarray((squares.mean(1) - total / seeds) / total) if total else np.zeros(seeds)


def spread(kernels: Iterable[NDArray[np.float64]]) -> list[float]:
    """Return u_k of every kernel but the first. Each kernel is used once."""
    parts = list[float]()
    count = 0
    total = None
    for count, kernel in enumerate(kernels, start=1):
        if total is None:
            total = kernel
            continue
        parts.append((count - 1) / count * float(((kernel - total / (count - 1)) ** 2).sum()))
        total = total + kernel
    size = 0.0 if total is None else float(((total / count) ** 2).sum())
    return [part / size if size else math.nan for part in parts]


def dependence(seeds: int) -> float:
    """Return the factor by which intervals are lengthened, because the n − 1 differences may be correlated.

    The worst case has a first seed without fluctuations, and equal variances of all others. Then
    D_k = X_k − (X_2 + … + X_{k−1})/(k − 1), and for k < l

        Cov(D_k, D_l) = −1/((k − 1)(l − 1)),    Var D_k = 1 + (k − 2)/(k − 1)²

    The squares D_k² correlate by at most ρ². The variance of a mean of m numbers with mean correlation r̄ is
    (1 + (m − 1) r̄)/(1 − r̄) times the variance that their spread suggests.

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
    """Return K_0 between the training examples, or at all evaluated points if those exclude training examples."""
    from ntkexp.records.kernels import read_snapshot, read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    steps = read_steps(run.path / KERNELS).tolist()
    kernel = read_snapshot(run.path / KERNELS, steps.index(0))
    return kernel[: kernel.shape[2]] if "train" in run.read else kernel


# --- The power laws of a sweep: a quantity along one axis, for each choice of the other axes.


@dataclass(frozen=True)
class Fitted:
    """A fit at one choice of the other axes: a law, or the reason why there is none."""

    fit: Fit
    others: Mapping[str, Level]
    law: PowerLaw | None
    reason: str = ""

    @property
    def comparison(self) -> IntervalComparison | None:
        """The comparison of the exponent with theory; None without a law or a theory."""
        expected = self.fit.expected
        if self.law is None or expected is None:
            return None
        return compare(self.law.exponent, expected)


def fitted(fit: Fit, table: pd.DataFrame, sweep: Sweep) -> list[Fitted]:
    """Fit the law along one axis, for each choice of the other axes."""
    others = [key for key in sweep.axes if key != fit.axis]
    if fit.axis not in sweep.axes:
        return [Fitted(fit, {}, None, f"{fit.axis} is not an axis of {sweep.name}")]
    groups = [tuple(run.axes[key] for key in others) for run in sweep.runs]
    fits = []
    for choice in dict.fromkeys(groups):
        values = dict(zip(others, choice, strict=True))
        try:
            law = law_of(fit, table[[group == choice for group in groups]])
            fits.append(Fitted(fit, values, law))
        except Mistake as mistake:
            fits.append(Fitted(fit, values, None, str(mistake)))
    return fits


def law_of(fit: Fit, table: pd.DataFrame) -> PowerLaw:
    """Fit the law of a quantity along an axis of numbers."""
    describe(fit.quantity)
    levels = table[fit.axis].tolist()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels):
        raise Mistake(f"{fit.axis} is not an axis of numbers")
    if fit.quantity not in table:
        needs = NEEDS if fit.quantity == START_VARIANCE else ""
        raise Mistake(f"no run yields {fit.quantity}{needs}")
    numbers = table[fit.quantity].to_numpy(dtype=float)
    law = power_law(np.array(levels, dtype=float), numbers, table["seed"].to_numpy(dtype=np.int64))
    if fit.quantity != START_VARIANCE:
        return law

    # the first seed of each point has no u_k, but counts as a run
    counts = table.groupby(fit.axis)[fit.quantity].count()
    points = int((counts > 0).sum())
    seeds = min(law.seeds + 1, table["seed"].nunique())
    with_first = replace(law, runs=law.runs + points, left_out=law.left_out - points, seeds=seeds)
    return with_first.widened(dependence(int(counts[counts > 0].min()) + 1))


def row_of(fitted: Fitted) -> dict[str, Level]:
    """Return the row of a fit in the table of laws."""
    fit = fitted.fit
    law = fitted.law
    comparison = fitted.comparison
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


# --- The laws of a sweep in words: interval, seeds, theory and verdict.


VERDICT = {"inside": "agrees", "above": "larger", "below": "smaller", "across": "undecided"}
"""The verdict on an exponent, by the place of its interval relative to the range of theory."""

SIGN: Mapping[Bound | None, str] = {None: "", "upper": "≤ ", "lower": "≥ "}


def law_in_words(fitted: Fitted, law: PowerLaw) -> str:
    """Return a sentence about one law: its exponent, the runs that were left out, and the verdict."""
    exponent = law.exponent
    axis = fitted.fit.axis.rpartition(".")[2].replace("_", " ")
    verb = "grows" if exponent.value > 0 else "falls"
    if exponent.covers(0.0) is not False:
        verb = "goes"
    seeds = counted(law.seeds, "seed")
    if law.units != law.seeds:
        seeds = f"{law.seeds} seeds, put together as {law.units}"
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
    expected = fitted.fit.expected
    comparison = fitted.comparison
    if expected is not None and comparison is not None:
        verdict = VERDICT[comparison.where]
        if comparison.where == "across" and exponent.known:
            if comparison.more is None:
                verdict += ", and more seeds would not settle it"
            else:
                verdict += f", {counted(comparison.more, 'more seed')} would probably settle it"
        parts.append(f"theory {limit(expected)}, margin {short(expected.margin)}: {verdict}")
    return "; ".join(parts) + "".join(f", {key}={value}" for key, value in fitted.others.items())


def limit(expected: Expected) -> str:
    """Spell the exponent or bound of theory.

    >>> limit(Expected(-0.5, bound="upper")), limit(Expected(1.0))
    ('≤ −0.5', '1')
    """
    return f"{SIGN[expected.bound]}{number(expected.value)}"


def summary(laws: Sequence[Fitted], draws: str) -> str:
    """Summarise all laws of a sweep and their verdicts; empty without laws.

    >>> summary([], "each drawing weights alone")
    ''
    """
    if not laws:
        return ""
    text = counted(len(laws), "law")
    fits = [law.law for law in laws if law.law is not None]
    if fits:
        has_interval = any(law.exponent.known for law in fits)
        interval = "with 95 % intervals" if has_interval else "without intervals"
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
    """Spell the range of some numbers.

    >>> extent([5, 3, 5]), extent([0.1, 0.1])
    ('3–5', '0.1')
    """
    return "–".join(short(number) for number in sorted({min(numbers), max(numbers)}))


def number(exponent: float) -> str:
    """Spell an exponent to two decimals.

    >>> number(-0.5), number(1.0)
    ('−0.5', '1')
    """
    if abs(exponent) < 0.005:
        return "0"
    return f"{exponent:.2f}".rstrip("0").rstrip(".").replace("-", "−")
