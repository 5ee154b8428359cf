"""Complex numbers, pairs of real ones: a map that is linear in both parts acts on Δ, as Fourier transforms do.

Products, quotients and whole powers have the rules of real numbers. Beside them

    |z|      Re((z₀ + z₁)* Δz)/(|z₀| + |z₁|)         arg z    that of atan2(Im z, Re z)
    exp z    e^z₊ (1 − e^−d)/d Δz, d = z₊ − z₋,  z₊ the end with the larger real part
    A B      [Re A, Im A] times [[Re B, Im B], [−Im B, Re B]], so that weights meet inputs as real matrices
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.secant.rules import bilinear, choice, linear
from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule, total
from ntkexp.kernel.secant.rules.bilinear import in_batches
from ntkexp.kernel.secant.rules.binary import angle_by_height, angle_by_width, average
from ntkexp.kernel.secant.rules.choice import both
from ntkexp.kernel.secant.rules.elementwise import cos, elementwise, quotient, reciprocal, sin, whole_power


def parts(call: AbstractCall, value: Ends) -> tuple[Ends, Ends]:
    """Real and imaginary part, with their differences."""
    known = Ends(value.start, value.end, call.delta(value), value.from_weights, value.from_inputs)
    return known.view(lambda v: real(v, 0)), known.view(lambda v: real(v, 1))


def real(value: Tensor, part: int) -> Tensor:
    """One of the two parts of complex numbers."""
    return torch.view_as_real(value.resolve_conj())[..., part]


def put_together(call: AbstractCall) -> Tensor:
    """a + ib."""
    left, right = both(call)
    zeros = torch.zeros(call.start.shape, dtype=call.start.dtype.to_real(), device=call.start.device)
    deltas = (zeros if part.delta is None else part.delta for part in (left, right))
    return torch.complex(*deltas)


def polar(call: AbstractCall) -> Tensor:
    """r cos φ + i r sin φ."""
    size, angle = both(call)
    terms = []
    for slope, function in ((cos, torch.cos), (sin, torch.sin)):
        delta = None if angle.delta is None else call.slope(angle, partial(slope, call)) * angle.delta
        turned = Ends(function(angle.start), function(angle.end), delta, from_inputs=angle.from_inputs)
        terms.append(bilinear.multiply(call, size, turned, call.start.shape))
    return torch.complex(*terms)


def conjugate(call: AbstractCall) -> Tensor:
    """z*, worked out: torch cannot take many vectors at once back through its view of one."""
    return call.delta(call.args[0]).conj_physical()


def written(call: AbstractCall) -> Tensor:
    """One tensor into another, part by part: torch cannot differentiate it of complex numbers."""
    shown = tree_map(lambda v: Ends(v.start, v.end, change(call, v)) if isinstance(v, Ends) else v, call.args)
    deltas = [
        call.entry.op(*tree_map(lambda v, k=k: real(v.change, k) if isinstance(v, Ends) else v, shown), **call.kwargs)
        for k in (0, 1)
    ]
    return torch.complex(*deltas)


def change(call: AbstractCall, value: Ends) -> Tensor:
    """The difference of a complex number, which may be zero."""
    return torch.zeros_like(value.start, dtype=call.start.dtype) if value.delta is None else call.delta(value)


def length(call: AbstractCall) -> Tensor:
    """|z|, whose slope is nothing where both ends are zero."""
    value: Ends = call.args[0]
    return projected(call.slope(value, lambda z0, z1: quotient(z0 + z1, z0.abs() + z1.abs(), 0.0)), call.delta(value))


def projected(direction: Tensor, delta: Tensor) -> Tensor:
    """Re(w* Δz)."""
    return (torch.view_as_real(direction.resolve_conj()) * torch.view_as_real(delta.resolve_conj())).sum(-1)


def angle(call: AbstractCall) -> Tensor:
    """arg z."""
    width, height = parts(call, call.args[0])
    terms = [
        average(call, *sides, slope) * sides[0].change
        for sides, slope in (((height, width), angle_by_height), ((width, height), angle_by_width))
    ]
    return total(terms, call.start.shape)


def direction(call: AbstractCall) -> Tensor:
    """z/|z|: Δz·mean(1/|z|) − z̄ Δ|z|/(|z₀||z₁|), and nothing at zero, where torch says 0."""
    value: Ends = call.args[0]
    size = Ends(value.start.abs(), value.end.abs(), length(call))
    if not bool((size.start > 0).all() and (size.end > 0).all()):
        raise NoRule("the direction of a complex number that is zero")
    known = Ends(value.start, value.end, call.delta(value))
    return bilinear.divide(call, known, size, call.start.shape)


def exp(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    """By the end with the larger real part, so that nothing overflows; the same forwards and backwards."""
    ahead = real(z1 - z0, 0) >= 0
    high, d = torch.where(ahead, z1, z0), torch.where(ahead, z1 - z0, z0 - z1)
    return torch.exp(high) * quotient(-torch.expm1(-d), d, 1.0)


def power(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    """zⁿ for whole n ≥ 1; others have a cut."""
    n = call.args[1]
    if isinstance(n, Ends) or n != int(n) or n < 1:
        raise NoRule("a power of a complex number that is not whole and positive")
    return whole_power(int(n), z0, z1)


def matrices(left: Ends, right: Ends) -> tuple[Ends, Ends]:
    """Both factors of a product as real matrices."""
    return left.view(beside), right.view(above_and_below)


def beside(matrix: Tensor) -> Tensor:
    """[Re A, Im A]."""
    return torch.cat([real(matrix, 0), real(matrix, 1)], -1)


def above_and_below(matrix: Tensor) -> Tensor:
    """[[Re B, Im B], [−Im B, Re B]]."""
    re, im = real(matrix, 0), real(matrix, 1)
    return torch.cat([torch.cat([re, im], -1), torch.cat([-im, re], -1)], -2)


def one_number(pair: Tensor) -> Tensor:
    """[Re C, Im C] as C."""
    return torch.complex(*(part.contiguous() for part in pair.chunk(2, -1)))


def mm(call: AbstractCall) -> Tensor:
    left, right = call.args
    return one_number(call.product(*matrices(left, right)))


def mv(call: AbstractCall) -> Tensor:
    left, right = call.args
    return one_number(call.product(*matrices(left, right.view(lambda v: v[:, None]))))[:, 0]


def dot(call: AbstractCall) -> Tensor:
    left, right = call.args
    return one_number(call.product(*matrices(left.view(lambda v: v[None]), right.view(lambda v: v[:, None]))))[0, 0]


def addmm(call: AbstractCall) -> Tensor:
    """shift · bias + gain · left @ right."""
    bias, left, right = call.args
    terms = [] if bias.delta is None else [call.given["beta"] * call.delta(bias, call.start.shape)]
    if left.delta is not None or right.delta is not None:
        terms.append(call.given["alpha"] * one_number(call.product(*matrices(left, right))))
    return total(terms, call.start.shape)


def bmm(call: AbstractCall) -> Tensor:
    left, right = call.args
    batch, rows, columns = call.start.shape
    return one_number(in_batches(call, *matrices(left, right), torch.Size([batch, rows, 2 * columns])))


ALIKE = """
    _unsafe_view add alias as_strided cat clone constant_pad_nd copy cumsum detach diag_embed diagonal
    expand fill flip gather index index_add index_copy index_select mean neg new_zeros permute repeat reshape roll rot90
    rsub scatter scatter_add select slice split split_with_sizes squeeze stack sub sum t
    take trace transpose tril triu unbind unfold unsqueeze view zeros_like
"""
"""Linear operations, for which it does not matter what numbers are."""

FOURIER = "_fft_c2c _fft_c2r _fft_r2c"
VIEWS = "view_as_complex view_as_real"

COMPLEX: dict[str, Rule] = {
    **{name: linear.LINEAR[name] for name in ALIKE.split()},
    **dict.fromkeys((*FOURIER.split(), *VIEWS.split()), linear.first),
    **dict.fromkeys(("_conj", "_conj_physical"), conjugate),
    "_to_copy": linear.convert,
    **{name: bilinear.BILINEAR[name] for name in ("mul", "addcmul", "div", "addcdiv")},
    **{name: choice.MASK[name] for name in ("where", "masked_fill", "index_put")},
    "abs": length,
    **dict.fromkeys(("diagonal_scatter", "select_scatter", "slice_scatter"), written),
    "addmm": addmm,
    "angle": angle,
    "bmm": bmm,
    "complex": put_together,
    "dot": dot,
    "exp": partial(elementwise, exp),
    "mm": mm,
    "mv": mv,
    "polar": polar,
    "pow": partial(elementwise, power),
    "reciprocal": partial(elementwise, reciprocal),
    "sgn": direction,
}
"""The rules of operations that take or give complex numbers."""
