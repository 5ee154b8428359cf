"""Products of a Jacobian with a vector on either side are those of its features, however many outputs there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ntkexp.kernel.read.program_cache import ProgramCache
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import DENSE, KINDS

EPS = torch.finfo(torch.float64).eps


@pytest.mark.sample(20)
@pytest.mark.parametrize("planned", [False, True], ids=["as it comes", "by programs"])
@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_mixed_outputs_are_pulled_back_as_the_jacobian_is(name: str, planned: bool) -> None:
    network = known(name)
    reader = replace(network.reader, programs=ProgramCache() if planned else None)
    tape = reader.record(network.given.start, network.given.x)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3 if planned else 1):  # the last comes from a program that has been held against the usual way
        mixture = torch.randn(tape.outputs.shape, generator=draw, dtype=torch.float64)
        gradient = reader.weighted(tape, mixture).total(dict(network.given.start))
        for key, jacobian in network.jacobians.items():
            rows = jacobian[: len(mixture)]
            expected = torch.einsum("nc,ncp->p", mixture, rows).view(gradient[key].shape)
            agree(gradient[key], expected, 100 * EPS, rows.abs().sum((0, 1)).max() * mixture.abs().max() + 1e-300)


@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_a_direction_is_passed_through_as_the_jacobian_says(name: str) -> None:
    network = known(name)
    draw = torch.Generator().manual_seed(1)
    start = {key: weight for key, weight in network.given.start.items() if key in network.reader.trained}
    direction = {key: torch.randn(w.shape, generator=draw, dtype=w.dtype) for key, w in start.items()}
    rows = {key: network.jacobians[key][:5] @ direction[key].flatten() for key in network.jacobians}
    size = sum(float(each.abs().amax()) * float(direction[key].norm()) for key, each in network.jacobians.items())
    agree(network.reader.applied(network.tape, direction), torch.stack([*rows.values()]).sum(0), 100 * EPS, size)
