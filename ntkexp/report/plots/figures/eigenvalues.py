"""How does the whole spectrum of the kernel change?

The picture shows the eigenvalues of K(X, X) at a few steps. If there are several
outputs and many examples, K is traced over outputs. Eigenvalues that are only rounding
are not drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.figures.spectrum import moved
from ntkexp.report.plots.style import NARROW, End, brief, log_axis, name_ends, shade
from ntkexp.report.run import Run

MAX_SNAPSHOTS = 4  # number of drawn spectra
# kernel matrices with a larger side (examples times outputs) are traced over outputs
MAX_SIDE = 600
MAX_EXAMPLES = 2000  # no picture for more examples: it would take minutes

Array = NDArray[np.float64]


def draw(run: Run, canvas: Canvas) -> Figure | None:
    spectra = table(run)
    if spectra.empty:
        return None
    axes = canvas.panels((NARROW, 2.5))[0, 0]
    steps = spectra["step"].unique().tolist()
    ends = []
    for k, step in enumerate(steps):
        ink = shade(k, len(steps))
        spectrum = spectra[spectra["step"] == step]
        axes.plot(spectrum["rank"], spectrum["eigenvalue"], color=ink, linewidth=1)
        ends.append(End(f"step {step}", float(spectrum["eigenvalue"].iloc[-1]), ink))
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue of K(X, X)")
    name_ends(axes, ends)
    return canvas.finish(answer(run), caption(run))


def table(run: Run) -> pd.DataFrame:
    """Return the eigenvalues larger than rounding at a few steps, the largest first."""
    columns = ["step", "rank", "eigenvalue"]
    if "tangent" not in run.kernels or "train" not in run.points:
        return pd.DataFrame(columns=columns)
    stored = run.kernels["tangent"].isel(query=run.points["train"])
    if not stored.size or stored.sizes["train"] > MAX_EXAMPLES:
        return pd.DataFrame(columns=columns)
    rows = []
    snapshots = stored.sizes["snapshot"]
    chosen = np.unique(np.linspace(0, snapshots - 1, MAX_SNAPSHOTS).round().astype(int))
    for snapshot in chosen.tolist():
        kernel = stored.isel(snapshot=snapshot)
        eigenvalues = eigenvalues_of(kernel.to_numpy())
        step = int(run.kernels["step"].to_numpy()[snapshot])
        rows += [(step, rank, value) for rank, value in enumerate(eigenvalues, start=1)]
    return pd.DataFrame(rows, columns=columns)


def eigenvalues_of(kernel: Array) -> list[float]:
    """Return the eigenvalues of a kernel [query, out, train,
    out] that are larger than rounding."""
    examples, outputs, *_ = kernel.shape
    side = examples * outputs
    if side <= MAX_SIDE:
        matrix = kernel.reshape(side, side)
    else:
        matrix = np.einsum("qcmc->qm", kernel)
    if not np.isfinite(matrix).all():
        return []
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)[::-1]
    rounding = np.finfo(kernel.dtype).eps * len(matrix) * max(values[0], 0.0)
    return [float(value) for value in values if value > rounding]


def answer(run: Run) -> str:
    ranks = run.series("effective_rank")["effective_rank"].to_numpy(dtype=float)
    if len(ranks) < 2:
        return "The spectrum of the kernel over the steps"
    return brief(
        f"The effective rank {moved(ranks)}",
        "The spectrum of the kernel over the steps",
    )


def caption(run: Run) -> str:
    kernel = run.kernels["tangent"]
    words = (
        "All eigenvalues of the kernel between training examples that exceed rounding"
    )
    is_stored_as_trace = kernel.sizes["out"] < run.outputs
    is_too_large = kernel.sizes["train"] * kernel.sizes["out"] > MAX_SIDE
    if run.outputs > 1 and (is_stored_as_trace or is_too_large):
        return f"{words}, traced over outputs."
    return f"{words}."
