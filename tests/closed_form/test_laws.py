"""Closed forms against time stepping, sampling and each other."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from ntkexp.closed_form import FOREVER, AbstractGain, DescentGain, Ensemble, FlowGain, Kernels, condition, modes_of
from ntkexp.mistake import Mistake

EPS = torch.finfo(torch.float64).eps
TRAIN, POINTS, FEATURES = 6, 4, 9


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(features: Tensor) -> Kernels:
    """⟨φ(x), φ(x′)⟩, the training examples first."""
    return Kernels(features[:TRAIN] @ features[:TRAIN].mH, features[TRAIN:] @ features[:TRAIN].mH)


def trained(tangent: Kernels, start: Kernels, gain: AbstractGain, ridge: float = 0.0) -> Ensemble:
    return Ensemble(tangent.cross, start, modes_of(tangent.train).at(gain, ridge))


PHI = random(TRAIN + POINTS, FEATURES, seed=1) / 3
TARGETS = random(TRAIN, 2, seed=2)


@pytest.mark.parametrize("size", [0.05, 0.3, 1.7], ids=["small", "usual", "beyond the stable"])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_descent_is_descent(size: float, ridge: float) -> None:
    kernels = linear(PHI)
    coefficients = torch.zeros_like(TARGETS)
    R = kernels.train + ridge * torch.eye(TRAIN, dtype=torch.float64)
    for _ in range(25):
        coefficients = coefficients + size * (TARGETS - R @ coefficients)
    found = trained(kernels, kernels, DescentGain(size, 25), ridge).mean(TARGETS)
    growth = max(1.0, float(coefficients.abs().max()))
    torch.testing.assert_close(found, kernels.cross @ coefficients, rtol=1e-12, atol=1e3 * EPS * growth)


def test_descent_with_tiny_steps_is_flow() -> None:
    spectrum = torch.tensor([0.0, 1e-9, 0.3, 5.0], dtype=torch.float64)
    gaps = [
        float((DescentGain(2.0 / steps, steps)(spectrum) - FlowGain(2.0)(spectrum)).norm()) for steps in (4000, 8000)
    ]
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.01)  # Euler's method is of order one


def test_flow_is_the_matrix_exponential() -> None:
    kernels = linear(PHI)
    decay = torch.linalg.matrix_exp(-1.3 * kernels.train)
    learned = kernels.train @ modes_of(kernels.train).at(FlowGain(1.3))(TARGETS)
    torch.testing.assert_close(learned, TARGETS - decay @ TARGETS, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gain", [FlowGain(0.7), DescentGain(0.4, 9), FOREVER], ids=["flow", "descent", "for ever"])
def test_ensembles_are_affine_images_of_their_start(gain: AbstractGain) -> None:
    """f_t is affine in f_0, so that its covariance is that of the start, mapped: for any root of the start's."""
    tangent, start = linear(PHI), linear(root := random(TRAIN + POINTS, FEATURES, seed=3))
    found = trained(tangent, start, gain)
    mapped = root[TRAIN:] - found.weights @ root[:TRAIN]
    between = root[TRAIN:] @ root[TRAIN:].mH
    torch.testing.assert_close(found.covariance(between), mapped @ mapped.mH, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.variance(between.diagonal()), mapped.square().sum(1), rtol=1e-10, atol=1e-10)


def test_trained_linear_models_have_the_mean_and_covariance() -> None:
    """Draw θ ~ N(0, 1), follow gradient flow of ½‖Φθ − y‖² for the time 0.7 and look at the outputs."""
    models, time, targets = 20_000, 0.7, TARGETS[:, :1]
    theta = random(FEATURES, models, seed=4)
    X, x = PHI[:TRAIN], PHI[TRAIN:]
    decay = torch.linalg.matrix_exp(-time * X.mH @ X)
    pull = torch.linalg.solve(X.mH @ X + 1e-12 * torch.eye(FEATURES), (torch.eye(FEATURES) - decay) @ X.mH @ targets)
    outputs = x @ (decay @ theta + pull)
    found = trained(linear(PHI), linear(PHI), FlowGain(time))
    covariance = found.covariance(x @ x.mH)
    spread = covariance.diagonal().sqrt()
    error = 5 / models**0.5  # five standard errors
    assert ((outputs.mean(1) - found.mean(targets)[:, 0]).abs() <= error * spread).all()
    assert (torch.cov(outputs) - covariance).abs().max() <= error * 2 * spread.max() ** 2


@pytest.mark.parametrize("gain", [FOREVER, FlowGain(0.9), DescentGain(0.2, 11)], ids=["for ever", "flow", "descent"])
def test_readouts_that_learn_alone_are_a_process_that_is_conditioned(gain: AbstractGain) -> None:
    kernels, between = linear(PHI), PHI[TRAIN:] @ PHI[TRAIN:].mH
    alone, posterior = trained(kernels, kernels, gain), condition(kernels, gain=gain)
    torch.testing.assert_close(alone.mean(TARGETS), posterior.mean(TARGETS), rtol=1e-12, atol=1e-12)
    expected = posterior.covariance(between)
    torch.testing.assert_close(alone.covariance(between), expected, rtol=1e-11, atol=1e-11)
    variance = posterior.variance(between.diagonal())
    torch.testing.assert_close(variance, expected.diagonal(), rtol=1e-11, atol=1e-12)


def test_nothing_is_learned_at_time_zero() -> None:
    kernels, between = linear(PHI), PHI[TRAIN:] @ PHI[TRAIN:].mH
    found = trained(kernels, kernels, FlowGain(0.0))
    assert not found.mean(TARGETS).any()
    torch.testing.assert_close(found.covariance(between), between, rtol=0, atol=0)


def test_a_ridge_is_added_to_the_kernel() -> None:
    kernels = linear(PHI)
    R = kernels.train + 0.3 * torch.eye(TRAIN, dtype=torch.float64)
    expected = kernels.cross @ torch.linalg.solve(R, TARGETS)
    torch.testing.assert_close(condition(kernels, 0.3).mean(TARGETS), expected, rtol=1e-12, atol=1e-13)


def test_rounding_below_zero_counts_as_zero() -> None:
    modes = modes_of(torch.diag(torch.tensor([1.0, -1e-17, 3 * EPS / 2], dtype=torch.float64)))
    assert modes.values.tolist() == [0.0, 0.0, 1.0]


def test_a_singular_kernel_is_learned_for_a_finite_time_or_with_a_ridge() -> None:
    kernels = linear(PHI[:, :2])  # of rank two
    with pytest.raises(Mistake, match=r"4 of 6 eigenvalues are zero.*finite time, or a ridge > 0"):
        trained(kernels, kernels, FOREVER)
    for gain, ridge in ((FlowGain(1e6), 0.0), (FOREVER, 0.1)):
        assert trained(kernels, kernels, gain, ridge).mean(TARGETS).isfinite().all()


@pytest.mark.parametrize("ridge", [-0.1, float("nan"), inf])
def test_what_is_no_ridge_is_refused(ridge: float) -> None:
    with pytest.raises(Mistake, match="it takes a number ≥ 0"):
        condition(linear(PHI), ridge)


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(Mistake, match="time=-1: it takes a number ≥ 0, or inf"):
        FlowGain(-1.0)
