"""The final check of an attribution: its parts must add up to the change
of the outputs.

    Σ contributions + decay + rounding + … = f_T − f_0        up to a tolerance of

    100 eps (‖f_0‖ + ‖f_T‖)                   rounding of the outputs
    + 4 Σ_s ‖J̄_s (eps θ_s ⊙ ±1)‖              rounding of the weights in each step s
    + Σ_s ‖J̄_s Δθ_s − Δf_s‖                   error of the secant of each step, proof (c)
    + 64 eps Σ|parts|                         rounding of the parts, at most 1 % of the change

J̄_s is the secant Jacobian of step s at the queries, and ±1 is a tensor of random signs.
The parts are the terms on the left side of the equation. If the check fails, it raises
an error.

The check also reports the cancellation of the contributions c, Σ|c| / |Σc|, and the
parameter that causes most of it. Contributions that cancel strongly still add up in
double precision, but a single contribution means little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel import Adjoint, Jacobian
from ntkexp.mistake import Mistake
from ntkexp.path.step_kernel import kernel_between
from ntkexp.records.results import FLOOR_EPS
from ntkexp.shapes import Weights
from ntkexp.stream import stream
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

# safety factor for the effect of rounded weights, which is measured in one random
# direction
WEIGHT_ROUNDING_FACTOR = 4
# rounding error of the parts, relative to Σ|parts|, in units of eps
PART_EPS = 64
# upper limit of the rounding error of the parts, relative to the change
MAX_PART_SHARE = 0.01
# for Σ|parts| / |Σ parts| above this, the check names the responsible parameter
MIN_CANCELLATION = 1e3
# number of elements whose absolute values are stored at once (2 MB)
MAGNITUDES_AT_ONCE = 2**18


@dataclass(frozen=True)
class Closing:
    """The result of the final check. Norms are over queries and outputs."""

    missed: float  # error of the sum, ‖Σ parts − change‖
    tolerance: float
    change: float  # ‖f_T − f_0‖
    cancellation: float  # Σ|contributions| / |Σ contributions|
    parameter: str  # name of the parameter with most of the cancellation, or empty

    @property
    def facts(self) -> dict[str, float | str]:
        """The result of the check, for the `attrs` of the attribution's data set."""
        facts: dict[str, float | str] = {
            "sum_error": self.relative(self.missed),
            "sum_tolerance": self.relative(self.tolerance),
            "cancellation": self.cancellation,
        }
        return facts | ({"cancels_in": self.parameter} if self.parameter else {})

    def relative(self, size: float) -> float:
        """Return a size relative to the change,
        or the size itself if nothing changed."""
        return size / self.change if self.change else size

    @property
    def sentence(self) -> str:
        """The result of the check in one sentence."""
        if not self.change:
            return "the outputs at the queries did not change"
        share = short(self.relative(self.missed))
        return (
            "the parts add up to the change of the outputs, with the relative error "
            f"{share}; contributions {self.cancel}"
        )

    @property
    def cancel(self) -> str:
        """The cancellation as a clause of a sentence."""
        where = f", mostly in '{self.parameter}'" if self.parameter else ""
        return f"cancel {self.cancellation:.3g} : 1{where}"

    def refuse(self) -> None:
        """Raise if the parts do not add up to the change within the tolerance."""
        if self.missed <= self.tolerance:
            return
        freeze = f", or freeze '{self.parameter}'" if self.parameter else ""
        share = short(self.relative(self.missed))
        bound = short(self.relative(self.tolerance))
        raise Mistake(
            f"the sum of the parts misses the change of the outputs by {share} of the "
            f"change, and rounding explains only {bound}; contributions {self.cancel}; "
            f"train in float64{freeze}"
        )


@dataclass
class ClosingSums:
    """Sums over the steps for the final check. They stay
    on the device until the end."""

    mass: Float[Tensor, "query out"]  # Σ|parts| of all steps
    unclosed: Float[Tensor, ""]  # errors of the secants, Σ_s ‖J̄Δθ − Δf‖
    noise: Float[Tensor, ""]  # effects of rounded weights, Σ_s ‖J̄ (eps θ ⊙ ±1)‖
    signs: Weights = field(default_factory=dict)  # ±1, drawn once for each parameter
    # largest Σ|parts| of a step whose parts cancel, and the parameter that contributes
    # most to it
    heaviest: float = 0.0
    parameter: str = ""

    @classmethod
    def at_zero(
        cls, outputs: Float[Tensor, "query out"], dtype: torch.dtype
    ) -> ClosingSums:
        zero = outputs.new_zeros((), dtype=dtype)
        return cls(torch.zeros_like(outputs, dtype=dtype), zero.clone(), zero.clone())

    def add_step(
        self,
        jacobian: Jacobian,
        weights: Weights,
        unclosed: Float[Tensor, "query out"],
        terms: Sequence[Float[Tensor, "query out"]],
    ) -> None:
        """Add one step.

        Args:
            jacobian: secant Jacobian J̄ of the step.
            weights: weights before the step.
            unclosed: J̄Δθ − Δf.
            terms: parts of the change in this step.
        """
        self.mass += torch.stack(list(terms)).abs().sum(0)
        self.unclosed += unclosed.norm()
        self.noise += jacobian.applied(self.rounded(weights)).norm()

    def rounded(self, weights: Weights) -> Weights:
        """Return eps θ ⊙ ±1, which is a perturbation of θ as large as rounding. The
        signs are the same in every step."""
        for name, weight in weights.items():
            if name not in self.signs:
                drawn = torch.randint(
                    0,
                    2,
                    weight.shape,
                    generator=stream("signs", weight.numel()),
                    dtype=torch.int8,
                )
                self.signs[name] = (2 * drawn - 1).to(weight.device)
        rounded: Weights = {}
        for name, weight in weights.items():
            signed = weight * self.signs[name]
            rounded[name] = signed.mul_(torch.finfo(weight.dtype).eps)
        return rounded

    def cancels_most(self, parts: Float[Tensor, "query out row"]) -> bool:
        """Return True if the parts of a step cancel strongly, and Σ|parts| is the
        largest of all such steps so far. In this case, store Σ|parts| as `heaviest`."""
        mass, net = torch.stack([parts.abs().sum(), parts.sum(2).abs().sum()]).tolist()
        if mass <= max(MIN_CANCELLATION * net, self.heaviest):
            return False
        self.heaviest = mass
        return True

    def find_parameter(
        self,
        adjoint: Adjoint,
        credited: Weights,
        right: Sequence[Jacobian],
        names: Sequence[str],
        like: Float[Tensor, "query out"],
    ) -> None:
        """Store the name of the parameter that causes more than half of the magnitude
        of a step's contributions, or "" if there is none.

        Args:
            adjoint: the adjoint U.
            credited: the credit of gradient elements, which multiplies U.
            right: the gradients gᵢ of the examples.
            names: parameters to compare.
            like: tensor with the shape of the outputs.
        """
        masses = {}
        for name in names:
            one = adjoint.of([name])
            masses[name] = float(
                kernel_between(one, (each.of([name]) for each in right), like, credited)
                .abs()
                .sum()
            )
        largest = max(masses, key=lambda name: masses[name])
        self.parameter = largest if 2 * masses[largest] > sum(masses.values()) else ""

    def check(
        self,
        contributions: Float[Tensor, "query out example"],
        total: Float[Tensor, "query out"],
        start: Float[Tensor, "query out"],
        end: Float[Tensor, "query out"],
    ) -> Closing:
        """Compare `total`, the sum of all parts, with the change of the outputs from
        `start` to `end`."""
        change = (end - start).to(total.dtype)
        eps = torch.finfo(end.dtype).eps
        change_norm = float(change.norm())
        outputs = FLOOR_EPS * eps * float(start.norm() + end.norm())
        parts = min(
            PART_EPS * eps * float(self.mass.norm()), MAX_PART_SHARE * change_norm
        )
        net = float(contributions.sum(2).abs().sum())
        return Closing(
            missed=float((total - change).norm()),
            tolerance=outputs
            + WEIGHT_ROUNDING_FACTOR * float(self.noise)
            + float(self.unclosed)
            + parts,
            change=change_norm,
            cancellation=total_magnitude(contributions) / net if net else 1.0,
            parameter=self.parameter,
        )


def total_magnitude(numbers: Tensor) -> float:
    """Return Σ|numbers| without allocating a second tensor of this size.

    >>> total_magnitude(torch.tensor([[1.0, -2.0], [3.0, -4.0]]))
    10.0
    """
    flat = numbers.flatten()
    buffer = torch.empty_like(flat[:MAGNITUDES_AT_ONCE])
    sums = [
        torch.abs(part, out=buffer[: len(part)]).sum()
        for part in torch.split(flat, MAGNITUDES_AT_ONCE)
    ]
    return float(torch.stack(sums).sum())


def norm_of_part(attribution: xr.Dataset, name: str) -> float:
    return float((attribution[name] ** 2).sum() ** 0.5)


def share_of(attribution: xr.Dataset, name: str) -> float:
    """Return the norm of a part, relative to the change if there is one."""
    change = norm_of_part(attribution, "change")
    size = norm_of_part(attribution, name)
    return size / change if change else size


# --- The effect of casts, for a loop under autocast or with frozen weights
# in half precision.
#
#     f_T − f_0 = Σ contributions + decay + rounding       f in the precision of the trained weights
#
# The optimizer used a gradient that was computed under casts. The contributions use the
# gradient without casts, for the same ∂L/∂f. `rounding` is the effect of the difference
# of the two gradients on the outputs. No example caused this effect.
#
# The loop also computes its outputs under casts. The attribute `away` is the distance
# of these outputs from f.


def casts_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on the effect of casts,
    or an empty string if there were none."""
    if "away" not in attribution.attrs:
        return ""
    causes = []
    if "frozen" in attribution.attrs:
        causes.append(f"frozen weights in {attribution.attrs['frozen']}")
    if "autocast" in attribution.attrs:
        causes.append(f"autocast to {attribution.attrs['autocast']}")
    of_outputs = float(attribution.attrs["away"]) / (
        norm_of_part(attribution, "change") or 1.0
    )
    return (
        f"{' and '.join(causes)} changed gradients by up to "
        f"{short(float(attribution['casts_error'].max()))} of their size; this moved the outputs by "
        f"{short(share_of(attribution, 'rounding'))} of their change (`rounding`), and no example caused it; "
        "outputs are computed without casts, and differ from those of the loop by "
        f"{short(of_outputs)} of the change"
    )


def rounding_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on rounding errors without casts. Return an empty string if
    their share of the change is at most √eps."""
    share = float(attribution.attrs.get("rounding", 0.0))
    if share <= float(np.finfo(attribution["change"].dtype).eps) ** 0.5:
        return ""
    if "rounds" in attribution.attrs:
        return (
            f"{attribution.attrs['rounds']} computes its steps in lower precision; the "
            f"rounding caused {short(share)} of the change of the outputs (`rounding`), "
            "and no example did"
        )
    return (
        f"rounding caused {short(share)} of the change of the outputs: gradients that "
        "cancel were divided by their own size, and no example caused this; a larger "
        "eps of the optimizer avoids it"
    )
