"""Predictions against those of an independent library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.closed_form import FOREVER, AbstractGain, Ensemble, FlowGain, condition, modes_of
from tests.closed_form.golden import CASES, RIDGES, Golden, golden

RTOL, ATOL = 1e-11, 1e-11  # kernels have condition numbers up to 1e4, and both libraries lose that many eps


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


@pytest.fixture(params=CASES)
def given(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


def ensemble(given: Golden, kind: str, gain: AbstractGain, ridge: str) -> Ensemble:
    """All layers learn, or (`nngp`) the readout alone."""
    tangent = given.kernels(kind)
    return Ensemble(tangent.cross, given.kernels("nngp"), modes_of(tangent.train).at(gain, given.ridge(ridge)))


@pytest.mark.parametrize("ridge", RIDGES)
def test_one_network_at_every_time(given: Golden, ridge: str) -> None:
    arrays, ntk = given.arrays, given.kernels("ntk")
    missing, modes = arrays["y"] - arrays["f0_train"], modes_of(ntk.train)
    for k, time in enumerate(given.times):
        learned = modes.at(FlowGain(time), given.ridge(ridge))(missing)
        agree(arrays["f0_train"] + ntk.train @ learned, arrays[f"mse_train_t_{ridge}"][k])
        agree(arrays["f0_test"] + ntk.cross @ learned, arrays[f"mse_test_t_{ridge}"][k])
    learned = modes.at(FOREVER, given.ridge(ridge))(missing)
    agree(arrays["f0_test"] + ntk.cross @ learned, arrays[f"mse_test_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
def test_means_of_ensembles(given: Golden, kind: str, ridge: str) -> None:
    targets = given.arrays["y"]
    for k, time in enumerate(given.times):
        found = ensemble(given, kind, FlowGain(time), ridge)
        agree(found.mean(targets), given.arrays[f"ens_{kind}_mean_t_{ridge}"][k])
    agree(ensemble(given, kind, FOREVER, ridge).mean(targets), given.arrays[f"ens_{kind}_mean_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_covariance_where_all_layers_learn(given: Golden, ridge: str) -> None:
    start = given.arrays["nngp_22"]
    for k, time in enumerate(given.times):
        found = ensemble(given, "ntk", FlowGain(time), ridge)
        agree(found.covariance(start), given.arrays[f"ens_ntk_cov_t_{ridge}"][k])
    agree(ensemble(given, "ntk", FOREVER, ridge).covariance(start), given.arrays[f"ens_ntk_cov_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_covariance_where_the_readout_learns(given: Golden, ridge: str) -> None:
    start, prior, noise = given.arrays["nngp_22"], given.kernels("nngp"), given.ridge(ridge)
    for k, time in enumerate(given.times):
        found = condition(prior, noise, FlowGain(time))
        agree(found.covariance(start), given.arrays[f"ens_nngp_cov_t_{ridge}"][k])
    agree(condition(prior, noise).covariance(start), given.arrays[f"ens_nngp_cov_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_gaussian_processes(given: Golden, ridge: str) -> None:
    arrays, noise = given.arrays, given.ridge(ridge)
    for kind, name in (("nngp", "gp_nngp"), ("ntk", "gp_ntkgp")):
        process = condition(given.kernels(kind), noise)
        agree(process.mean(arrays["y"]), arrays[f"{name}_mean_{ridge}"])
        agree(process.covariance(arrays[f"{kind}_22"]), arrays[f"{name}_cov_{ridge}"])
    found = ensemble(given, "ntk", FOREVER, ridge)
    agree(found.mean(arrays["y"]), arrays[f"gp_ntk_mean_{ridge}"])
    agree(found.covariance(arrays["nngp_22"]), arrays[f"gp_ntk_cov_{ridge}"])
