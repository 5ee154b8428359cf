"""Slopes (σ(z₁) − σ(z₀))/(z₁ − z₀) against fifty digits, wherever the two ends lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from ntkexp.kernel.record.tape import Entry
from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.rules.elementwise import DERIVATIVES, NEAR, SLOPES

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny  # below it numbers have fewer digits
DIGITS = 50


@dataclass(frozen=True)
class Known:
    """A function to fifty digits, its derivative, and how far its slope may be off, in eps."""

    function: Callable[[mpf], mpf]
    derivative: Callable[[mpf], mpf]
    bound: Callable[[float, float], float]  # of the larger |z| and the slope's own size
    positive: bool = False
    args: tuple[float, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_of(name: str, known: Known) -> Call:
    """What a slope reads of its call: the numbers beside the tensor."""
    packet, call = getattr(torch.ops.aten, name), Call.__new__(Call)  # of no chord
    call.args, call.kwargs = (None, *known.args), known.kwargs
    op = packet.default if "default" in packet.overloads() else packet.Tensor_Scalar
    call.entry = Entry(op, call.args, call.kwargs, (), ())
    return call


def logistic(z: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-z))


def logistic_slope(z: mpf) -> mpf:
    return logistic(z) * logistic(-z)


def softplus(z: mpf) -> mpf:
    """As torch has it, the same number beyond 20."""
    return z if z > 20 else mpmath.log1p(mpmath.exp(z))


def power_bound(z: float, slope: float) -> float:
    """p log(z₁/z₀) is rounded before exp is taken."""
    return 100 * slope


def tanh_gelu(z: mpf) -> mpf:
    return z / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mp.pi) * (z + mpf(0.044715) * z**3)))


def absolute(z: float, slope: float) -> float:
    """Sums of numbers up to one: a few eps whatever the size of the slope."""
    return 4.0


def scaled(z: float, slope: float) -> float:
    return 8 * (1 + z)


def relative(z: float, slope: float) -> float:
    """Products and quotients without cancellation."""
    return 8 * slope


def turned(z: float, slope: float) -> float:
    """(z₀ ± z₁)/2 is rounded before sin and cos are taken, which turns the angle by eps·|z|."""
    return 2 * (1 + z)


def quotient(z: float, slope: float) -> float:
    """erf has no closed form of its slope: two roundings of numbers up to one, divided by at least NEAR."""
    return 2 / NEAR


KNOWN: dict[str, Known] = {
    "abs": Known(abs, mpmath.sign, relative),
    "celu": Known(
        lambda z: max(z, 0) + mpf(0.1) * mpmath.expm1(min(z, 0) / mpf(0.1)),
        lambda z: 1 if z > 0 else mpmath.exp(z / mpf(0.1)),
        # z/α is rounded before exp is taken
        lambda z, slope: 8 + 20 * min(z, 4.0),
        args=(0.1,),
    ),
    "cos": Known(mpmath.cos, lambda z: -mpmath.sin(z), turned),
    "elu": Known(lambda z: z if z > 0 else mpmath.expm1(z), lambda z: 1 if z > 0 else mpmath.exp(z), absolute),
    "erf": Known(mpmath.erf, lambda z: 2 / mpmath.sqrt(mp.pi) * mpmath.exp(-z * z), quotient),
    "exp": Known(mpmath.exp, mpmath.exp, relative),
    # z log 2 is rounded before exp is taken
    "exp2": Known(lambda z: 2**z, lambda z: 2**z * mpmath.log(2), lambda z, slope: (8 + 2 * z) * slope),
    "gelu": Known(
        lambda z: z * mpmath.ncdf(z),
        lambda z: mpmath.ncdf(z) + z * mpmath.npdf(z),
        lambda z, slope: (1 + z) * quotient(z, slope),
    ),
    "leaky_relu": Known(
        lambda z: z if z > 0 else z * mpf(0.1), lambda z: 1 if z > 0 else mpf(0.1), relative, args=(0.1,)
    ),
    "log": Known(mpmath.log, lambda z: 1 / z, relative, positive=True),
    "log10": Known(mpmath.log10, lambda z: 1 / z / mpmath.log(10), relative, positive=True),
    "log1p": Known(mpmath.log1p, lambda z: 1 / (1 + z), relative, positive=True),
    "log_sigmoid_forward": Known(
        lambda z: -mpmath.log1p(mpmath.exp(-z)), lambda z: logistic(-z), lambda z, slope: 100 * slope
    ),
    "log2": Known(lambda z: mpmath.log(z, 2), lambda z: 1 / z / mpmath.log(2), relative, positive=True),
    "pow": Known(lambda z: z**4, lambda z: 4 * z**3, lambda z, slope: 16 * z**3, args=(4,)),
    "reciprocal": Known(lambda z: 1 / z, lambda z: -1 / z**2, relative, positive=True),
    "relu": Known(lambda z: max(z, mpf(0)), lambda z: mpf(z > 0), relative),
    "rsqrt": Known(lambda z: 1 / mpmath.sqrt(z), lambda z: -(z ** mpf(-1.5)) / 2, relative, positive=True),
    "sigmoid": Known(logistic, logistic_slope, absolute),
    "silu": Known(lambda z: z * logistic(z), lambda z: logistic(z) + z * logistic_slope(z), scaled),
    "sin": Known(mpmath.sin, mpmath.cos, turned),
    # across the break at 20 a quotient, of two numbers of that size
    "softplus": Known(softplus, lambda z: 1 if z > 20 else logistic(z), lambda z, slope: 100 * slope),
    "sqrt": Known(mpmath.sqrt, lambda z: 1 / (2 * mpmath.sqrt(z)), relative, positive=True),
    "tanh": Known(mpmath.tanh, lambda z: mpmath.sech(z) ** 2, absolute),
}
VARIANTS: dict[str, tuple[str, Known]] = {
    **{name: (name, known) for name, known in KNOWN.items()},
    "gelu by tanh": (
        "gelu",
        # the inner slope grows like z², and multiplies 1 − t₀t₁ and z, until tanh is one to rounding at |z| ≈ 6
        Known(
            tanh_gelu,
            lambda z: mpmath.diff(tanh_gelu, z),
            lambda z, slope: 8 * (1 + min(z, 8.0)) ** 3 + 8 * (1 + z),
            kwargs={"approximate": "tanh"},
        ),
    ),
    "root by pow": ("pow", Known(mpmath.sqrt, lambda z: 1 / (2 * mpmath.sqrt(z)), relative, True, (0.5,))),
    "power 1.7": ("pow", Known(lambda z: z ** mpf(1.7), lambda z: 1.7 * z ** mpf(0.7), power_bound, True, (1.7,))),
    "power −3": ("pow", Known(lambda z: z**-3, lambda z: -3 * z**-4, power_bound, True, (-3,))),
    "power 11": ("pow", Known(lambda z: z**11, lambda z: 11 * z**10, lambda z, slope: 100 * z**10, args=(11,))),
}

distances = st.one_of(st.just(0.0), st.floats(-14, 1.5).map(lambda u: 10.0**u))


def test_every_slope_is_known_to_fifty_digits() -> None:
    assert set(KNOWN) == set(SLOPES)


@pytest.mark.sample(12)
@pytest.mark.parametrize("variant", VARIANTS)
@given(st.floats(-40, 40), distances, st.sampled_from((-1, 1)))
@example(0.0, 1e-10, 1)
@example(2.0**-1070, 0.0, 1)  # a number with few digits
@example(-1e-12, 1e-10, 1)
@example(3.0, NEAR, 1)
@example(3.0, NEAR * (1 + 1e-9), 1)
@example(30.0, 1e16, -1)  # of positive numbers, one of them 10¹⁶ times smaller
@settings(max_examples=30, derandomize=True)
def test_the_slope(variant: str, z0: float, distance: float, sign: int) -> None:
    name, known = VARIANTS[variant]
    if known.positive:  # a step that is no larger than the number itself, or a factor
        z0 = abs(z0) + 1e-3
        z1 = z0 * (1 + sign * distance) if distance < 0.9 else z0 * distance**sign
    else:
        z1 = z0 + sign * distance
    call = call_of(name, known)
    ends = torch.tensor([z0, z1], dtype=torch.float64)
    found = float(SLOPES[name](call, ends[:1], ends[1:]))
    with mp.workdps(DIGITS):
        expected = slope(known, mpf(z0), mpf(z1))
        error = float(abs(mpf(found) - expected))
        size = float(abs(expected))
    allowed = EPS * known.bound(max(abs(z0), abs(z1)), size) + TINY
    assert error <= allowed, f"{found:.17g} against {size:.17g} at ({z0!r}, {z1!r}): off by {error / EPS:.1f} eps"


def test_every_derivative_belongs_to_a_slope() -> None:
    assert set(DERIVATIVES) <= set(SLOPES)


@pytest.mark.parametrize("name", DERIVATIVES)
@given(st.floats(-40, 40))
@example(0.0)
@settings(max_examples=30, derandomize=True)
def test_the_derivative(name: str, z: float) -> None:
    """σ′ from z and σ(z), where both ends are one."""
    known = KNOWN[name]
    z = abs(z) + 1e-3 if known.positive else z
    value = torch.tensor(z, dtype=torch.float64)
    found = float(DERIVATIVES[name](value, getattr(torch.ops.aten, name)(value)))
    with mp.workdps(DIGITS):
        expected = slope(known, mpf(z), mpf(z))
        error, size = float(abs(mpf(found) - expected)), float(abs(expected))
    assert error <= EPS * known.bound(abs(z), size) + TINY, f"off by {error / EPS:.1f} eps at {z!r}"


def slope(known: Known, z0: mpf, z1: mpf) -> mpf:
    """The quotient, in which fifty digits leave enough after cancellation, or the derivative."""
    if z0 == z1:
        return mpf(0) if z0 == 0 and known.function is abs else known.derivative(z0)
    return (known.function(z1) - known.function(z0)) / (z1 - z0)
