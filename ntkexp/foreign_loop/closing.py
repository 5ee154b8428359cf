"""The final check of an attribution: the parts add up to the change of the outputs, and how
strongly they cancel.

    Σ contributions + decay + rounding + … = f_T − f_0        to a tolerance of

    100 eps (‖f_0‖ + ‖f_T‖)                   outputs are rounded
    + 4 Σ_s ‖J̄_s (eps θ_s ⊙ ±1)‖              each step rounds the weights
    + Σ_s ‖J̄_s Δθ_s − Δf_s‖                   the secant of each step closes to this
    + 64 eps Σ|parts|                         parts are rounded, which counts for at most 1 % of the change

A result that misses its sum by more is refused. Parts that are far larger than their sum still add
up in double precision, but a single one of them says little: the check states the ratio, and the
parameter that causes it."""

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

WEIGHT_ROUNDING_FACTOR = 4  # times the rounding of weights in one random direction
PART_EPS = 64  # eps: rounding of parts, relative to Σ|parts|
MAX_PART_SHARE = 0.01  # of the change, that the rounding of parts may count
MIN_CANCELLATION = 1e3  # Σ|parts| / |Σ parts|: above it, a parameter is named
MAGNITUDES_AT_ONCE = 2**18  # numbers whose absolute values are held at once (2 MB)


@dataclass(frozen=True)
class Closing:
    """The check of one attribution. All sizes are norms over queries and outputs."""

    missed: float  # ‖Σ parts − change‖
    tolerance: float
    change: float  # ‖f_T − f_0‖
    cancellation: float  # Σ|contributions| / |Σ contributions|
    parameter: str  # that causes most of the cancellation, or nothing

    @property
    def facts(self) -> dict[str, float | str]:
        """The check as attributes of the data set."""
        facts: dict[str, float | str] = {
            "sum_error": self.relative(self.missed),
            "sum_tolerance": self.relative(self.tolerance),
            "cancellation": self.cancellation,
        }
        return facts | ({"cancels_in": self.parameter} if self.parameter else {})

    def relative(self, size: float) -> float:
        """Return a size relative to the change, or the size itself if nothing changed."""
        return size / self.change if self.change else size

    @property
    def sentence(self) -> str:
        """The check in one line."""
        if not self.change:
            return "the outputs at the queries did not change"
        share = short(self.relative(self.missed))
        return (
            f"the parts add up to the change of the outputs, to {share} of it; contributions "
            f"{self.cancel}"
        )

    @property
    def cancel(self) -> str:
        """How strongly contributions cancel, in words."""
        where = f", mostly in '{self.parameter}'" if self.parameter else ""
        return f"cancel {self.cancellation:.3g} : 1{where}"

    def refuse(self) -> None:
        """Refuse parts whose sum is not the change."""
        if self.missed <= self.tolerance:
            return
        freeze = f", or freeze '{self.parameter}'" if self.parameter else ""
        share = short(self.relative(self.missed))
        bound = short(self.relative(self.tolerance))
        raise Mistake(
            f"the parts of the examples miss the change of the outputs by {share} of it, where "
            "rounding explains "
            f"{bound}; contributions {self.cancel}; train in float64{freeze}"
        )


@dataclass
class ClosingSums:
    """Sums over the steps, for the check. They stay on the device until the end."""

    mass: Float[Tensor, "query out"]  # Σ|parts| of all steps
    unclosed: Float[Tensor, ""]  # Σ_s ‖J̄Δθ − Δf‖
    noise: Float[Tensor, ""]  # Σ_s ‖J̄ (eps θ ⊙ ±1)‖
    signs: Weights = field(default_factory=dict)
    heaviest: float = 0.0  # the largest Σ|parts| of a step that cancels
    parameter: str = ""

    @classmethod
    def at_zero(cls, outputs: Float[Tensor, "query out"], dtype: torch.dtype) -> ClosingSums:
        """Begin with no step."""
        zero = outputs.new_zeros((), dtype=dtype)
        return cls(torch.zeros_like(outputs, dtype=dtype), zero.clone(), zero.clone())

    def add_step(
        self,
        jacobian: Jacobian,
        weights: Weights,
        unclosed: Float[Tensor, "query out"],
        terms: Sequence[Float[Tensor, "query out"]],
    ) -> None:
        """Add the sizes of the terms of a step, its closure, and the effect of rounding its
        weights."""
        for term in terms:
            self.mass += term.abs()
        self.unclosed += unclosed.norm()
        self.noise += jacobian.applied(self.rounded(weights)).norm()

    def rounded(self, weights: Weights) -> Weights:
        """Return eps θ ⊙ ±1, with signs that are drawn once."""
        for name, weight in weights.items():
            if name not in self.signs:
                drawn = torch.randint(
                    0, 2, weight.shape, generator=stream("signs", weight.numel()), dtype=torch.int8
                )
                self.signs[name] = (2 * drawn - 1).to(weight.device)
        return {
            name: weight * self.signs[name] * torch.finfo(weight.dtype).eps
            for name, weight in weights.items()
        }

    def cancels_most(self, parts: Float[Tensor, "query out row"]) -> bool:
        """Note the mass of the parts of a step if they cancel and no step so far was heavier."""
        mass, net = torch.stack([parts.abs().sum(), parts.sum(2).abs().sum()]).tolist()
        if mass <= max(MIN_CANCELLATION * net, self.heaviest):
            return False
        self.heaviest = mass
        return True

    def find_parameter(
        self,
        adjoint: Adjoint,
        right: Sequence[Jacobian],
        names: Sequence[str],
        like: Float[Tensor, "query out"],
    ) -> None:
        """Find the parameter with more than half of the cancelling parts of a step."""
        masses = {}
        for name in names:
            one = adjoint.of([name])
            masses[name] = float(
                kernel_between(one, (each.of([name]) for each in right), like).abs().sum()
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
        """Compare the total of all parts with the change of the outputs."""
        change = (end - start).to(total.dtype)
        eps = torch.finfo(end.dtype).eps
        moved = float(change.norm())
        outputs = FLOOR_EPS * eps * float(start.norm() + end.norm())
        parts = min(PART_EPS * eps * float(self.mass.norm()), MAX_PART_SHARE * moved)
        net = float(contributions.sum(2).abs().sum())
        return Closing(
            missed=float((total - change).norm()),
            tolerance=outputs
            + WEIGHT_ROUNDING_FACTOR * float(self.noise)
            + float(self.unclosed)
            + parts,
            change=moved,
            cancellation=total_magnitude(contributions) / net if net else 1.0,
            parameter=self.parameter,
        )


def total_magnitude(numbers: Tensor) -> float:
    """Return Σ|numbers| without a second tensor of their size, which no memory plan counts.

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


# --- The cost of casts, for a loop under autocast or with frozen weights in short numbers.
#
#     f_T − f_0 = Σ contributions + decay + rounding        f in the precision of the weights that move
#
# At each step `rounding` is the effect of the consumed gradient minus the gradient of the examples
# without casts, for the same ∂L/∂f. It belongs to no example. The outputs of the loop itself are
# those under casts; their distance from f is reported apart.


def casts_sentence(found: xr.Dataset) -> str:
    """Return the sentence on casts, or an empty one if there were none."""
    if "away" not in found.attrs:
        return ""
    moved = float(((found["change"]) ** 2).sum() ** 0.5)
    named = {"frozen": "frozen weights in {}", "autocast": "autocast to {}"}
    causes = [said.format(found.attrs[name]) for name, said in named.items() if name in found.attrs]
    ours, theirs = float((found["rounding"] ** 2).sum() ** 0.5), float(found.attrs["away"])
    shares = [short(each / moved) if moved else short(each) for each in (ours, theirs)]
    return (
        f"{' and '.join(causes)} moved gradients by up to "
        f"{short(float(found['casts_error'].max()))} of themselves, "
        f"and so the outputs by {shares[0]} of what training changed, which no example added; "
        "outputs are read without "
        f"casts, {shares[1]} of that change away from those with them"
    )


def rounding_sentence(found: xr.Dataset) -> str:
    """Return the sentence on rounding without casts, if its share is larger than √eps."""
    share = float(found.attrs.get("rounding", 0.0))
    if share <= float(np.finfo(found["change"].dtype).eps) ** 0.5:
        return ""
    if "rounds" in found.attrs:
        return (
            f"{found.attrs['rounds']} rounds its steps to shorter numbers, which did "
            f"{short(share)} of what training "
            "changed (`rounding`), and no example did"
        )
    return (
        f"rounding did {short(share)} of what training changed: gradients that cancel were divided "
        "by their own size, "
        "which no example added; a larger eps of the optimizer avoids this"
    )
