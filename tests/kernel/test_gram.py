"""The kernel of two Jacobians, whichever way it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features.adjoint import inner
from ntkexp.kernel.features.blocks import Block, Factored, Rows
from ntkexp.kernel.features.gram import STRIP, Sizes, contributions, double_sum, gram, sizes, trace
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.secant.uses import View
from ntkexp.library import reader_of
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import KINDS, Formula

EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 8, 8, 1), (2, 8, 8, 1), (2, 3, 4, 2), (6, 2, 2, 3), (30, 2, 2, 1), (4, 20, 1, 2)]


def factored(
    examples: int, uses: int, inputs: int, features: int, outputs: int, seed: int, name: str = "v"
) -> Factored:
    """Random factors."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(examples, uses, inputs, generator=generator, dtype=torch.float64)
    b = torch.randn(examples, outputs, uses, features, generator=generator, dtype=torch.float64)
    return Factored(a, b, View(name, (inputs, features), (features, 1), 0), None, None)


@pytest.mark.parametrize(("uses", "inputs", "width", "outputs"), SHAPES)
def test_factors_and_multiplied_out_gradients_agree(uses: int, inputs: int, width: int, outputs: int) -> None:
    left, right = factored(4, uses, inputs, width, outputs, 0), factored(3, uses, inputs, width, outputs, 1)
    expected = inner(left.dense().flatten(2), right.dense().flatten(2))
    agree(double_sum(left, right), expected, 100 * EPS)
    agree(gram(jacobian(left), jacobian(right)), expected, 100 * EPS)


def test_the_cost_model_takes_either_way() -> None:
    chosen = {sizes(factored(4, *shape, 0), factored(3, *shape, 1)).way for shape in SHAPES}
    assert chosen == {"one product", "double sum", "multiplied out"}


@pytest.mark.sample(20)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("examples", [1, STRIP, 2 * STRIP + 3])
@pytest.mark.parametrize("uses", [1, 2, 9])
@pytest.mark.parametrize("block", [1, 1000, 10**6])
def test_a_kernel_with_itself_takes_half_the_products(
    uses: int, examples: int, outputs: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips and their blocks end between examples; the halves are mirror images, whichever shares come first."""
    monkeypatch.setattr(chapter, "BLOCK", block)
    shared, rows = factored(examples, uses, 2, 3, outputs, 0), factored(examples, 1, 5, 1, outputs, 1).multiplied_out()
    found = jacobian(shared, Rows(rows, "w"), factored(examples, 1, 2, 3, outputs, 2, "u"))
    expected = gram(found, jacobian(*(replace(block) for block in found.blocks)))
    agree(gram(found, found), expected, 100 * EPS)


@pytest.mark.parametrize("block", [1, 40, 10**6])
@pytest.mark.parametrize(("outputs", "outputs_"), [(1, 1), (2, 3), (4, 1)])
def test_layers_of_one_use_are_summed_block_by_block(
    outputs: int, outputs_: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several layers, and a readout, whose β are the same for all examples."""
    monkeypatch.setattr(chapter, "BLOCK", block)
    left, right = (layers(n, out, seed) for n, out, seed in ((5, outputs, 0), (4, outputs_, 10)))
    expected = sum(
        inner(one.dense().flatten(2), other.dense().flatten(2)) for one, other in zip(left, right, strict=True)
    )
    agree(gram(jacobian(*left), jacobian(*right)), torch.as_tensor(expected), 100 * EPS)


def layers(examples: int, outputs: int, seed: int) -> list[Factored]:
    """Two layers with biases, and a readout."""
    found = [replace(factored(examples, 1, 3, 4, outputs, seed + k, name), shift=0.5) for k, name in enumerate("abc")]
    readout = torch.eye(4, dtype=torch.float64)[:outputs, None].expand(examples, -1, -1, -1)
    return [*found[:2], replace(found[2], outputs=readout)]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("room", [1, 10**6])
def test_gradients_side_by_side_are_gradients_one_by_one(
    outputs: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chapter, "COLUMNS", room)
    left, right = (
        jacobian(factored(n, 30, 2, 3, outputs, n), factored(n, 40, 3, 2, outputs, n + 1, "u")) for n in (4, 3)
    )
    expected = sum(
        inner(one.dense().flatten(2), other.dense().flatten(2))
        for one, other in zip(left.blocks, right.blocks, strict=True)
        if isinstance(one, Factored) and isinstance(other, Factored)
    )
    assert isinstance(expected, Tensor)
    agree(gram(left, right), expected, 100 * EPS)


def jacobian(*blocks: Block) -> Jacobian:
    """Of these blocks."""
    return Jacobian(blocks, *blocks[0].gradients)


@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.parametrize("name", ["called twice", "called three times", "tokens", "an output for every token"])
def test_either_way_gives_the_kernel_of_a_shared_layer(
    name: str, choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = known(name).features
    usual = gram(found, found)
    monkeypatch.setattr(Sizes, "way", "double sum" if choice else "multiplied out")
    agree(gram(found, found), usual, 100 * EPS)


def output_gradient(found: Jacobian) -> Tensor:
    """A random one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(found.examples, found.outputs, generator=generator, dtype=torch.float64)


@pytest.mark.sample(8)
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
    (block,) = found.blocks
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


@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (4, 1)], ids=["rows", "columns", "some of a row"])
def test_factors_meet_rows_of_the_same_parameter(stride: tuple[int, int]) -> None:
    """Where one side was read in another way than the other; elements of which one side shows none count as zero."""
    left = factored(4, 5, 2, 3, 2, 0)
    view = View("v", (2, 3), stride, 1)
    given = jacobian(replace(left, weight=view, bias=View("v", (3,), (1,), 0), shift=2.0))
    rows = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight, bias = left.of_weight().flatten(2), 2.0 * left.of_bias()
    dense = torch.zeros(4, 2, 12, dtype=torch.float64)
    places = view.of(torch.arange(12)).flatten()
    dense.index_add_(2, places, weight).index_add_(2, torch.arange(3), bias)
    agree(gram(given, jacobian(Rows(rows, "v"))), inner(dense, rows), 100 * EPS)
    expected = torch.einsum("qcnc->qn", inner(dense, rows))[:, None, :, None]
    agree(trace(given, jacobian(Rows(rows, "v"))), expected, 100 * EPS)


def test_an_empty_jacobian_has_no_kernel() -> None:
    with pytest.raises(Mistake, match="requires gradients"):
        gram(Jacobian((), 2, 1), Jacobian((), 2, 1))
