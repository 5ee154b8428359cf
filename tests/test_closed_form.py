"""Closed forms against time stepping, sampling and each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ntkexp.closed_form import (
    FOREVER,
    AbstractGain,
    DescentGain,
    Ensemble,
    FlowGain,
    Kernels,
    calibration_error,
    condition,
    conjugate_gradients,
    factorise,
    folds,
    held_out,
    log_loss,
    modes_of,
    probabilities,
    ridges,
)
from ntkexp.mistake import Mistake
from tests.kernel.oracle import EPS, normal

TRAIN, POINTS, FEATURES = 6, 4, 9


def linear(features: Tensor) -> Kernels:
    """⟨φ(x), φ(x′)⟩, the training examples first."""
    return Kernels(features[:TRAIN] @ features[:TRAIN].mH, features[TRAIN:] @ features[:TRAIN].mH)


def trained(tangent: Kernels, start: Kernels, gain: AbstractGain, ridge: float = 0.0) -> Ensemble:
    return Ensemble(tangent.cross, start, modes_of(tangent.train).at(gain, ridge))


PHI = normal(TRAIN + POINTS, FEATURES, seed=1) / 3
TARGETS = normal(TRAIN, 2, seed=2)


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
    """f_t is affine in f_0, so the covariance of f_t follows from any root of the covariance of f_0."""
    tangent, start = linear(PHI), linear(root := normal(TRAIN + POINTS, FEATURES, seed=3))
    found = trained(tangent, start, gain)
    mapped = root[TRAIN:] - found.weights @ root[:TRAIN]
    between = root[TRAIN:] @ root[TRAIN:].mH
    torch.testing.assert_close(found.covariance(between), mapped @ mapped.mH, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.variance(between.diagonal()), mapped.square().sum(1), rtol=1e-10, atol=1e-10)


def test_trained_linear_models_have_the_mean_and_covariance() -> None:
    """Draw θ ~ N(0, 1), follow gradient flow of ½‖Φθ − y‖² for the time 0.7 and look at the outputs."""
    models, time, targets = 20_000, 0.7, TARGETS[:, :1]
    theta = normal(FEATURES, models, seed=4)
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


@pytest.mark.parametrize(
    ("eigenvalues", "expected"),
    [
        # up to n · eps · λ_max = 16 eps, an eigenvalue is rounding
        ([4.0, -1e-17, 15 * EPS, 17 * EPS], [0.0, 0.0, 17 * EPS, 4.0]),
        # so is one up to the absolute value of the most negative
        ([4.0, -1e-10, 9e-11, 1.1e-10], [0.0, 0.0, 1.1e-10, 4.0]),
    ],
)
def test_eigenvalues_of_rounding_size_count_as_zero(eigenvalues: list[float], expected: list[float]) -> None:
    modes = modes_of(torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)))
    assert modes.values.tolist() == expected


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


# Ways to solve, against a plain solve; held-out predictions, against refits; probabilities, against sampling.


EXAMPLES = 12


def kernel(rank: int = 20) -> Tensor:
    features = normal(EXAMPLES, rank, seed=1)
    return features @ features.mH / rank


def plain(ridge: float, right: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(kernel() + ridge * torch.eye(EXAMPLES, dtype=torch.float64), right)
    return found


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_cholesky_solves(ridge: float) -> None:
    targets, found = normal(EXAMPLES, 3, seed=2), factorise(kernel(), ridge)
    assert found.jitter == 0
    torch.testing.assert_close(found.solve(targets), plain(ridge, targets), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_conjugate_gradients_end_after_as_many_products_as_there_are_examples(ridge: float) -> None:
    matrix, targets = kernel(), normal(EXAMPLES, 3, seed=2)
    targets[:, 1] = 0.0  # has arrived before it starts
    found = conjugate_gradients(lambda a: matrix @ a + ridge * a, matrix.diagonal() + ridge, targets)
    assert found.products <= EXAMPLES + 2  # two for rounding
    assert found.residual <= 1e-10
    # an error is at most the residual times the condition number, below a thousand
    torch.testing.assert_close(found.solution, plain(ridge, targets), rtol=1e-7, atol=1e-7)


def test_conjugate_gradients_divide_by_the_diagonal() -> None:
    """The preconditioned matrix is the identity, so that one product solves the equations."""
    diagonal = normal(EXAMPLES, seed=7).abs() + 0.1
    solved = conjugate_gradients(lambda a: diagonal[:, None] * a, diagonal, normal(EXAMPLES, 2, seed=2))
    assert solved.products == 1
    assert solved.residual <= 10 * EPS


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**40])
def test_conjugate_gradients_know_no_unit(unit: float) -> None:
    targets, R = normal(EXAMPLES, 2, seed=2), kernel()
    usual, scaled = (conjugate_gradients(lambda a: R @ a, R.diagonal(), c * targets) for c in (1.0, unit))
    assert torch.equal(scaled.solution, unit * usual.solution)
    assert (scaled.residual, scaled.products) == (usual.residual, usual.products)


def test_conjugate_gradients_say_how_far_they_came() -> None:
    matrix, heard = kernel(), []
    targets = normal(EXAMPLES, 1, seed=2)
    found = conjugate_gradients(
        lambda a: matrix @ a, matrix.diagonal(), targets, most=3, report_progress=lambda *told: heard.append(told)
    )
    assert [count for count, _ in heard] == [1, 2, 3]
    true = float((targets - matrix @ found.solution).norm() / targets.norm())
    assert found.residual == pytest.approx(true, rel=1e-6)
    assert found.residual > 1e-10


@pytest.mark.parametrize("power", range(6))
def test_the_first_jitter_that_makes_the_matrix_definite_is_added(power: int) -> None:
    """Jitters are n · eps · mean diagonal times powers of ten; each is tried with a slightly smaller defect."""
    entries = torch.full((4,), 3.0, dtype=torch.float64)
    jitter = 4 * EPS * 2.25 * 10**power
    entries[0] = 1e-17 - 0.9 * jitter  # the mean of the diagonal stays 2.25 to rounding
    factor = factorise(torch.diag(entries), 1e-17)
    assert factor.jitter == pytest.approx(jitter, rel=1e-6)
    right = normal(4, 1, seed=2)
    expected = right / (entries + 1e-17 + factor.jitter)[:, None]
    torch.testing.assert_close(factor.solve(right), expected, rtol=1e-3, atol=0.0)  # 0.1 jitter remains


def test_a_matrix_that_no_jitter_makes_definite_is_singular() -> None:
    with pytest.raises(Mistake, match="the kernel is singular"):
        factorise(torch.diag(torch.tensor([1.0, -1e-3], dtype=torch.float64)), 1e-17)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_cholesky_refuses_what_is_singular_in_any_unit(scale: float) -> None:
    """A pivot up to n · eps · mean diagonal is rounding."""
    for pivot, is_singular in ((4 * EPS * 0.75 * 0.9, True), (4 * EPS * 0.75 * 1.1, False)):
        matrix = scale * torch.diag(torch.tensor([1.0, 1.0, 1.0, pivot], dtype=torch.float64))
        if is_singular:
            with pytest.raises(Mistake, match=r"the kernel is singular.*a ridge > 0"):
                factorise(matrix, 0.0)
        else:
            assert factorise(matrix, 0.0).jitter == 0


def test_ridges_are_half_decades_of_the_mean_diagonal() -> None:
    matrix = torch.diag(torch.tensor([2.0, 4.0], dtype=torch.float64))
    expected = [3.0 * 10 ** (exponent / 2) for exponent in range(-16, 3)]
    assert ridges(matrix) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("count", [EXAMPLES, 5], ids=["one by one", "five folds"])
@pytest.mark.parametrize("entries", [1, 2])
def test_what_is_left_out_is_as_if_it_had_not_been_there(count: int, entries: int) -> None:
    ridge, targets = 0.2, normal(EXAMPLES, 2, seed=3)
    parts = folds(EXAMPLES // entries, count, entries)
    found = held_out(modes_of(kernel()), ridge, targets, parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(EXAMPLES))
    for part in parts:
        kept = torch.ones(EXAMPLES, dtype=torch.bool)
        kept[part] = False
        R = kernel()[kept][:, kept] + ridge * torch.eye(int(kept.sum()), dtype=torch.float64)
        expected = kernel()[part][:, kept] @ torch.linalg.solve(R, targets[kept])
        torch.testing.assert_close(found[part], expected, rtol=1e-11, atol=1e-12)


def test_probabilities_are_frequencies() -> None:
    mean, deviation, draws = normal(4, 3, seed=4), normal(4, seed=5).abs() + 0.1, 100_000
    drawn = mean + deviation[:, None] * normal(draws, 4, 3, seed=6)
    frequencies = torch.nn.functional.one_hot(drawn.argmax(2), 3).double().mean(0)
    error = 5 * 0.5 / draws**0.5  # five standard errors
    torch.testing.assert_close(probabilities(mean, deviation), frequencies, rtol=0, atol=error)


def test_two_classes_at_one_output() -> None:
    found = probabilities(torch.tensor([[0.0], [1.0]]).double(), torch.tensor([1.0, 0.0]).double())
    assert found.tolist() == [[0.5, 0.5], [0.0, 1.0]]


def test_the_log_of_probabilities_is_a_loss() -> None:
    found = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    expected = -(torch.tensor([0.75, 0.5]).double().log().mean())
    assert log_loss(found, torch.tensor([1, 0])) == pytest.approx(float(expected), rel=1e-15)


@pytest.mark.parametrize(
    ("confidences", "labels", "expected"),
    [
        ([0.75] * 4, [1, 1, 1, 0], 0.0),
        ([0.75] * 4, [1, 1, 0, 0], 0.25),
        # Two bins, whose gaps 0.4 and −0.9 would cancel in one bin
        ([0.6, 0.9], [1, 0], (0.4 + 0.9) / 2),
        # 0.65 and 0.67 are in different ones of 15 bins, 0.68 and 0.7 in the same one
        ([0.65, 0.67], [1, 0], (0.35 + 0.67) / 2),
        ([0.68, 0.7], [1, 0], (0.7 - 0.32) / 2),
        # Certainty belongs to the last bin
        ([0.95, 1.0], [0, 1], 0.95 / 2),
    ],
)
def test_the_calibration_error_averages_the_gaps_of_bins(
    confidences: list[float], labels: list[int], expected: float
) -> None:
    confidence = torch.tensor(confidences, dtype=torch.float64)
    chances = torch.stack([1 - confidence, confidence], 1)
    assert calibration_error(chances, torch.tensor(labels)) == pytest.approx(expected, abs=1e-15)


# Predictions against an independent library (neural-tangents 0.6.5, float64).


FOLDER = Path(__file__).parent / "limit" / "golden"
CLOSE = 1e-11  # kernels have condition numbers up to 1e4, and both libraries lose that many eps


def answers(arrays: dict[str, Tensor], ridge: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each answer of the library at one ridge, by name, with ours."""
    noise, targets = float(arrays["ridge"][int(ridge[-1])]), arrays["y"]
    kernels = {kind: Kernels(arrays[f"{kind}_11"], arrays[f"{kind}_12"].mH) for kind in ("ntk", "nngp")}
    ntk, prior, start = kernels["ntk"], kernels["nngp"], arrays["nngp_22"]
    scale = float(arrays["learning_rate"]) / targets.numel()  # s = ηt/N, N the number of targets
    missing, modes = targets - arrays["f0_train"], {kind: modes_of(one.train) for kind, one in kernels.items()}
    for k, time in enumerate([*(scale * float(t) for t in arrays["t"]), inf]):
        gain: AbstractGain = FOREVER if time == inf else FlowGain(time)

        def expected(name: str, k: int = k, time: float = time) -> Tensor:
            return arrays[f"{name}_inf_{ridge}"] if time == inf else arrays[f"{name}_t_{ridge}"][k]

        learned = modes["ntk"].at(gain, noise)(missing)
        if time != inf:
            yield "mse_train", arrays["f0_train"] + ntk.train @ learned, expected("mse_train")
        yield "mse_test", arrays["f0_test"] + ntk.cross @ learned, expected("mse_test")
        for kind, one in kernels.items():
            mean = Ensemble(one.cross, prior, modes[kind].at(gain, noise)).mean(targets)
            yield f"ens_{kind}_mean", mean, expected(f"ens_{kind}_mean")
        all_layers = Ensemble(ntk.cross, prior, modes["ntk"].at(gain, noise))
        yield "ens_ntk_cov", all_layers.covariance(start), expected("ens_ntk_cov")
        yield "ens_nngp_cov", condition(prior, noise, gain).covariance(start), expected("ens_nngp_cov")
    for name, kind in (("gp_nngp", "nngp"), ("gp_ntkgp", "ntk")):
        process = condition(kernels[kind], noise)
        yield f"{name}_mean", process.mean(targets), arrays[f"{name}_mean_{ridge}"]
        yield f"{name}_cov", process.covariance(arrays[f"{kind}_22"]), arrays[f"{name}_cov_{ridge}"]
    yield "gp_ntk_mean", all_layers.mean(targets), arrays[f"gp_ntk_mean_{ridge}"]
    yield "gp_ntk_cov", all_layers.covariance(start), arrays[f"gp_ntk_cov_{ridge}"]


@pytest.mark.parametrize("ridge", ["ridge0", "ridge1"])
@pytest.mark.parametrize("case", ["predict_fc_relu", "predict_cnn_gap"])
def test_predictions_are_those_of_an_independent_library(case: str, ridge: str) -> None:
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as file:
        arrays = {name: torch.as_tensor(file[name]) for name in file.files if file[name].dtype.kind == "f"}
    compared = 0
    for name, found, expected in answers(arrays, ridge):
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE, msg=partial("{}: {}".format, name))
        compared += 1
    assert compared == 6 * len(arrays["t"]) + 5 + 6
