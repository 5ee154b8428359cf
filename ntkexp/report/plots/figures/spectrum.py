"""Do the largest kernel eigenvalues grow, and do they reach the edge of stability?

The edge of stability is λ = 2/(η w max ℓ″), with step size η and weight w of an example
in the loss. Gradient descent diverges along eigenvectors with larger eigenvalues."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import (
    BLACK,
    NARROW,
    End,
    brief,
    log_axis,
    name_ends,
    shade,
    step_axis,
)
from ntkexp.report.run import Run
from ntkexp.text import percent, short

TOP = 10
LOWERED = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw(run: Run, canvas: Canvas) -> Figure | None:
    spectra = [positive(run, f"eigenvalue_{k}") for k in range(1, TOP + 1)]
    spectra = [series for series in spectra if len(series)]
    if not spectra:
        return None
    axes = canvas.panels((NARROW, 2.5))[0, 0]
    ends = []
    for k, series in enumerate(spectra, start=1):
        ink = shade(k - 1, TOP)
        values = series[f"eigenvalue_{k}"]
        axes.plot(series["step"], values, ".-", color=ink, linewidth=1)
        name = f"λ{k}".translate(LOWERED)
        ends.append(End(name, float(values.iloc[-1]), ink))
    if len(ends) > 1:
        ends = [ends[0], ends[-1]]
    columns = positive(run, "lambda_max", "stability")
    edge = (columns["lambda_max"] / columns["stability"]).to_numpy()
    axes.plot(columns["step"], edge, "--", color=BLACK, linewidth=1)
    if len(edge):
        ends.append(End("edge", float(edge[-1]), BLACK))
    log_axis(axes, "y")
    axes.set(ylabel="eigenvalues of K(X, X)")
    step_axis(axes, run.last_step)
    name_ends(axes, ends)
    stability = positive(run, "stability")["stability"].to_numpy(dtype=float)
    largest = spectra[0]["eigenvalue_1"].to_numpy(dtype=float)
    return canvas.finish(answer(largest), caption(largest, stability))


def table(run: Run) -> pd.DataFrame:
    columns = [
        "step",
        *(f"eigenvalue_{k}" for k in range(1, TOP + 1)),
        "lambda_max",
        "stability",
    ]
    return run.metrics.reindex(columns=columns).dropna(subset=["eigenvalue_1"])


def positive(run: Run, *columns: str) -> pd.DataFrame:
    """Return the given columns at the steps where all their values are positive.

    A log axis needs this, because rounding makes some zero eigenvalues negative.
    """
    series = run.series(*columns)
    return series.loc[(series[list(columns)] > 0).all(axis=1)]


def answer(largest: NDArray[np.float64]) -> str:
    return brief(
        f"The largest eigenvalue {moved(largest)}",
        "The largest eigenvalues of the kernel",
    )


def caption(largest: NDArray[np.float64], stability: NDArray[np.float64]) -> str:
    words = f"The largest eigenvalue of the kernel {moved(largest)}"
    if not len(stability):
        return f"{words}."
    share = float(stability[-1])  # fraction of the edge of stability
    if share < 2:
        return f"{words}, {percent(share)} of the edge of stability."
    return f"{words}, {short(share)} times the edge of stability."


def moved(values: NDArray[np.float64]) -> str:
    """Describe how a number changed: its first and last value, and each extreme that
    does not lie between these two.

    >>> moved(np.array([1.0, 2.0])), moved(np.array([1.0, 3.0, 1.0])), moved(np.array([1.0, 1.001]))
    ('grows from 1 to 2', 'goes from 1 to 1, through 3', 'stays at 1')
    """
    first = float(values[0])
    last = float(values[-1])
    low, high = sorted((first, last))
    extremes = [float(values.min()), float(values.max())]
    beyond = [
        short(value) for value in extremes if not 0.995 * low <= value <= 1.005 * high
    ]
    ends = f"from {short(first)} to {short(last)}"
    if beyond:
        return f"goes {ends}, through {' and '.join(beyond)}"
    if high <= 1.005 * low:
        return f"stays at {short(last)}"
    if last > first:
        return f"grows {ends}"
    return f"falls {ends}"
