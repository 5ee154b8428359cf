"""Slopes (σ(z₁) − σ(z₀))/(z₁ − z₀) against fifty digits, for all places of the two ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from mpmath import mp, mpf
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.kernel.record.casts import has_casts, with_casts
from ntkexp.kernel.record.tape import Entry
from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.rules.elementwise import DERIVATIVES, GAUSS_RANGE, SLOPES, SLOPES_OF_CALLS
from ntkexp.library import TangentKernel, reader_of, secant_kernel, tangent_kernel
from tests.kernel import oracle
from tests.kernel.networks import ROUTED, Formula, drawn, own_weights, routed_batch
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import KINDS, Problem, problem, routed

TINY = torch.finfo(torch.float64).tiny  # below it numbers have fewer digits
DIGITS = 50


@dataclass(frozen=True)
class Known:
    """A function to fifty digits, its derivative, and the allowed error of its slope, in eps."""

    function: Callable[[mpf], mpf]
    derivative: Callable[[mpf], mpf]
    bound: Callable[[float, float], float]  # of the larger |z| and the slope's own size
    positive: bool = False
    args: tuple[float, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_of(name: str, known: Known) -> Call:
    """Return a call that holds the numbers which a slope reads."""
    packet, call = getattr(torch.ops.aten, name), Call.__new__(Call)  # without a chord
    call.args, call.kwargs = (None, *known.args), known.kwargs
    op = packet.default if "default" in packet.overloads() else packet.Tensor_Scalar
    call.entry = Entry(op, call.args, call.kwargs, (), ())
    return call


def logistic(z: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-z))


def logistic_slope(z: mpf) -> mpf:
    return logistic(z) * logistic(-z)


def softplus(z: mpf) -> mpf:
    """As in torch, the number itself beyond 20."""
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
    """erf has no closed form of its slope: two roundings of numbers up to one, divided by at least GAUSS_RANGE."""
    return 2 / GAUSS_RANGE


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
    assert set(KNOWN) == {*SLOPES, *SLOPES_OF_CALLS}


@pytest.mark.parametrize("variant", VARIANTS)
@given(st.floats(-40, 40), distances, st.sampled_from((-1, 1)))
@example(0.0, 1e-10, 1)
@example(2.0**-1070, 0.0, 1)  # a number with few digits
@example(-1e-12, 1e-10, 1)
@example(3.0, GAUSS_RANGE, 1)
@example(3.0, GAUSS_RANGE * (1 + 1e-9), 1)
@example(30.0, 1e16, -1)  # positive numbers, one of them 10¹⁶ times smaller
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
    if name in SLOPES:
        found = float(SLOPES[name](ends[:1], ends[1:]))
    else:
        found = float(SLOPES_OF_CALLS[name](call, ends[:1], ends[1:]))
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
    """The quotient, or the derivative. Fifty digits leave enough after cancellation."""
    if z0 == z1:
        return mpf(0) if z0 == 0 and known.function is abs else known.derivative(z0)
    return (known.function(z1) - known.function(z0)) / (z1 - z0)


# Modules that compute in single precision inside.


DOUBLE, SINGLE = (torch.finfo(kind).eps for kind in (torch.float64, torch.float32))


def cast(shorter: bool = True) -> Problem:
    """Return a module with a norm, sums and constants in single precision, or the same in double precision."""
    kind = torch.float32 if shorter else torch.float64

    def forward(x: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
        h = inner(x).to(kind)
        h = h * torch.rsqrt(h.square().mean(1, keepdim=True, dtype=kind) + 1e-3)
        h = h * torch.arange(1, 7, dtype=kind) + torch.softmax(h, 1, dtype=kind)
        outputs: Tensor = outer(h.to(x.dtype))
        return outputs

    made = drawn(Formula(forward, inner=nn.Linear(4, 6), outer=nn.Linear(6, 2)))
    return Problem(made, normal(5, 4, seed=1), torch.Generator().manual_seed(0))


def test_without_casts_a_kernel_is_that_of_double_precision() -> None:
    """Casts that are kept cost rounding to single precision."""
    given = cast()
    expected = oracle.tangent(cast(False).module, given.x, given.x)
    with pytest.warns(UserWarning, match=r"without its casts.*changes its outputs by \de-0[6789]"):
        agree(tangent_kernel(given.module, given.x, casts="ignore"), expected, 100 * DOUBLE)
    with pytest.warns(UserWarning, match=r"the error of a kernel is 1e-07 .*casts=ignore"):
        kept = tangent_kernel(given.module, given.x)
    agree(kept, expected, 100 * SINGLE)
    assert (kept - expected).abs().max() > 100 * DOUBLE * expected.abs().max()


def test_without_casts_a_step_closes_to_double_precision() -> None:
    given = cast()
    end = given.end(0.3)
    errors = {}
    for casts in ("keep", "ignore"):
        reader, own = reader_of(given.module, casts=casts)
        start, after = reader.record(own, given.x), reader.record(end, given.x)
        errors[casts] = (reader.secant(start, after).jvp - (after.outputs - start.outputs)).abs().max()
        assert start.eps == {"keep": SINGLE, "ignore": DOUBLE}[casts]
        assert has_casts(start) == (casts == "keep")
    size = given.module(given.x).detach().abs().max()
    assert errors["ignore"] < 300 * DOUBLE * size
    assert 300 * DOUBLE * size < errors["keep"] < 300 * SINGLE * size


def gained(x: Tensor, inner: nn.Module, gain: Tensor) -> Tensor:
    """A gain in double precision, next to numbers that were cast."""
    outputs: Tensor = x + inner(x).float() * gain
    return outputs


def short_layer() -> nn.Module:
    """Frozen weights in short numbers, as under adapters: all that follows is known to their rounding."""
    short = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    return Formula(lambda x, short, last: last(short(x.bfloat16()).float()), short=short, last=nn.Linear(4, 2))


WARNED: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "a secant": (
        r"the error of a secant 1e-07 of the outputs; casts=ignore",
        lambda: secant_kernel((given := cast()).module, {}, given.end(0.1), given.x, given.x),
    ),
    "a kernel object": (r"the error of a kernel is 1e-07", lambda: TangentKernel(cast().module)(cast().x)),
    "without casts": (r"without its casts", lambda: TangentKernel(cast().module, casts="ignore")(cast().x)),
    "frozen short weights": (
        r"the error of a kernel is 8e-03",
        lambda: tangent_kernel(short_layer(), cast().x.float()),
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_casts_warn_of_their_rounding(name: str) -> None:
    words, kernel = WARNED[name]
    with pytest.warns(UserWarning, match=words):
        kernel()


def test_a_gain_is_longer_than_the_numbers_that_it_multiplies() -> None:
    module, x = drawn(Formula(gained, inner=nn.Linear(4, 4), gain=())), cast().x
    with pytest.warns(UserWarning, match=r"the error of a kernel is 1e-07"):
        found = tangent_kernel(module, x)
    agree(found, oracle.tangent(module, x, x), 100 * SINGLE)


def test_a_module_without_casts_is_the_same_either_way() -> None:
    given = problem("tanh")
    with warnings.catch_warnings(action="error"):
        kept = secant_kernel(given.module, {}, {}, given.x, given.x)
        assert torch.equal(secant_kernel(given.module, {}, {}, given.x, given.x, casts="ignore"), kept)


def test_another_word_is_refused() -> None:
    with refused("casts='drop': give 'keep' or 'ignore'"):
        with_casts(lambda weights, inputs: torch.zeros(1), "drop")  # type: ignore[arg-type]  # as a user may


# Modules whose values decide which row goes where: findings of one batch are not used for another.


LONG = ("packed sequences", "top-2 experts", "masked scatter", "masked select", "segments", *KINDS)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in [*ROUTED, *KINDS]]


def batches(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and two batches of equal shape that it routes in different ways."""
    given = problem(name) if name in KINDS else routed(name)
    return given.module, given.x, given.inputs(5) if name in KINDS else routed_batch(given.generator)


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:.*example by example")
@pytest.mark.parametrize("name", NAMES)
def test_the_tangent_kernel_of_a_batch_is_its_own_whatever_was_read_before(name: str) -> None:
    module, a, b = batches(name)
    other, _, _ = batches(name)  # without findings yet
    whole = oracle.tangent(module, torch.cat([a, b]), torch.cat([a, b]))
    agree(tangent_kernel(module, a), whole[:5, :, :5], 100 * EPS)
    agree(tangent_kernel(module, b), whole[5:, :, 5:], 100 * EPS)
    agree(tangent_kernel(module, a, b), whole[:5, :, 5:], 100 * EPS)
    agree(tangent_kernel(other, b, a), whole[5:, :, :5], 100 * EPS)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_one_batch_is_exact_at_another(name: str) -> None:
    """f(end; x) − f(start; x) = −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ for a gradient step, in both orders on one module."""
    module, a, b = batches(name)
    start = own_weights(module)
    jacobian = oracle.jacobians(module, torch.cat([a, b]))
    for queries, train, rows in ((a, b, slice(5, None)), (b, a, slice(0, 5))):
        step = {key: -1e-3 * part[rows].sum((0, 1)).view(start[key].shape) for key, part in jacobian.items()}
        end = {key: start[key] + step[key] for key in start}
        predicted = -1e-3 * secant_kernel(module, start, end, queries, train).sum((2, 3))
        before, after = (functional_call(module, weights, (queries,)).detach() for weights in (start, end))
        agree(predicted, (after - before).view_as(predicted), 300 * EPS, before.abs().max())
