"""When in training an example acted on a point: the path time by which half of what it added had been added.

    m_i(t) = |Σ_c K_t(x, xᵢ)_c ℓ′ᵢ(t)_c|,    half: ∫₀ʰ m_i = ½ ∫₀ᵀ m_i

from the tangent kernels that were kept, by the trapezoidal rule between them. What an optimizer with memory makes of a
gradient no kernel of a moment tells: there the second pass has seen it (`path.backward`), or nothing is said.
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
    return np.array([half(times, mass[:, i]) for i in range(mass.shape[1])])


def half(times: NDArray[np.float64], mass: NDArray[np.float64]) -> float:
    """Find where half of an integral lies, as a share of its range.

    >>> half(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    0.5
    """
    gathered = np.concatenate([[0.0], np.cumsum(np.diff(times) * (mass[1:] + mass[:-1]) / 2)])
    if not np.isfinite(gathered).all() or gathered[-1] <= 0 or times[-1] <= times[0]:
        return float("nan")
    return float((np.interp(gathered[-1] / 2, gathered, times) - times[0]) / (times[-1] - times[0]))
