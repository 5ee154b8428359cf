"""The adjoint of the sum backwards is a dense vector that takes in Jacobians and is multiplied with others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.features import adjoint as chapter
from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel.compare import agree
from tests.kernel.problems import problem

EPS = torch.finfo(torch.float64).eps
NAMES = ["called twice", "tokens", "an output for every token"]


def features(name: str, part: slice) -> tuple[Jacobian, Weights]:
    """The tangent features at some of a problem's inputs, and the weights."""
    given = problem(name)
    reader, own = reader_of(given.module)
    return reader.tangent(reader.record(own, given.x[part])), own


def dense(found: Jacobian, own: Weights) -> dict[str, Tensor]:
    """J of every parameter, [example, out, size]."""
    total = {name: torch.zeros(found.examples, found.outputs, w.numel(), dtype=w.dtype) for name, w in own.items()}
    for block in found.blocks:
        for rows in block.by_name():
            total[rows.name][:, :, : rows.size] += rows.rows
    return total


def filled(name: str, times: int) -> tuple[Adjoint, dict[str, Tensor], Jacobian, Weights]:
    """An adjoint that took in a Jacobian so many times, the same by dense vectors, the features and the weights."""
    found, own = features(name, slice(0, 3))
    made, rows = zero_adjoint(found), dense(found, own)
    total = {name: torch.zeros_like(part) for name, part in rows.items()}
    generator = torch.Generator().manual_seed(2)
    for _ in range(times):
        scale = {name: torch.rand(w.shape, generator=generator, dtype=w.dtype) for name, w in own.items()}
        made.accumulate(found, scale, 0.75)
        total = {name: 0.75 * part + scale[name].flatten() * rows[name] for name, part in total.items()}
    return made, total, found, own


@pytest.mark.parametrize("cached", [1, 2**18])
@pytest.mark.parametrize("cheaper", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_adjoint_is_its_dense_vector(name: str, cheaper: bool, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapter, "left_first_is_cheaper", lambda total, right: cheaper)
    monkeypatch.setattr(chapter, "CACHED", cached)
    made, total, found, own = filled(name, times=3)
    rows = dense(found, own)
    expected = sum((torch.einsum("qcp,ndp->qcnd", total[name], rows[name]) for name in own), start=torch.zeros(()))
    agree(made.kernel(found), torch.as_tensor(expected), 100 * EPS)
    applied = sum((total[name] @ own[name].detach().flatten() for name in own), start=torch.zeros(()))
    agree(made.applied(own), torch.as_tensor(applied), 100 * EPS)


@pytest.mark.parametrize("name", NAMES)
def test_features_of_other_keys_meet_parameter_by_parameter(name: str) -> None:
    made, _, found, _ = filled(name, times=1)
    apart = [rows for block in found.blocks for rows in block.by_name()]
    other = Jacobian(tuple(apart), found.examples, found.outputs)
    assert len(apart) == len(other.blocks)
    agree(made.kernel(other), made.kernel(found), 100 * EPS)


@pytest.mark.parametrize("name", NAMES)
def test_a_jacobian_times_a_vector_and_with_factors(name: str) -> None:
    found, own = features(name, slice(0, 3))
    rows, factors = dense(found, own), {name: 0.5 + k for k, name in enumerate(own)}
    applied = sum((rows[name] @ w.detach().flatten() for name, w in own.items()), start=torch.zeros(()))
    agree(found.applied(own), torch.as_tensor(applied), 100 * EPS)
    for key, part in dense(found.scaled(factors), own).items():
        agree(part, factors[key] * rows[key], 100 * EPS)


def test_the_cost_model_takes_either_way() -> None:
    narrow = Factored(torch.zeros(2, 1, 3), torch.zeros(2, 1, 1, 3), None, None, None)
    assert chapter.left_first_is_cheaper(torch.zeros(4, 1, 3, 3), narrow)
    wide = Factored(torch.zeros(2, 50, 3), torch.zeros(2, 1, 50, 3), None, None, None)
    assert not chapter.left_first_is_cheaper(torch.zeros(4, 1, 3, 3), wide)
