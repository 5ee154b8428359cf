"""Expectations over two Gaussians: every activation against a quadrature, κ̇ against the derivative of κ."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sin, sqrt

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from ntkexp.layer.pointwise import Abs, AbstractBent, AbstractPointwise, LeakyReLU, ReLU
from ntkexp.layer.smooth import FUNCTIONS, Generic, Tanh
from ntkexp.mistake import Mistake
from tests.limit.drawn import POINTWISE

SMOOTH = [layer for layer in POINTWISE if not isinstance(layer, AbstractBent)]
SMOOTH += [Generic(fn=name) for name in FUNCTIONS]
EPS = torch.finfo(torch.float64).eps
VARIANCES = [(1.0, 1.0), (0.3, 2.0), (1.7, 0.05)]
CORRELATIONS = [-0.95, -0.4, 0.0, 0.3, 0.9, 0.999]


def named(layer: AbstractPointwise) -> str:
    return str(layer.fields())


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.sample(20)
@pytest.mark.parametrize("layer", SMOOTH, ids=named)
@pytest.mark.parametrize(("q1", "q2"), VARIANCES)
def test_smooth_activations_agree_with_a_quadrature(layer: AbstractPointwise, q1: float, q2: float) -> None:
    """Trapezoid sums in both variables: exponentially exact for functions that are analytic near the real line."""
    z = torch.linspace(-10, 10, 201, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) * (0.1 / sqrt(2 * pi))
    for rho in CORRELATIONS:
        u = (sqrt(q1) * z)[:, None].expand(201, 201).clone().requires_grad_()
        v = (sqrt(q2) * (rho * z[:, None] + sqrt(1 - rho * rho) * z)).requires_grad_()
        values = [layer.apply(side) for side in (u, v)]
        slopes = [torch.autograd.grad(value.sum(), side)[0] for value, side in zip(values, (u, v), strict=True)]
        found = layer.dual(*numbers(q1, rho * sqrt(q1 * q2), q2))
        for one, pair in zip(found, (values, slopes), strict=True):
            expected = float((pair[0].detach() * pair[1].detach() * weight[:, None] * weight).sum())
            assert abs(float(one) - expected) < 1e-10 * (1 + abs(expected))


@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), LeakyReLU(slope=-2.0)], ids=named)
def test_bent_lines_of_equal_and_of_opposite_variables_are_moments(layer: AbstractBent) -> None:
    """E f(u)² = (a² + b²)/2 E u² and E f(u) f(−u) = −ab E u², which leave no integral."""
    (a, b), q = layer.slopes, 0.7
    for rho, value, slope in ((1, (a * a + b * b) / 2, (a * a + b * b) / 2), (-1, -a * b, a * b)):
        found = layer.dual(*numbers(q, rho * q, q))
        known = 8 * EPS * max(a * a, b * b)  # a few products, and sums in which ab may cancel
        assert [float(one) for one in found] == pytest.approx([q * value, slope], rel=0, abs=known)


@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), LeakyReLU(slope=-2.0)], ids=named)
@pytest.mark.parametrize("rho", [*CORRELATIONS, 1 - 1e-9])
def test_bent_lines_agree_with_an_integral_over_the_angle(layer: AbstractBent, rho: float) -> None:
    """E f(u) f(v) = 2√(q₁q₂) · mean over the angle of f(cos θ) f(cos(θ − ϑ)), and E f′(u) f′(v) its like."""
    q1, q2, a, b = 0.7, 1.9, *layer.slopes
    angle = float(np.arccos(rho))

    def line(x: float) -> float:
        return a * min(x, 0) + b * max(x, 0)

    def slope(x: float) -> float:
        return b if x > 0 else a

    corners = sorted((corner % (2 * pi)) for corner in (pi / 2, 3 * pi / 2, pi / 2 + angle, 3 * pi / 2 + angle))
    pieces = list(zip([0.0, *corners], [*corners, 2 * pi], strict=True))

    def mean(function: Callable[[float], float]) -> float:
        product = (quad(lambda t: function(cos(t)) * function(cos(t - angle)), *piece)[0] for piece in pieces)
        return float(sum(product)) / (2 * pi)

    value, derivative = layer.dual(*numbers(q1, rho * sqrt(q1 * q2), q2))
    # The angle itself is known to ε/sin ϑ, and the integral is a sum of 5 · 21 products.
    known = 2 * sqrt(q1 * q2) * max(a * a, b * b) * EPS * (5 * 21 + 4 / sin(angle))
    assert abs(float(value) - 2 * sqrt(q1 * q2) * mean(line)) < known
    assert abs(float(derivative) - mean(slope)) < known


@pytest.mark.parametrize("layer", [*SMOOTH, ReLU(), LeakyReLU(slope=0.3), Abs()], ids=named)
def test_the_slope_is_the_derivative_by_the_covariance(layer: AbstractPointwise) -> None:
    q1, q2 = (torch.tensor([q], dtype=torch.float64).expand(6) for q in (0.8, 1.5))
    c = torch.tensor([-1.0, -0.3, 0.01, 0.4, 0.8, 1.0], dtype=torch.float64, requires_grad=True)
    value, slope = layer.dual(q1, c, q2)
    (derivative,) = torch.autograd.grad(value.sum(), c)
    torch.testing.assert_close(derivative, slope.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [*SMOOTH, ReLU(), LeakyReLU(slope=0.3), Abs()], ids=named)
def test_two_equal_variables_are_the_limit_of_two_alike(layer: AbstractPointwise) -> None:
    for q in (0.2, 1.0, 3.0):
        value, slope = layer.alone(torch.tensor([q], dtype=torch.float64))
        near, near_slope = layer.dual(*numbers(q, q, q))
        torch.testing.assert_close(near, value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(near_slope, slope, rtol=1e-11, atol=1e-12)


@pytest.mark.sample(10)
@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), *SMOOTH], ids=named)
def test_derivatives_by_all_arguments(layer: AbstractPointwise) -> None:
    arguments = [value.requires_grad_() for value in numbers(0.8, 0.5, 1.5)]
    assert torch.autograd.gradcheck(layer.dual, arguments, atol=1e-6)


def test_a_step_is_too_steep_for_a_series() -> None:
    with pytest.raises(Mistake, match=r"Tanh: at variance 1e\+04 it is too steep.*lower W_std"):
        Tanh().dual(*numbers(1e4, 0.0, 1e4))
