"""Nearly equal and opposite examples, whose digits cancel: kernels compared with fifty digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor

from ntkexp import infinite_kernel
from ntkexp.covariance.covariance import Distances
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import Dropout, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import (
    GELU,
    Abs,
    AbstractBent,
    AbstractPointwise,
    Cos,
    Erf,
    LeakyReLU,
    PairMoments,
    ReLU,
    Sin,
)
from ntkexp.layer.smooth import Tanh
from ntkexp.limit.infinite_kernel import Engine
from ntkexp.limit.near import near_pairs
from tests.kernel.oracle import EPS, refused

DIGITS = 60
Layers = tuple[AbstractLayer, ...]
Moments = tuple[mpf, mpf, mpf]
"""q₁, c and q₂."""


def dual(layer: AbstractLayer, q1: mpf, c: mpf, q2: mpf) -> tuple[mpf, mpf]:
    """κ and κ̇ by their textbook formulas."""
    if isinstance(layer, AbstractBent):
        a, b = (mpf(slope) for slope in layer.slopes)
        R = mp.sqrt(q1 * q2)
        angle = mp.acos(max(mpf(-1), min(mpf(1), c / R)))
        slope = (a * a + b * b) / 2 - (a - b) ** 2 * angle / (2 * mp.pi)
        return R * (a - b) ** 2 * mp.sin(angle) / (2 * mp.pi) + slope * c, slope
    if isinstance(layer, Erf):
        D = mp.sqrt((1 + 2 * q1) * (1 + 2 * q2) - 4 * c * c)
        return 2 / mp.pi * mp.atan2(2 * c, D), 4 / mp.pi / D
    if isinstance(layer, GELU):
        P = (1 + q1) * (1 + q2)
        D = mp.sqrt(P - c * c)
        phi = mpf(1) / 4 + mp.atan2(c, D) / (2 * mp.pi)
        slope = c / (2 * mp.pi * D) * (1 / D**2 + (1 - q1 * q2) / P + 1) + phi
        return (c * c + q1 * q2 * D * D) / (2 * mp.pi * P * D) + c * phi, slope
    assert isinstance(layer, Sin | Cos)
    mean, sign = (q1 + q2) / 2, mpf(layer.phase)
    near, far = mp.exp(c - mean), mp.exp(-c - mean) * sign
    return (near - far) / 2, (near + far) / 2


def pushed(layers: Sequence[AbstractLayer], moments: Moments, theta: mpf) -> tuple[Moments, mpf]:
    for layer in layers:
        q1, c, q2 = moments
        if isinstance(layer, Dense):
            W, b = mpf(layer.W_std), mpf(layer.b_std)
            moments = (W**2 * q1 + b**2, W**2 * c + b**2, W**2 * q2 + b**2)
            theta = W**2 * theta + moments[1]
        elif isinstance(layer, LayerNorm):
            A, B = mp.sqrt(q1 + mpf(layer.eps)), mp.sqrt(q2 + mpf(layer.eps))
            moments, theta = (q1 / A**2, c / (A * B), q2 / B**2), theta / (A * B)
        elif isinstance(layer, Residual):
            branch, other = pushed(layer.branch, moments, theta)
            moments, theta = tuple(one + two for one, two in zip(moments, branch, strict=True)), theta + other
        elif isinstance(layer, Concatenation):
            parts = [pushed(branch, moments, theta) for branch in layer.branches]
            moments = tuple(sum(values) / len(parts) for values in zip(*(part for part, _ in parts), strict=True))
            theta = sum(other for _, other in parts) / len(parts)
        else:
            value, slope = dual(layer, q1, c, q2)
            moments, theta = (dual(layer, q1, q1, q1)[0], value, dual(layer, q2, q2, q2)[0]), theta * slope
    return moments, theta


def errors(layers: Layers, x: Tensor, y: Tensor, engine: Engine) -> tuple[float, float]:
    """The error of K and of Θ between two examples, relative to the geometric means of K and Θ of each with itself."""

    def exact(one: Tensor, two: Tensor) -> tuple[mpf, mpf]:
        first, second = ([mpf(value) for value in x.tolist()] for x in (one, two))

        def mean(left: Sequence[mpf], right: Sequence[mpf]) -> mpf:
            return mpmath.fdot(left, right) / len(left)

        moments = mean(first, first), mean(first, second), mean(second, second)
        (_, c, _), theta = pushed(layers, moments, mpf(0))
        return c, theta

    with mp.workdps(DIGITS):
        found = infinite_kernel(layers, x[None], y[None], engine=engine)
        both, own, other = exact(x, y), exact(x, x), exact(y, y)
        one, two = (
            abs(mpf(float(values)) - right) / mp.sqrt(abs(first * second))
            for values, right, first, second in zip(found, both, own, other, strict=True)
        )
        return float(one), float(two)


def dense(activation: Layers, depth: int, W_std: float = 1.4, b_std: float = 0.1) -> Layers:
    layer = Dense(features=2, W_std=W_std, b_std=b_std)
    return (*((layer, *activation) * depth), layer)


def residual(layer: AbstractLayer) -> Layers:
    return (Residual(branch=(layer, Dense(features=2))),)


NETWORKS: dict[str, Layers] = {
    "ReLU": dense((ReLU(),), 1),
    "ReLU, deep": dense((ReLU(),), 30),
    "leaky": dense((LeakyReLU(),), 3),
    "abs": dense((Abs(),), 3, b_std=0.0),
    "norm": dense((LayerNorm(), ReLU()), 3),
    "residual": dense(residual(ReLU()), 3),
    "branches": (
        *dense((ReLU(),), 1),
        Concatenation(branches=((Erf(), Dense(features=3)), (Dense(features=3), Abs()))),
        *dense((ReLU(),), 1),
    ),
    "erf": dense((Erf(),), 3),
    "erf and ReLU": dense((Erf(), Dense(features=2), ReLU()), 2),
    "GELU": dense((GELU(),), 3),
    "sine": dense((Sin(),), 3),
    "cosine": dense((Cos(),), 3),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        *(("torch", dtype) for dtype in (torch.float64, torch.float32)),
        ("fused", torch.float64),
        pytest.param("fused", torch.float32, marks=pytest.mark.slow),  # compiled for float32
    ],
    ids=str,
)
def test_no_digits_of_near_examples_are_lost(name: str, engine: Engine, dtype: torch.dtype) -> None:
    """The error is the rounding to eps in each layer. Without care, a distance of 1e-7 would leave nine digits."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    layers = NETWORKS[name]
    bound = 8 * len(layers) * torch.finfo(dtype).eps
    for distance in (0.0, 1e-10, 1e-7, 1e-4):
        for scale in (1.0, -1.0, 3.0):
            assert max(errors(layers, x, scale * x + distance * noise, engine)) <= bound, (distance, scale)


@pytest.mark.sample(8)
@pytest.mark.parametrize("engine", ["torch", "fused"])
@pytest.mark.parametrize("layer", [Erf(), GELU(), Sin(), Cos()], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("size", [7e3, 1e5, 1e8])
def test_no_digits_are_lost_at_large_variances(layer: AbstractLayer, size: float, engine: Engine) -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    for y in (x, -x, x + 1e-7 * noise, -x + 1e-9 * noise, noise):
        found = errors(dense((layer,), 1, W_std=1.0), size * x, size * y, engine)
        assert max(found) <= 32 * EPS


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [7e4, 1e8])
@pytest.mark.parametrize("W_std", [1.0, 30.0, 1e3])
def test_nor_in_steep_layers_after_each_other(size: float, W_std: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    for y in (-x, x + 1e-7 * noise, x + 1e-9 * noise):
        found = errors(dense((Erf(),), 3, W_std=W_std, b_std=0.5), size * x, size * y, "torch")
        assert max(found) <= 100 * EPS


def test_variances_at_which_the_digits_of_other_networks_are_lost_are_refused() -> None:
    """Pixels that meet others have no distances, and a GELU has no formula for distances after it."""
    x = 1e5 * torch.ones(2, 1, 3, dtype=torch.float64)
    conv, end = Conv(features=1), (GlobalAvgPool(), Dense(features=1))
    with refused(r"Erf: variance .* is too large .*: 5 digits of their kernel are left"):
        infinite_kernel((conv, Erf(), *end), x)
    with refused(r"GELU: variance .* is too large .*: 0 digits"):
        infinite_kernel(dense((GELU(),), 2, W_std=1e8, b_std=0.0), torch.ones(2, 3, dtype=torch.float64))


# In a block of many examples, near pairs are found, and the others stay unchanged.


def several(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return twenty examples, with a row of zeros, copies, opposites, multiples and neighbours."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    x[10], x[11], x[12], x[13] = x[0], -x[1], 2 * x[2], 0
    x[14:18] = x[14:15] + 1e-8 * noise[14:18]
    return x.to(dtype)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("dtype", "rest"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str)
def test_the_search_finds_the_pairs_within_the_angle(dtype: torch.dtype, rest: float, same: bool) -> None:
    """Neighbours at angles with 1 − |ρ| = share · rest; those with a share up to one are found, and no others."""
    generator = torch.Generator().manual_seed(2)
    shares = torch.tensor([0.0, 0.3, 0.8, 0.95, 1.05, 1.3, 4.0], dtype=torch.float64).repeat(8)
    x = torch.randn(len(shares), 6, generator=generator, dtype=torch.float64)
    aside = torch.randn(len(shares), 6, generator=generator, dtype=torch.float64)
    aside -= (aside * x).sum(1, keepdim=True) / x.square().sum(1, keepdim=True) * x
    aside *= x.norm(dim=1, keepdim=True) / aside.norm(dim=1, keepdim=True)
    cosine = (1 - shares * rest)[:, None]
    signs = torch.where(torch.arange(len(shares)) % 2 == 0, 1.0, -3.0)[:, None]  # opposite and longer ones too
    y = signs * (cosine * x + (1 - cosine.square()).sqrt() * aside)
    x, y = x.to(dtype), y.to(dtype)
    x[-1] = 0  # is near to nothing
    left, right = (torch.cat([x, y]), torch.cat([x, y])) if same else (x, y)
    found = [
        (int(row), int(column))
        for places in near_pairs(left, right, same, rest)
        for row, column in zip(*places, strict=True)
    ]
    shift = len(shares) if same else 0
    expected = {(k, k + shift) for k in range(len(shares) - 1) if shares[k] <= 1}
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_all_near_pairs_of_a_block_are_found(engine: Engine) -> None:
    x, layers = several(), dense((ReLU(),), 3)
    whole, apart = infinite_kernel(layers, x, engine=engine), infinite_kernel(layers, x, x.clone(), engine=engine)
    for one, other in zip(whole, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0.0)
        assert torch.equal(one, one.t())
    for i, j in ((0, 10), (1, 11), (2, 12), (14, 15), (16, 17), (3, 13)):
        assert max(errors(layers, x[i], x[j], engine)) <= 100 * EPS
        assert torch.equal(infinite_kernel(layers, x[[i]], x[[j]], engine=engine).ntk[0, 0], apart.ntk[i, j])


def test_constant_images_that_go_around_are_vectors_when_they_are_near() -> None:
    x = several()
    images = x[:, :, None].expand(-1, -1, 5)
    conv = Conv(features=2, W_std=1.4, b_std=0.1, circular=True)
    vector = dense((LayerNorm(), ReLU()), 2)
    layers = (*((conv, LayerNorm(), ReLU()) * 2), Flatten(), vector[-1])
    keep = [k for k in range(20) if k != 13]
    found, expected = infinite_kernel(layers, images[keep]), infinite_kernel(vector, x[keep])
    torch.testing.assert_close(found.ntk, expected.ntk, rtol=1e-13, atol=0.0)


def test_dropout_gives_no_distances() -> None:
    """Draws are independent, so that near examples are not near after it. Equal ones on two sides have two draws."""
    layers = (*dense((ReLU(),), 1), Dropout(rate=0.5), Dense(features=1), ReLU(), Dense(features=1))
    x = several()
    near, apart = infinite_kernel(layers, x[:1], x[:1] + 1e-9).ntk, infinite_kernel(layers, x[:1], x[:1] + 1e-2).ntk
    torch.testing.assert_close(near, apart, rtol=0.1, atol=0.0)
    same = infinite_kernel(layers, x[:1], x[:1].clone()).ntk
    torch.testing.assert_close(near, same, rtol=1e-8, atol=0.0)


def test_layers_without_a_formula_by_distances_go_on_without_them() -> None:
    x = several()
    layers = (*dense((ReLU(),), 1), Tanh(), *dense((ReLU(),), 1))
    whole, apart = infinite_kernel(layers, x), infinite_kernel(layers, x, x.clone())
    torch.testing.assert_close(whole.ntk, apart.ntk, rtol=1e-7, atol=0.0)


def test_derivatives_of_near_pairs_are_those_of_differences() -> None:
    x = several()[[14]]
    noise = 1e-5 * several()[[3]]

    def entry(step: Tensor) -> Any:
        return infinite_kernel(dense((ReLU(),), 2), x, x + noise + step, engine="torch").ntk[0, 0]

    step = torch.zeros_like(x).requires_grad_()
    (gradient,) = torch.autograd.grad(entry(step), step)
    direction = several()[[4]]
    slope = (entry(1e-8 * direction) - entry(-1e-8 * direction)) / 2e-8
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), Erf(), Sin(), Cos(), GELU()], ids=repr)
def test_kernels_by_distances_are_those_by_moments(layer: AbstractPointwise, size: float) -> None:
    """At wide angles no digits cancel, so both formulas hold."""
    generator = torch.Generator().manual_seed(0)
    q1, q2, share = torch.rand(3, 40, generator=generator, dtype=torch.float64)
    q1, q2 = size * (0.5 + q1), size * (0.5 + q2)
    root = (q1 * q2).sqrt()
    c = (1.8 * share - 0.9) * root
    slack = (q1.sqrt() - q2.sqrt()).square()
    before = Distances(2 * (root - c), 2 * (root + c), slack, q1 - q2)
    value, slope, after = layer.resolved(PairMoments(q1, c, q2, before))
    expected, expected_slope = layer.dual(q1, c, q2)
    scale = (layer.alone(q1)[0] * layer.alone(q2)[0]).sqrt()
    assert float(((value - expected).abs() / scale).max()) < 1e-13
    assert float((slope - expected_slope).abs().max()) < 1e-13 * float(layer.alone(q1)[1].max())
    if after is not None:
        squares = layer.alone(q1)[0] + layer.alone(q2)[0]
        for distance, sign in ((after.near, -2), (after.far, 2)):
            gap = distance + after.slack - (squares + sign * expected)
            assert float((gap.abs() / squares).max()) < 1e-13
        assert torch.allclose(
            after.excess, layer.alone(q1)[0] - layer.alone(q2)[0], rtol=0, atol=1e-13 * float(squares.max())
        )
