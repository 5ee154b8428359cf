"""What the casts of a loop under autocast cost, told beside what was found in the precision of the weights.

    f_T − f_0 = Σ contributions + decay + casts        f in the precision of the weights

At each step `casts` is what the rounding of the gradient did: the consumed one less that of the examples without casts,
to whose outputs the same came back. It is no example's. The loop's own outputs are those under casts; how far they are
from f is a figure of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.kernel.record.taping import columns
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


def away(called: CalledModule, end: Weights, queries: Inputs, outputs: Float[Tensor, "probe out"]) -> float:
    """The distance of the outputs from those under casts."""
    with torch.no_grad():
        return float((columns(called.under_casts, end, queries) - outputs).norm())


def cost_of_casts(found: xr.Dataset) -> str:
    """The sentence on casts; none, if there were none."""
    if "casts" not in found:
        return ""
    kind, moved = found.attrs["autocast"], float(((found["change"]) ** 2).sum() ** 0.5)
    ours, theirs = float((found["casts"] ** 2).sum() ** 0.5), float(found.attrs["away"])
    shares = [short(each / moved) if moved else short(each) for each in (ours, theirs)]
    return (
        f"autocast to {kind} moved gradients by up to {short(float(found['casts_error'].max()))} of themselves, and so "
        f"the outputs by {shares[0]} of what training changed, which no example added; outputs are read without casts, "
        f"{shares[1]} of that change away from those with them"
    )


def cost_of_rounding(found: xr.Dataset) -> str:
    """The sentence on rounding without casts, where it did more than half of the digits can hide."""
    share = float(found.attrs.get("rounding", 0.0))
    if share <= float(np.finfo(found["change"].dtype).eps) ** 0.5:
        return ""
    return (
        f"rounding did {short(share)} of what training changed: gradients that cancel were divided by their own size, "
        "which no example added; a larger eps of the optimizer mends it"
    )
