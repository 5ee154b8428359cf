"""Modules whose values decide which row goes where: what was found out on one batch is not believed of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.library import secant_kernel, tangent_kernel
from tests.kernel import oracle
from tests.kernel.compare import agree
from tests.kernel.problems import KINDS, problem
from tests.kernel.routed import ROUTED, batch, routed

EPS = torch.finfo(torch.float64).eps
LONG = ("packed sequences", "top-2 experts", "masked scatter", "masked select", "segments", *KINDS)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in [*ROUTED, *KINDS]]


def batches(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and two batches of equal shape that it routes in different ways."""
    given = problem(name) if name in KINDS else routed(name)
    return given.module, given.x, given.inputs(5) if name in KINDS else batch(given.generator)


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", NAMES)
def test_the_tangent_kernel_of_a_batch_is_its_own_whatever_was_read_before(name: str) -> None:
    module, a, b = batches(name)
    other, _, _ = batches(name)  # of which nothing is known yet
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
    start = {key: weight.detach() for key, weight in module.named_parameters()}
    jacobian = oracle.jacobians(module, torch.cat([a, b]))
    for probes, train, rows in ((a, b, slice(5, None)), (b, a, slice(0, 5))):
        step = {key: -1e-3 * part[rows].sum((0, 1)).view(start[key].shape) for key, part in jacobian.items()}
        end = {key: start[key] + step[key] for key in start}
        predicted = -1e-3 * secant_kernel(module, start, end, probes, train).sum((2, 3))
        before, after = (functional_call(module, weights, (probes,)).detach() for weights in (start, end))
        agree(predicted, (after - before).view_as(predicted), 300 * EPS, before.abs().max())
