"""What the kernel between two tasks, at the switch from one to the other, says of what learning the later one changes:

    Δf(x) ≈ −Σ_s η_s w K(x, B) r_s,    r_{s+1} = (1 − η_s w K(B, B)) r_s,    r_0 = ℓ′ at the switch,    x anywhere

with w the weight of an example of B in the loss. It is what happens where the kernel stays as it is, and it is known of
descent on all examples and the squared loss.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ntkexp.report.configuration import flat
from ntkexp.report.run import Run

Array = NDArray[np.float64]
PLAIN = {"loss": "squared", "optimizer": "gd", "optimizer.weight_decay": 0.0, "optimizer.clip_norm": None}
"""What a run must have been told."""


def foretold(run: Run, during: int, shift: int = 0) -> Array | None:
    """What the kernel at the switch to a phase, counted from 1, says at all points that were read, [point, out].

    Nothing where the run was told otherwise, or kept no kernel there. `shift` takes kernels with other examples of the
    phase, so many places on, for those with each.
    """
    told = flat(run.config)
    if any(told.get(key) != value for key, value in PLAIN.items()) or run.config["optimizer"]["layers"]:
        return None
    steps = run.metrics[run.metrics["phase"] == during]
    kept = np.flatnonzero(run.kernels["step"].isin(steps["step"].iloc[:1]))
    if not len(kept):
        return None
    learned = np.flatnonzero(run.contributions["example_phase"].to_numpy() == during)
    kernel = run.kernels["tangent"].isel(snapshot=kept[0]).to_numpy()[:, :, learned]
    missed = run.kernels["output_gradient"].isel(snapshot=kept[0]).to_numpy()[learned]
    weight = 1 / len(learned) if told["loss.reduction"] == "mean" else 1.0
    weight /= float(told["init.alpha"]) ** 2 if told["init.centred"] else 1.0
    own = kernel[run.points["train"]][learned]
    sizes = steps["step_size"].dropna().to_numpy() * weight
    return descended(np.roll(kernel, shift, axis=2), own, missed, sizes)


def descended(across: Array, own: Array, missed: Array, sizes: Array) -> Array:
    """Take steps of these sizes with kernels that stay.

    >>> one = np.ones((1, 1, 1, 1))
    >>> descended(2 * one, one, np.array([[4.0]]), np.array([0.5, 0.5])).tolist()  # −½·2·4 − ½·2·2
    [[-6.0]]
    """
    change = np.zeros(across.shape[:2])
    for size in sizes:
        change = change - size * np.tensordot(across, missed, axes=2)
        missed = missed - size * np.tensordot(own, missed, axes=2)
    return change
