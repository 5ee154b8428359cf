"""Difference rules for complex numbers, which are treated as pairs of real numbers.

A linear map, such as a Fourier transform, is applied to the difference. Products,
quotients and integer powers have the same rules as for real numbers. A product of
complex matrices is written as a product of real matrices, so that it is a use of real
weights:

    A B = [Re A, Im A] times [[Re B, Im B], [−Im B, Re B]]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.secant.call import Call, Ends, NoRule, Rule, real_part, sum_terms
from ntkexp.kernel.secant.rules import bilinear, choice, linear
from ntkexp.kernel.secant.rules.binary import (
    angle_by_height,
    angle_by_width,
    averaged_slope,
)
from ntkexp.kernel.secant.rules.elementwise import (
    applied,
    cos,
    elementwise,
    elementwise_of_call,
    quotient,
    reciprocal,
    sin,
    whole_power,
)


def complex_of_parts(call: Call) -> Tensor:
    """Return the difference of a + ib: Δa + iΔb."""
    left, right = call.expanded_pair()
    zeros = torch.zeros(
        call.start.shape, dtype=call.start.dtype.to_real(), device=call.start.device
    )
    deltas = (zeros if part.delta is None else part.delta for part in (left, right))
    return torch.complex(*deltas)


def polar(call: Call) -> Tensor:
    """Return the difference of r e^{iφ}: Δ(r cos φ) + iΔ(r sin φ),
    by the product rule."""
    size, angle = call.expanded_pair()
    terms = []
    for slope, function in ((cos, torch.cos), (sin, torch.sin)):
        turned = applied(call, angle, function, slope)
        terms.append(bilinear.multiply(call, size, turned, call.start.shape))
    return torch.complex(*terms)


def write_parts(call: Call) -> Tensor:
    """Return the difference of an operation that writes one complex tensor into another.

    Apply the operation to the differences, separately for real and imaginary parts,
    because torch cannot differentiate it for complex numbers."""

    def difference(value: Any) -> Any:
        if not isinstance(value, Ends):
            return value
        if value.delta is None:
            return torch.zeros_like(value.start, dtype=call.start.dtype)
        return call.delta(value)

    deltas = tree_map(difference, call.args)
    parts = []
    for k in (0, 1):
        of_part = tree_map(
            lambda v, k=k: real_part(v, k) if isinstance(v, Tensor) else v, deltas
        )
        parts.append(call.entry.op(*of_part, **call.kwargs))
    return torch.complex(*parts)


def length(call: Call) -> Tensor:
    """Return Δ|z| = Re((z₀ + z₁)* Δz)/(|z₀| + |z₁|), which follows from Δ|z|² = (|z₀| +
    |z₁|) Δ|z|. Return 0 where z₀ = z₁ = 0."""
    value: Ends = call.args[0]
    direction = call.slope(
        value, lambda z0, z1: quotient(z0 + z1, z0.abs() + z1.abs(), 0.0)
    )
    delta = call.delta(value)
    return (
        torch.view_as_real(direction.resolve_conj())
        * torch.view_as_real(delta.resolve_conj())
    ).sum(-1)


def angle(call: Call) -> Tensor:
    """Return Δ arg z for arg z = atan2(Im z, Re z),
    by the averaged slopes in Im z and Re z."""
    value = call.expanded(call.args[0])
    width, height = (value.view(partial(real_part, part=k)) for k in (0, 1))
    terms = [
        averaged_slope(call, *sides, slope) * sides[0].change
        for sides, slope in (
            ((height, width), angle_by_height),
            ((width, height), angle_by_width),
        )
    ]
    return sum_terms(terms, call.start.shape)


def direction(call: Call) -> Tensor:
    """Return the difference of z/|z|: Δz·mean(1/|z|) − z̄ Δ|z|/(|z₀||z₁|). Raise NoRule
    if z is zero at the start or the end."""
    value: Ends = call.args[0]
    size = Ends(value.start.abs(), value.end.abs(), length(call))
    if not bool((size.start > 0).all() and (size.end > 0).all()):
        raise NoRule("the sign of a complex number that is zero at an end of a step")
    return bilinear.divide(call, call.expanded(value), size, call.start.shape)


def exp(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of eᶻ: e^z₊ (1 − e^−d)/d with d = z₊ − z₋. z₊ is z₀ or z₁,
    whichever has the larger real part, so that e^−d does not overflow."""
    ahead = real_part(z1 - z0, 0) >= 0
    high = torch.where(ahead, z1, z0)
    d = torch.where(ahead, z1 - z0, z0 - z1)
    return torch.exp(high) * quotient(-torch.expm1(-d), d, 1.0)


def power(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of zⁿ for an integer n ≥ 1: Σ_k z₀ᵏ z₁ⁿ⁻¹⁻ᵏ.
    Raise NoRule for other n."""
    n = call.args[1]
    if isinstance(n, Ends) or n != int(n) or n < 1:
        raise NoRule("a complex power whose exponent is not a positive integer")
    return whole_power(int(n), z0, z1)


def real_factors(left: Ends, right: Ends) -> tuple[Ends, Ends]:
    """Return the real factors [Re A, Im A] and [[Re B, Im B], [−Im B, Re B]] of A B."""

    def beside(a: Tensor) -> Tensor:
        return torch.cat([real_part(a, 0), real_part(a, 1)], -1)

    def above_and_below(b: Tensor) -> Tensor:
        re = real_part(b, 0)
        im = real_part(b, 1)
        return torch.cat([torch.cat([re, im], -1), torch.cat([-im, re], -1)], -2)

    return left.view(beside), right.view(above_and_below)


def from_parts(pair: Tensor) -> Tensor:
    return torch.complex(*(part.contiguous() for part in pair.chunk(2, -1)))


def mm(call: Call, left: Ends, right: Ends) -> Tensor:
    return from_parts(call.product(*real_factors(left, right)))


def addmm(call: Call) -> Tensor:
    """Return the difference of βx + αAB: β Δx + α Δ(AB)."""
    bias, left, right = call.args
    terms = []
    if bias.delta is not None:
        terms.append(call.arguments["beta"] * call.delta(bias, call.start.shape))
    if left.delta is not None or right.delta is not None:
        terms.append(call.arguments["alpha"] * mm(call, left, right))
    return sum_terms(terms, call.start.shape)


def bmm(call: Call) -> Tensor:
    left, right = call.args
    batch, rows, columns = call.start.shape
    return from_parts(
        bilinear.batch_product(
            call, *real_factors(left, right), torch.Size([batch, rows, 2 * columns])
        )
    )


SAME_FOR_COMPLEX = """
    _unsafe_view add alias as_strided cat clone constant_pad_nd copy cumsum detach diag_embed diagonal
    expand fill flip gather index index_add index_copy index_select mean neg new_zeros permute repeat reshape roll rot90
    rsub scatter scatter_add select slice split split_with_sizes squeeze stack sub sum t
    take trace transpose tril triu unbind unfold unsqueeze view zeros_like
"""
"""Linear operations whose rules hold for complex numbers too."""

FOURIER = "_fft_c2c _fft_c2r _fft_r2c"
VIEWS = "view_as_complex view_as_real"

COMPLEX: dict[str, Rule] = {
    **{name: linear.LINEAR[name] for name in SAME_FOR_COMPLEX.split()},
    **dict.fromkeys((*FOURIER.split(), *VIEWS.split()), linear.linear_in_first),
    # use conj_physical, because vmap cannot back-propagate through torch's lazily
    # conjugated view
    **dict.fromkeys(
        ("_conj", "_conj_physical"),
        lambda call: call.delta(call.args[0]).conj_physical(),
    ),
    "_to_copy": linear.convert,
    **{name: bilinear.BILINEAR[name] for name in ("mul", "addcmul", "div", "addcdiv")},
    **{name: choice.CHOICE[name] for name in ("where", "masked_fill", "index_put")},
    "abs": length,
    **dict.fromkeys(
        ("diagonal_scatter", "select_scatter", "slice_scatter"), write_parts
    ),
    "addmm": addmm,
    "angle": angle,
    "bmm": bmm,
    "complex": complex_of_parts,
    "dot": lambda call: mm(call, call.args[0][None], call.args[1][:, None])[0, 0],
    "exp": partial(elementwise, exp),
    "mm": lambda call: mm(call, *call.args),
    "mv": lambda call: mm(call, call.args[0], call.args[1][:, None])[:, 0],
    "polar": polar,
    "pow": partial(elementwise_of_call, power),
    "reciprocal": partial(elementwise, reciprocal),
    "sgn": direction,
}
"""The rules of operations that take or return complex numbers."""
