"""The kernel of two Jacobians, whichever way it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features import gram as total
from ntkexp.kernel.features.blocks import Block, Factored, Features, Rows
from ntkexp.kernel.features.bracket import inner
from ntkexp.kernel.features.gram import STRIP, THIN, Sizes, contributions, double_sum, gram, sizes
from ntkexp.library import reader_of
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import KINDS, Formula

EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 8, 8, 1), (2, 8, 8, 1), (2, 3, 4, 2), (6, 2, 2, 3), (30, 2, 2, 1), (4, 20, 1, 2)]


def factored(examples: int, uses: int, inputs: int, features: int, outputs: int, seed: int) -> Factored:
    """Random factors."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(examples, uses, inputs, generator=generator, dtype=torch.float64)
    b = torch.randn(examples, outputs, uses, features, generator=generator, dtype=torch.float64)
    return Factored(a, b, None, None, None)


@pytest.mark.parametrize(("uses", "inputs", "width", "outputs"), SHAPES)
def test_factors_and_multiplied_out_gradients_agree(uses: int, inputs: int, width: int, outputs: int) -> None:
    left, right = factored(4, uses, inputs, width, outputs, 0), factored(3, uses, inputs, width, outputs, 1)
    expected = inner(left.dense().flatten(2), right.dense().flatten(2))
    agree(double_sum(left, right), expected, 100 * EPS)
    agree(
        gram(Features({("w", None): left}, 4, outputs), Features({("w", None): right}, 3, outputs)), expected, 100 * EPS
    )


def test_the_cost_model_takes_either_way() -> None:
    chosen = {sizes(factored(4, *shape, 0), factored(3, *shape, 1)).way for shape in SHAPES}
    assert chosen == {"one product", "double sum", "multiplied out"}


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("examples", [1, THIN, STRIP, 2 * STRIP + 3])
@pytest.mark.parametrize("uses", [1, 2, 9])
@pytest.mark.parametrize("small", [0, 1000])
def test_a_kernel_with_itself_takes_half_the_products(
    uses: int, examples: int, outputs: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips end between examples; the halves are mirror images, whichever shares come first."""
    monkeypatch.setattr(total, "SMALL", small)
    shared, rows = factored(examples, uses, 2, 3, outputs, 0), factored(examples, 1, 5, 1, outputs, 1).multiplied_out()
    found = features(shared, Rows(rows, "w"), factored(examples, 1, 2, 3, outputs, 2))
    expected = gram(found, features(*(replace(block) for block in found.blocks.values())))
    agree(gram(found, found), expected, 100 * EPS)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("room", [1, 10**6])
def test_gradients_side_by_side_are_gradients_one_by_one(
    outputs: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chapter, "COLUMNS", room)
    left, right = (features(factored(n, 30, 2, 3, outputs, n), factored(n, 40, 3, 2, outputs, n + 1)) for n in (4, 3))
    expected = sum(
        inner(one.dense().flatten(2), other.dense().flatten(2))
        for one, other in zip(left.blocks.values(), right.blocks.values(), strict=True)
        if isinstance(one, Factored) and isinstance(other, Factored)
    )
    assert isinstance(expected, Tensor)
    agree(gram(left, right), expected, 100 * EPS)


def features(*blocks: Block) -> Features:
    """Of parameters without names."""
    return Features({(str(k), None): block for k, block in enumerate(blocks)}, *blocks[0].gradients)


@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.parametrize("name", ["called twice", "called three times", "tokens", "an output for every token"])
def test_either_way_gives_the_kernel_of_a_shared_layer(
    name: str, choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = known(name).features
    usual = gram(found, found)
    monkeypatch.setattr(Sizes, "way", "double sum" if choice else "multiplied out")
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


def test_the_total_of_a_weight_whose_row_is_its_bias_is_the_gradient_of_autograd() -> None:
    """And no other row is used."""
    made, x = Formula(lambda x, w: torch.addmm(w[2], x, w[1:3]), w=(4, 3)).double(), torch.eye(2, dtype=torch.float64)
    reader, weights = reader_of(made)
    found = reader.tangent(reader.record(weights, x))
    (block,) = found.blocks.values()
    assert isinstance(block, Factored)
    cotangent = output_gradient(found)
    expected = torch.autograd.grad(made(x), made.get_parameter("w"), cotangent)[0]
    agree(found.weighted(cotangent).total(weights)["w"], expected, 100 * EPS)


@pytest.mark.sample(8)
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
