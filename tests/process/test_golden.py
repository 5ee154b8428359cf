"""Predictions against those of an independent library."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from ntkexp.process.ensemble import Ensemble, readout, trained
from ntkexp.process.gain import Flow
from ntkexp.process.modes import modes_of
from ntkexp.process.posterior import conditioned
from tests.process.golden import CASES, RIDGES, Golden, golden

RTOL, ATOL = 1e-11, 1e-11  # kernels have condition numbers up to 1e4, and both libraries lose that many eps


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


@pytest.fixture(params=CASES)
def given(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


def ensemble(given: Golden, kind: str, ridge: str) -> Ensemble:
    if kind == "nngp":
        return readout(given.kernels("nngp"), given.ridge(ridge))
    return trained(given.kernels("ntk"), given.kernels("nngp"), given.ridge(ridge))


@pytest.mark.parametrize("ridge", RIDGES)
def test_one_network_at_every_time(given: Golden, ridge: str) -> None:
    arrays, ntk = given.arrays, given.kernels("ntk")
    missing, modes = arrays["y"] - arrays["f0_train"], modes_of(ntk.train)
    for k, time in enumerate(given.times):
        learned = modes.learned(Flow(time), missing, given.ridge(ridge))
        agree(arrays["f0_train"] + ntk.train @ learned, arrays[f"mse_train_t_{ridge}"][k])
        agree(arrays["f0_test"] + ntk.cross @ learned, arrays[f"mse_test_t_{ridge}"][k])
    learned = modes.solved(missing, given.ridge(ridge))
    agree(arrays["f0_test"] + ntk.cross @ learned, arrays[f"mse_test_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
def test_means_of_ensembles(given: Golden, kind: str, ridge: str) -> None:
    found, targets = ensemble(given, kind, ridge), given.arrays["y"]
    for k, time in enumerate(given.times):
        agree(found.mean(Flow(time), targets), given.arrays[f"ens_{kind}_mean_t_{ridge}"][k])
    agree(found.mean(Flow(inf), targets), given.arrays[f"ens_{kind}_mean_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_covariance_where_all_layers_learn(given: Golden, ridge: str) -> None:
    found, start = ensemble(given, "ntk", ridge), given.arrays["nngp_22"]
    for k, time in enumerate(given.times):
        agree(found.covariance(Flow(time), start), given.arrays[f"ens_ntk_cov_t_{ridge}"][k])
    agree(found.covariance(Flow(inf), start), given.arrays[f"ens_ntk_cov_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_covariance_where_the_readout_learns(given: Golden, ridge: str) -> None:
    found, start = conditioned(given.kernels("nngp"), given.ridge(ridge)), given.arrays["nngp_22"]
    for k, time in enumerate(given.times):
        agree(found.covariance(start, Flow(time)), given.arrays[f"ens_nngp_cov_t_{ridge}"][k])
    agree(found.covariance(start), given.arrays[f"ens_nngp_cov_inf_{ridge}"])


@pytest.mark.parametrize("ridge", RIDGES)
def test_gaussian_processes(given: Golden, ridge: str) -> None:
    arrays, noise = given.arrays, given.ridge(ridge)
    for kind, name in (("nngp", "gp_nngp"), ("ntk", "gp_ntkgp")):
        process = conditioned(given.kernels(kind), noise)
        agree(process.mean(arrays["y"]), arrays[f"{name}_mean_{ridge}"])
        agree(process.covariance(arrays[f"{kind}_22"]), arrays[f"{name}_cov_{ridge}"])
    found = ensemble(given, "ntk", ridge)
    agree(found.mean(Flow(inf), arrays["y"]), arrays[f"gp_ntk_mean_{ridge}"])
    agree(found.covariance(Flow(inf), arrays["nngp_22"]), arrays[f"gp_ntk_cov_{ridge}"])
