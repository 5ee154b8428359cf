"""Proof (a) if gradients were clipped by value, as by
`torch.nn.utils.clip_grad_value_`.

The optimizer used the gradient clamp(s g, −b, b),
where g is the gradient of the recorded examples:

    s    a loss scale, or the factor of an earlier clipping by norm. The elements that were not
         clipped determine s. `clipping.Factors` checks s
    b    one bound for all clipped parameters: the largest absolute value in the gradient that
         the optimizer used

Clipping multiplies element k of s g by e_k = min(1, b / |s g_k|). The same e multiplies
the gradient of every example, so the step stays linear in the examples, and their
contributions add up.

The proof has only two free numbers, s and b. Up to rounding, elements below b
must equal s g, and clipped elements must be ±b. So it rejects noise, changed signs, and
several bounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.clipping import (
    UNITS,
    StepFacts,
    ValueBound,
    bound_of,
    cancels,
    factor_of_parts,
    fit_factors,
    moved_by_units,
    near_power_of_two,
    unexplained,
)
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.shapes import Weights

Sign: TypeAlias = Callable[[Weights], Weights]
"""A function that returns the signature (random projection) of every tensor."""

HALVINGS = 40  # the search covers bounds down to 2^-40 times the largest element
MAX_ITERATIONS = 100  # iterations of Newton's method for a bound
STARTS = 4  # Newton's method starts from this many of the best bounds of the search
DIGITS = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # numbers of digits that users type for a bound
NEARLY_ONE = 1 - 1e-6  # the search begins at this fraction of the largest element


@dataclass(frozen=True)
class ValueClip:
    """The scale s and the bound b of a gradient that was clipped by value."""

    scale: float
    bound: float

    def of(self, gradient: Weights) -> Weights:
        """Return the clipped gradient clamp(s g, −b, b).

        >>> ValueClip(0.5, 1.0).of({"w": torch.tensor([1.0, -4.0])})
        {'w': tensor([ 0.5000, -1.0000])}
        """
        return {
            name: (self.scale * part).clamp(-self.bound, self.bound)
            for name, part in gradient.items()
        }

    def factors(self, gradient: Weights) -> Weights:
        """Return the factor of each element, e = min(1, b / |s g|),
        which is 1 where g = 0.

        >>> ValueClip(0.5, 1.0).factors({"w": torch.tensor([0.0, 1.0, -4.0])})
        {'w': tensor([1.0000, 1.0000, 0.5000])}
        """
        return {
            name: (self.bound / (self.scale * part).abs()).clamp(max=1.0)
            for name, part in gradient.items()
        }


@dataclass(frozen=True)
class GradientFactors:
    """The factors between the gradient g of the recorded examples and the gradient that
    the optimizer used, c e ⊙ g.

    Each parameter has a factor c. The elements of a parameter that was clipped by value
    also have factors e."""

    factors: Mapping[str, float]  # c of each parameter
    # relative distance of c e ⊙ g from the gradient that the optimizer used
    missed: float
    elements: Weights = field(default_factory=dict)  # e, for clipped parameters
    clipped: ValueBound | None = None

    def before_clipping(self, consumed: Weights) -> Weights:
        """Divide the gradient that the optimizer used by the
        factors e of its elements."""
        return {
            name: part / self.elements[name] if name in self.elements else part
            for name, part in consumed.items()
        }

    def smallest(self, names: Collection[str]) -> float:
        """Return the smallest factor c e of any element of the named parameters, or 0
        if `names` is empty."""
        factors = []
        for name in names:
            element = float(self.elements[name].min()) if name in self.elements else 1.0
            factors.append(self.factors[name] * element)
        return min(factors, default=0.0)


def gradient_factors(
    replayed: Weights,
    consumed: Weights,
    step: int,
    facts: StepFacts,
    tolerance: float,
    noise: Callable[[], Weights],
) -> GradientFactors:
    """Return the factors between the gradient g of the recorded examples and the
    gradient that the optimizer used. Raise if rounding does not explain the remaining
    distance.

    Args:
        replayed: gradient g.
        consumed: gradient that the optimizer used.
        step: index of the step, for the error message.
        facts: facts about the step, for the error message.
        tolerance: eps of the lower precision under autocast, or 0.
        noise: function that measures the rounding error
            of a gradient whose terms cancel.
    """
    fit = fit_factors(replayed, consumed, tolerance, noise)
    if fit.explains:
        return GradientFactors(fit.factors, fit.missed)

    # first try clipping of all parameters to one bound, then only of the parameters
    # that no factor explains
    rounding = bound_of(consumed, tolerance)
    for names in (tuple(consumed), fit.failing):
        ours = {name: replayed[name] for name in names}
        theirs = {name: consumed[name] for name in names}
        clip = clip_between(ours, theirs, rounding, fit.noise)
        if clip is None:
            continue
        elements = clip.factors(ours)
        count = sum(read_numbers([(part < 1).sum() for part in elements.values()]))
        return GradientFactors(
            factors={**fit.factors, **dict.fromkeys(names, clip.scale)},
            missed=distance_of(clip.of(ours), theirs),
            elements=elements,
            clipped=ValueBound(step, clip.bound, int(count), rounding),
        )
    raise unexplained(fit, step, facts)


def clip_between(
    replayed: Weights, consumed: Weights, rounding: float, noise: Weights
) -> ValueClip | None:
    """Return the clipping by value that leads from the gradient `replayed`
    to `consumed`, or None.

    Args:
        replayed: gradient g of the recorded examples.
        consumed: gradient that the optimizer used.
        rounding: bound on the relative rounding error of a gradient.
        noise: measured rounding error of g, for parameters whose gradient terms cancel.
    """
    bound = max(
        read_numbers([part.abs().max() for part in consumed.values() if part.numel()])
    )
    if not (bound > 0 and isfinite(bound)):
        return None

    # the scale s follows from the elements that were not clipped;
    # 1.0 if all elements were clipped
    least = (1 - rounding) * bound
    unclipped = {name: part.abs() < least for name, part in consumed.items()}
    pairs = [
        (replayed[name][mask].flatten(), consumed[name][mask].flatten())
        for name, mask in unclipped.items()
    ]
    fitted, missed = factor_of_parts(pairs)
    for scale in (near_power_of_two(fitted, max(missed, rounding)), 1.0):
        clip = ValueClip(scale, bound)
        if scale > 0 and leads_to(clip, replayed, consumed, rounding, noise):
            return clip
    return None


def leads_to(
    clip: ValueClip,
    replayed: Weights,
    consumed: Weights,
    rounding: float,
    noise: Weights,
) -> bool:
    """Return True if `consumed` equals clamp(s g, −b, b) up to rounding, where g is
    `replayed`, and `clip` gives s and b.

    At least one element of |s g| must exceed b by more than rounding. At these
    elements, `consumed` must be ±b up to rounding, because replays compute b."""
    count = 0
    for name, part in replayed.items():
        scaled = clip.scale * part
        larger = scaled.abs() - clip.bound > rounding * scaled.norm()
        gap = consumed[name][larger] - scaled[larger].sign() * clip.bound
        if not bool((gap.abs() <= rounding * clip.bound).all()):
            return False
        count += int(larger.sum())
    unscaled = {name: part / clip.scale for name, part in clip.of(replayed).items()}
    return count > 0 and cancels(unscaled, consumed, clip.scale, rounding, noise)


def distance_of(ours: Weights, theirs: Weights) -> float:
    """Return the relative distance ‖ours − theirs‖ / ‖theirs‖, over all parameters."""
    gap = torch.stack(
        [(ours[name] - part).norm() for name, part in theirs.items()]
    ).norm()
    size = torch.stack([part.norm() for part in theirs.values()]).norm()
    return float(gap / size)


# --- The bound from signatures.
#
# A replay knows the gradient g of the recorded examples. It knows only the signature σ
# of the gradient that the optimizer used. Let s be the scale, b the bound, and κ = b/s
# the threshold for |g|:
#
#     σ(clamp(s g, −b, b)) = s σ(g where |g| ≤ κ) + b σ(sign g where |g| > κ)
#
# If the set of clipped elements is known, this equation is linear in s and b. Each
# iteration of Newton's method solves it by least squares, and then recomputes κ and the
# set. The method begins at the best κ among powers of two times the largest element.


@dataclass
class ClipSearch:
    """A search for the scale and the bound of a clipping that reproduces the recorded
    signatures."""

    gradient: Weights  # gradient g of the recorded examples
    recorded: Weights  # signatures of the gradient that the optimizer used
    sign: Sign
    rounding: float  # bound on the relative rounding error of a gradient
    noise: Weights  # signatures of the measured rounding error of g
    # The trace stores some gradients in full, not as signatures. Clipping leaves their
    # largest elements at the bound, so these elements are candidates for the bound.
    largest: Sequence[float] = ()

    def find(self, earlier: Sequence[ValueClip]) -> ValueClip | None:
        """Return the clipping, or None if there is none.
        Try the clippings of earlier steps first."""
        for known in earlier:
            if self.explains(known):
                return known
        sizes = [part.abs().max() for part in self.gradient.values() if part.numel()]
        largest = NEARLY_ONE * max(read_numbers(sizes), default=0.0)
        starts = [largest * 2.0**-power for power in range(HALVINGS)]
        for start in sorted(starts, key=self.missed)[:STARTS]:
            clip = self.solved(start)
            if clip is not None and self.explains(clip):
                return self.with_equal_bits(clip)
        return None

    def explains(self, clip: ValueClip) -> bool:
        signature = self.sign(clip.of(self.gradient))
        return cancels(signature, self.recorded, 1.0, self.rounding, self.noise)

    def solved(self, threshold: float) -> ValueClip | None:
        """Return the scale s and the bound b by Newton's method,
        starting at b/s = `threshold`."""
        clip: ValueClip | None = None
        for _ in range(MAX_ITERATIONS):
            clip = self.least_squares(threshold)
            if clip is None or isclose(
                clip.bound / clip.scale, threshold, rel_tol=1e-15
            ):
                return clip
            threshold = clip.bound / clip.scale
        return clip

    def missed(self, threshold: float) -> float:
        """Clip |g| at `threshold`, and choose the best scale. Return the relative
        distance of the signature from the recorded one."""
        signature = self.sign(ValueClip(1.0, threshold).of(self.gradient))
        _, missed = factor_of_parts(
            [(signature[name], part) for name, part in self.parts]
        )
        return missed

    def least_squares(self, threshold: float) -> ValueClip | None:
        """Return the scale and the bound that fit the signatures best, if the elements
        with |g| > `threshold` are clipped."""
        inside = {
            name: part.where(part.abs() <= threshold, 0.0)
            for name, part in self.gradient.items()
        }
        outside = {
            name: part.sign().where(part.abs() > threshold, 0.0)
            for name, part in self.gradient.items()
        }
        columns = [self.joined(self.sign(inside)), self.joined(self.sign(outside))]
        if not bool(columns[0].any()):  # all elements were clipped
            bound = float(columns[1] @ self.target / (columns[1] @ columns[1]))
            return ValueClip(1.0, bound) if bound > 0 else None
        solution = torch.linalg.lstsq(
            torch.stack(columns, 1), self.target[:, None]
        ).solution
        scale, bound = solution.flatten().tolist()
        if not (scale > 0 and bound > 0):
            return None
        return ValueClip(near_power_of_two(scale, self.rounding), bound)

    def with_equal_bits(self, clip: ValueClip) -> ValueClip:
        """Return the clipping with the nearest bound that reproduces the recorded bits.
        If there is none, return `clip`.

        Try the largest elements of known gradients, then short decimal numbers as users
        type them, then the nearest floating-point numbers."""
        dtype = next(iter(self.gradient.values())).dtype
        trials = [
            *self.largest,
            *(float(f"{clip.bound:.{digits}g}") for digits in DIGITS),
        ]
        near = [
            bound
            for bound in trials
            if isclose(bound, clip.bound, rel_tol=self.rounding)
        ]
        near += [moved_by_units(clip.bound, unit, dtype) for unit in UNITS]
        for bound in near:
            trial = ValueClip(clip.scale, bound)
            signature = self.sign(trial.of(self.gradient))
            if all(torch.equal(signature[name], part) for name, part in self.parts):
                return trial
        return clip

    @property
    def parts(self) -> list[tuple[str, Tensor]]:
        return list(self.recorded.items())

    @property
    def target(self) -> Tensor:
        return self.joined(self.recorded)

    def joined(self, signatures: Weights) -> Tensor:
        return torch.cat([signatures[name].double() for name, _ in self.parts])
