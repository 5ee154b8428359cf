"""When in training an example acted on a point: the path time by which half of what it added had been added.

    m_i(t) = |Σ_c K_t(x, xᵢ)_c ℓ′ᵢ(t)_c|,    half: ∫₀ʰ m_i = ½ ∫₀ᵀ m_i

from the tangent kernels that were kept, by the trapezoidal rule between them; where there are phases, over the
example's own, at whose ends kernels are kept. What an optimizer with memory makes of a gradient no kernel of a moment
tells: there the second pass has seen it (`path.backward`), or nothing is said.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import HALF_BY
from ntkexp.records.metrics import RETRACED
from ntkexp.report.run import Run


def halfway(run: Run, rule: str, point: int, out: int) -> NDArray[np.float64]:
    """Find the share of the path time for each training example; NaN where it did nothing, or nothing was kept."""
    if (seen := run.by_rule(HALF_BY, rule)) is not None:
        return seen.isel(probe=point).sel(out=out).to_numpy().astype(float)
    gradients = run.kernels.get("output_gradient")
    unseen = (run.path / RETRACED).is_file() or "tangent" not in run.kernels
    if unseen or gradients is None or gradients.sizes["snapshot"] < 2:
        return np.full(run.kernels.sizes["train"], np.nan)
    steps = run.kernels["step"].to_numpy()
    times = run.metrics.set_index("step")["time"].reindex(steps).to_numpy(dtype=float)
    kernel = run.kernels["tangent"].isel(probe=point, out=out).to_numpy()
    mass = np.abs(np.einsum("sic,sic->si", kernel, gradients.to_numpy()))
    known = (own_phase(run, steps, i) for i in range(mass.shape[1]))
    return np.array([half_within(times, mass[:, i], own) for i, own in enumerate(known)])


def own_phase(run: Run, steps: NDArray[np.int64], example: int) -> slice:
    """Find those of the kept kernels, from where on an example is learned to where that ends: all, without phases."""
    if "train_phase" not in run.data:
        return slice(None)
    own = run.metrics["step"][run.metrics["phase"] == run.data["train_phase"][example]]
    if own.empty:
        return slice(0, 0)
    return slice(*np.searchsorted(steps, [own.iloc[0], own.iloc[-1] + 2]).tolist())


def half_within(times: NDArray[np.float64], mass: NDArray[np.float64], own: slice) -> float:
    """Find where half of an integral over some of its range lies, as a share of all of it.

    >>> half_within(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 9.0]), slice(0, 2))
    0.25
    """
    if not len(times[own]) or times[-1] <= times[0]:
        return float("nan")
    length = times[own][-1] - times[own][0]
    return float((times[own][0] - times[0] + half(times[own], mass[own]) * length) / (times[-1] - times[0]))


def half(times: NDArray[np.float64], mass: NDArray[np.float64]) -> float:
    """Find where half of an integral lies, as a share of its range.

    >>> half(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    0.5
    """
    gathered = np.concatenate([[0.0], np.cumsum(np.diff(times) * (mass[1:] + mass[:-1]) / 2)])
    if not np.isfinite(gathered).all() or gathered[-1] <= 0 or times[-1] <= times[0]:
        return float("nan")
    return float((np.interp(gathered[-1] / 2, gathered, times) - times[0]) / (times[-1] - times[0]))
