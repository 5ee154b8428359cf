"""The kernel of two Jacobians, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features.features import Factored, Features, Rows
from ntkexp.kernel.features.gram import (
    STRIP,
    contributions,
    double_sum,
    double_sum_is_cheaper,
    gram,
    inner,
    with_itself,
)
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import KINDS

EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 8, 8, 1), (2, 3, 4, 2), (6, 2, 2, 3), (30, 2, 2, 1), (4, 20, 1, 2)]


def factored(examples: int, uses: int, inputs: int, features: int, outputs: int, seed: int) -> Factored:
    """Random factors."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(examples, uses, inputs, generator=generator, dtype=torch.float64)
    b = torch.randn(examples, outputs, uses, features, generator=generator, dtype=torch.float64)
    return Factored(a, b, None, None, 0)


@pytest.mark.parametrize(("uses", "inputs", "width", "outputs"), SHAPES)
def test_factors_and_multiplied_out_gradients_agree(uses: int, inputs: int, width: int, outputs: int) -> None:
    left, right = factored(4, uses, inputs, width, outputs, 0), factored(3, uses, inputs, width, outputs, 1)
    expected = inner(left.dense().flatten(2), right.dense().flatten(2))
    agree(double_sum(left, right), expected, 100 * EPS)
    agree(
        gram(Features({("w", None): left}, 4, outputs), Features({("w", None): right}, 3, outputs)), expected, 100 * EPS
    )


def test_the_cost_model_takes_either_way() -> None:
    chosen = {double_sum_is_cheaper(factored(4, *shape, 0), factored(3, *shape, 1)) for shape in SHAPES}
    assert chosen == {True, False}


@pytest.mark.parametrize("rows", [1, STRIP, 2 * STRIP + 3])
def test_rows_with_themselves_take_half_the_products(rows: int) -> None:
    left = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    agree(with_itself(left), left @ left.t(), 100 * EPS)


@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.parametrize("name", ["called twice", "called three times", "tokens", "an output for every token"])
def test_either_way_gives_the_kernel_of_a_shared_layer(
    name: str, choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = known(name).features
    usual = gram(found, found)
    monkeypatch.setattr(chapter, "double_sum_is_cheaper", lambda left, right: choice)
    agree(gram(found, found), usual, 100 * EPS)


def output_gradient(found: Features) -> Tensor:
    """A random one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(found.examples, found.outputs, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", KINDS)
def test_contributions_are_the_kernel_contracted(name: str) -> None:
    found = known(name).features
    gradient, kernel = output_gradient(found), gram(found, found)
    expected = torch.einsum("qcnd,nd->qcn", kernel, gradient)
    agree(contributions(found, found, gradient), expected, 100 * EPS, kernel.abs().max() * gradient.abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_the_total_of_features_is_the_gradient_of_autograd(name: str) -> None:
    given, found = known(name).given, known(name).features
    cotangent = output_gradient(found)
    leaves = {key: weight.clone().requires_grad_() for key, weight in given.start.items()}
    output = functional_call(given.module, leaves, (given.x,)).reshape(cotangent.shape)
    expected = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
    total = found.weighted(cotangent).total(given.start)
    scale = max(gradient.abs().max() for gradient in expected)
    for key, gradient in zip(leaves, expected, strict=True):
        agree(total[key], gradient, 100 * EPS, scale)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_inputs_change_only_rounding(name: str) -> None:
    network = known(name)
    blocks = torch.tensor_split(network.given.x, (1, 2))
    parts = [network.reader.tangent(network.reader.record(network.given.start, block)) for block in blocks]
    rows = [torch.cat([gram(left, right) for right in parts], 2) for left in parts]
    agree(torch.cat(rows), gram(network.features, network.features), 100 * EPS)


def test_features_of_different_functions_have_no_kernel() -> None:
    rows = Features({("w", None): Rows(torch.ones(2, 1, 3), "w")}, 2, 1)
    with pytest.raises(TypeError, match="no common kernel"):
        gram(rows, Features({("w", None): factored(2, 1, 1, 3, 1, 0)}, 2, 1))


def test_no_features_have_no_kernel() -> None:
    with pytest.raises(Mistake, match="requires gradients"):
        gram(Features({}, 2, 1), Features({}, 2, 1))
