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

>>> spread([1.0, 2.0, 3.0], np.atleast_1d)  # variance 1, mean 2
[0.125, 0.375]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.data import read_data
from ntkexp.records.sweep import Bound, Expected, Fit, Level, Sweep
from ntkexp.report.analysis.estimate import PowerLaw, Verdict, Word, judge, power_law
from ntkexp.report.run import START_VARIANCE, Run, describe
from ntkexp.text import counted, short

NEEDS = ", which takes two seeds or more at a point, all on the same data, such as with data.seed=0"

KERNELS = "kernels.zarr"

T = TypeVar("T")


def start_variances(sweep: Sweep, runs: Mapping[Path, Run]) -> dict[Path, dict[str, float]]:
    """Find the number of every run that has one, by its name."""
    points = dict.fromkeys(place.point for place in sweep.runs)
    every = [comparable(sweep, runs, point) for point in points]
    order = nearest_first(
        [dict(zip(here, distances(list(here.values()), first_kernel), strict=True)) for here in every]
    )
    found: dict[Path, float] = {}
    for here in every:
        seeds = [here[seed] for seed in order if seed in here]
        found |= zip([run.path for run in seeds[1:]], spread(seeds, first_kernel), strict=True)
    return {folder: {START_VARIANCE: value} for folder, value in found.items()}


def comparable(sweep: Sweep, runs: Mapping[Path, Run], point: tuple[Level, ...]) -> dict[int, Run]:
    """Find the runs at one point whose first kernels can be compared, by their seeds; none where it is one alone."""
    here = {place.seed: runs[place.folder] for place in sweep.runs if place.point == point and place.folder in runs}
    found = {seed: run for seed, run in here.items() if not run.diverged and kept_start(run)}
    return found if len(found) > 1 and len(set(map(digest, found.values()))) == 1 else {}


def distances(seeds: Sequence[T], kernel: Callable[[T], NDArray[np.float64]]) -> list[float]:
    """Find ‖K_s − K̄‖² of every seed. Kernels are large, so each is read again and none is kept."""
    mean = reduce(np.add, map(kernel, seeds)) / len(seeds) if seeds else 0.0
    return [float(((kernel(seed) - mean) ** 2).sum()) for seed in seeds]


def nearest_first(points: Iterable[Mapping[int, float]]) -> list[int]:
    """Order seeds by their shares of what fluctuates, as means over the points at which they are.

    >>> nearest_first([{0: 3.0, 1: 1.0}, {0: 20.0, 1: 10.0, 2: 970.0}])
    [1, 0, 2]
    """
    shares: dict[int, list[float]] = {}
    for point in points:
        whole = sum(point.values()) or 1.0
        for seed, distance in point.items():
            shares.setdefault(seed, []).append(distance / whole)
    return sorted(shares, key=lambda seed: (float(np.mean(shares[seed])), seed))


def spread(seeds: Sequence[T], kernel: Callable[[T], NDArray[np.float64]]) -> list[float]:
    """Find u_k of every seed but the first, in this order."""
    if not seeds:
        return []
    total, parts = kernel(seeds[0]), list[float]()
    for k, seed in enumerate(seeds[1:], start=2):
        this = kernel(seed)
        parts.append((k - 1) / k * float(((this - total / (k - 1)) ** 2).sum()))
        total = total + this
    size = float(((total / len(seeds)) ** 2).sum())
    return [part / size if size else math.nan for part in parts]


def dependence(seeds: int) -> float:
    """Find the factor by which intervals have to be longer, because n − 1 differences may have something in common.

    They have most where the first seed hardly fluctuates and all others alike. D_k = X_k − (X_2 + … + X_{k−1})/(k − 1),
    so that for k < l

        Cov(D_k, D_l) = −1/((k − 1)(l − 1)),    Var D_k = 1 + (k − 2)/(k − 1)²

    and their squares, and what is found from these, correlate by ρ² at most. A mean of m numbers with correlations of
    r̄ on average varies (1 + (m − 1) r̄)/(1 − r̄) times as much as its spread says.

    >>> round(dependence(3) ** 2, 12), dependence(2)  # ρ² = 1/5
    (1.5, 1.0)
    """
    variance = {k: 1 + (k - 2) / (k - 1) ** 2 for k in range(2, seeds + 1)}
    shared = [((k - 1) * (m - 1)) ** -2 / (variance[k] * variance[m]) for k, m in combinations(variance, 2)]
    mean = sum(shared) / len(shared) if shared else 0.0
    return math.sqrt((1 + (seeds - 2) * mean) / (1 - mean))


def kept_start(run: Run) -> bool:
    """Whether the first kernel is there, as it was written, and so are the data."""
    from ntkexp.records.kernels import read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    try:
        return bool(run.sealed("data.npz")) and 0 in read_steps(run.sealed(KERNELS))
    except Mistake:
        return False


def first_kernel(run: Run) -> NDArray[np.float64]:
    """Read K_0 among the training examples, or at all points that were read if those were not."""
    from ntkexp.records.kernels import read_snapshot, read_steps  # noqa: PLC0415  the same

    steps = read_steps(run.path / KERNELS).tolist()
    kernel = read_snapshot(run.path / KERNELS, steps.index(0))
    return kernel[: kernel.shape[2]] if "train" in run.read else kernel


def digest(run: Run) -> str:
    """Digest what tells apart the data that runs learned."""
    return sha256(read_data(run.path / "data.npz")["train_inputs"].tobytes()).hexdigest()


# --- The power laws of a sweep: a quantity along one axis, for each choice of the others, beside the theory's
# exponent.


@dataclass(frozen=True)
class Fitted:
    """A fit was made at one choice of the other axes: it has a law, or there is a reason why not."""

    fit: Fit
    others: Mapping[str, Level]
    law: PowerLaw | None
    reason: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The exponent stands so to theory's, where there is one."""
        expected = self.fit.expected
        return None if self.law is None or expected is None else judge(self.law.exponent, expected)


def fitted(fit: Fit, table: pd.DataFrame, sweep: Sweep) -> list[Fitted]:
    """Fit the law along one axis, for each choice of the others."""
    others = [key for key in sweep.axes if key != fit.axis]
    if fit.axis not in sweep.axes:
        return [Fitted(fit, {}, None, f"{fit.axis} is no axis of {sweep.name}")]
    groups = dict.fromkeys(tuple(place.axes[key] for key in others) for place in sweep.runs)
    found = []
    for group in groups:
        here = [tuple(place.axes[key] for key in others) == group for place in sweep.runs]
        chosen = dict(zip(others, group, strict=True))
        try:
            found.append(Fitted(fit, chosen, law_of(fit, table[here])))
        except Mistake as mistake:
            found.append(Fitted(fit, chosen, None, str(mistake)))
    return found


def law_of(fit: Fit, table: pd.DataFrame) -> PowerLaw:
    """Fit the law of a quantity along an axis of numbers."""
    describe(fit.quantity)
    levels = table[fit.axis].tolist()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels):
        raise Mistake(f"{fit.axis} is no axis of numbers")
    if fit.quantity not in table:
        raise Mistake(f"no run yields {fit.quantity}{NEEDS if fit.quantity == START_VARIANCE else ''}")
    numbers = table[fit.quantity].to_numpy(dtype=float)
    law = power_law(np.array(levels, dtype=float), numbers, table["seed"].to_numpy(dtype=np.int64))
    return of_differences(law, table, fit) if fit.quantity == START_VARIANCE else law


def of_differences(law: PowerLaw, table: pd.DataFrame, fit: Fit) -> PowerLaw:
    """Count the seeds from which the first differences are taken, which have no number, and make up for what these
    have in common.
    """
    counts = table.groupby(fit.axis)[fit.quantity].count()
    points, seeds = int((counts > 0).sum()), min(law.seeds + 1, table["seed"].nunique())
    counted = replace(law, runs=law.runs + points, left_out=law.left_out - points, seeds=seeds)
    return counted.widened(dependence(int(counts[counts > 0].min()) + 1))


def row_of(found: Fitted) -> dict[str, Level]:
    """Write a law as a line of the table of laws."""
    fit, law, verdict = found.fit, found.law, found.verdict
    row: dict[str, Level] = {"quantity": fit.quantity, "axis": fit.axis, **found.others}
    if fit.expected is not None:
        row |= {"theory": fit.expected.value, "margin": fit.expected.margin, "bound": fit.expected.bound}
    if law is None:
        return row | {"note": found.reason}
    return row | {
        "exponent": law.exponent.value,
        "low": law.exponent.low,
        "high": law.exponent.high,
        "verdict": None if verdict is None else verdict.word,
        "more_seeds": None if verdict is None else verdict.more,
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


WORDS: tuple[Word, ...] = ("agrees", "larger", "smaller", "undecided")
SIGN: Mapping[Bound | None, str] = {None: "", "upper": "≤ ", "lower": "≥ "}


def told(found: Fitted, law: PowerLaw) -> str:
    """Tell one law, and how it stands to theory."""
    where = "".join(f", {key}={value}" for key, value in found.others.items())
    bent = "; it bends" if law.curved else ""
    missing = f"; {law.left_out} of {law.runs + law.left_out} runs left out" if law.left_out else ""
    return f"{fitted_in_words(found, law)}{bent}{missing}{judged(found, law)}{where}"


def fitted_in_words(found: Fitted, law: PowerLaw) -> str:
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
