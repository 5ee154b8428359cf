"""The kernel of two Jacobians, whichever way it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features.adjoint import inner
from ntkexp.kernel.features.blocks import Block, Factored, Rows
from ntkexp.kernel.features.gram import MIN_STRIP_ROWS, Sizes, contributions, double_sum, gram, sizes, trace
from ntkexp.kernel.features.jacobian import Assembly, Jacobian
from ntkexp.kernel.read import plan
from ntkexp.kernel.read import sketched as sketched_reader
from ntkexp.kernel.read.plan import Outputs, wanted
from ntkexp.kernel.read.sketched import even_slices
from ntkexp.kernel.secant.uses import View
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.oracle import agree
from tests.kernel.problems import DENSE, KINDS, Formula, known, problem
from tests.kernel.routed import ROUTED, routed

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
    expected = inner(oracle.dense(left).flatten(2), oracle.dense(right).flatten(2))
    agree(double_sum(left, right), expected, 100 * EPS)
    agree(gram(jacobian(left), jacobian(right)), expected, 100 * EPS)


def test_the_cost_model_takes_either_way() -> None:
    chosen = {sizes(factored(4, *shape, 0), factored(3, *shape, 1)).way for shape in SHAPES}
    assert chosen == {"one product", "double sum", "multiplied out"}


@pytest.mark.sample(20)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("examples", [1, MIN_STRIP_ROWS, 2 * MIN_STRIP_ROWS + 3])
@pytest.mark.parametrize("uses", [1, 2, 9])
@pytest.mark.parametrize("block", [1, 1000, 10**6])
def test_a_kernel_with_itself_takes_half_the_products(
    uses: int, examples: int, outputs: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips and their blocks end between examples; the halves are mirror images, whichever shares come first."""
    monkeypatch.setattr(chapter, "BLOCK_NUMBERS", block)
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
    monkeypatch.setattr(chapter, "BLOCK_NUMBERS", block)
    left, right = (layers(n, out, seed) for n, out, seed in ((5, outputs, 0), (4, outputs_, 10)))
    expected = sum(
        inner(oracle.dense(one).flatten(2), oracle.dense(other).flatten(2))
        for one, other in zip(left, right, strict=True)
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
    monkeypatch.setattr(chapter, "MAX_COLUMNS", room)
    left, right = (
        jacobian(factored(n, 30, 2, 3, outputs, n), factored(n, 40, 3, 2, outputs, n + 1, "u")) for n in (4, 3)
    )
    expected = sum(
        inner(oracle.dense(one).flatten(2), oracle.dense(other).flatten(2))
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


# Some outputs, or the trace over all of them.


def diagonal(kernel: Tensor) -> Tensor:
    """Σ_c K[x, c, x′, c]."""
    return torch.einsum("qcnc->qn", kernel)[:, None, :, None]


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.sample(10)
@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_the_trace_is_the_sum_of_the_diagonal_blocks(name: str) -> None:
    network = known(name)
    found = tangent_kernel(network.given.module, network.given.x, network.other, outputs="trace")
    agree(found, diagonal(network.kernel[:, :, 5:]), 100 * EPS, network.kernel.abs().max())


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gelu", "called twice", "convolution", "encoder, norm before", "lstm"])
def test_the_trace_of_a_secant(name: str) -> None:
    given = problem(name)
    end, queries = given.end(0.3), given.inputs(2)
    whole = secant_kernel(given.module, {}, end, queries, given.x)
    agree(secant_kernel(given.module, {}, end, queries, given.x, outputs="trace"), diagonal(whole), 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", ["tokens", "softmax", "digamma"])
def test_outputs_a_few_at_a_time_change_only_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(name)
    usual = tangent_kernel(given.module, given.x, outputs="trace")
    monkeypatch.setattr(plan, "OUTPUT_GRADIENT_BYTES", 1.0)
    agree(tangent_kernel(given.module, given.x, outputs="trace"), usual, 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("outputs", [[0], [1, 0], (1,), [1, 1]])
@pytest.mark.parametrize("name", ["tanh", "softmax", "digamma"])
def test_some_outputs_are_those_blocks(name: str, outputs: list[int]) -> None:
    given, chosen = problem(name), list(outputs)
    expected = oracle.tangent(given.module, given.x, given.x)[:, chosen][:, :, :, chosen]
    agree(tangent_kernel(given.module, given.x, outputs=outputs), expected, 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_another_output_is_read_after_the_first() -> None:
    """What was found of a structure holds for every output."""
    given = problem("two heads")
    expected = oracle.tangent(given.module, given.x, given.x)
    for c in range(3):
        agree(tangent_kernel(given.module, given.x, outputs=[c]), expected[:, [c]][:, :, :, [c]], 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_a_thousand_outputs_fit() -> None:
    """The closed form for one layer: ⟨a, a′⟩ + 1 per output. All blocks would be 23 GB."""
    layer = nn.Linear(3, 1000).double()
    x = torch.randn(54, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = 1000 * (x @ x.t() + 1)[:, None, :, None]
    agree(tangent_kernel(layer, x, outputs="trace"), expected, 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_blocks_of_a_thousand_outputs_that_do_not_fit_are_refused_before_any_is_read() -> None:
    layer, x = nn.Linear(3, 1000).double(), torch.zeros(1, 3, dtype=torch.float64).expand(20_000, 3)
    with pytest.raises(
        Mistake, match=r"^the kernel of 20000 × 20000 examples with 1000 outputs each takes 3\.2e\+06 GB"
    ):
        tangent_kernel(layer, x)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ("diagonal", ("outputs='diagonal'", "'all', 'trace'")),
        ([2], ("outputs=[2]", "has 2, numbered from 0 to 1")),
        ([-1], ("outputs=[-1]",)),
        ([], ("outputs=[]",)),
    ],
)
def test_outputs_that_there_are_not_are_refused_in_one_line(outputs: Outputs | str, words: tuple[str, ...]) -> None:
    with pytest.raises(Mistake) as caught:
        wanted(outputs, 2)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", ["relu", "softmax", "digamma"])
def test_a_caller_without_gradients_gets_the_same(name: str) -> None:
    given = problem(name)
    expected = tangent_kernel(given.module, given.x)
    with torch.no_grad():
        assert torch.equal(tangent_kernel(given.module, given.x), expected)


# A kernel that is read in batches is that of all examples at once.


VIEW = View("v", (3, 4), (4, 1), 0)

READ = ("relu", "tokens", "convolution", "convolution in two", "encoder, norm before", "two heads", "digamma")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches as can be, of two examples or three."""
    for name, value in (("MAX_TAPE_BYTES", 0), ("BATCH_TAPE_BYTES", 1), ("UNMEASURED_EXAMPLES", 1)):
        monkeypatch.setattr(sketched_reader, name, value)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("outputs", ["all", "trace"])
def test_batches_change_only_rounding(name: str, outputs: Outputs) -> None:
    network = known(name)
    module, x = network.given.module, network.given.x
    expected = network.kernel[:, :, :5]
    if outputs == "trace":
        expected = torch.einsum("qcnc->qn", expected)[:, None, :, None]
    agree(tangent_kernel(module, x, outputs=outputs), expected, 100 * EPS, network.kernel.abs().max())


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
def test_a_secant_kernel_takes_its_training_examples_in_batches() -> None:
    network = known("convolution")
    module, x = network.given.module, network.given.x
    agree(secant_kernel(module, {}, {}, x[:2], x), network.kernel[:2, :, :5], 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ROUTED)
def test_where_values_route_rows_batches_are_read_all_the_same(name: str) -> None:
    given = routed(name)
    expected = oracle.tangent(given.module, given.x, given.x)
    agree(tangent_kernel(given.module, given.x), expected, 100 * EPS)


class Tied(nn.Module):
    """One convolution, before and behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.other, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.tied(self.other(self.tied(x).tanh()).tanh()).sum((2, 3)))
        return result


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("chosen", [(0,), (0, 1)])
def test_rows_are_written_where_they_belong(chosen: tuple[int, ...]) -> None:
    """Those of a weight that is used once; what another use adds is not written over the first."""
    reader, weights = reader_of(Tied().double())
    tape = reader.record(weights, torch.randn(4, 3, 8, 8, dtype=torch.float64))
    expected = reader.assembled(tape, chosen)
    room = {name: torch.zeros(9, len(chosen), weight.numel()).double() for name, weight in weights.items()}
    found = reader.assembled(tape, chosen, room)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        agree(dense(block), dense(other), EPS)
    assert room["other.weight"].any(2).any(1).tolist() == [True] * 4 + [False] * 5


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("total", "count"), [(5, 1), (5, 2), (6, 3), (7, 3)])
def test_batches_differ_by_one_example_at_most(total: int, count: int) -> None:
    places = even_slices(total, count)
    assert [k for place in places for k in range(total)[place]] == list(range(total))
    assert {place.stop - place.start for place in places} <= {total // count, total // count + 1}


def dense(block: Block) -> Tensor:
    """The gradients, multiplied out."""
    return torch.cat(list(oracle.by_name(block).values()), 2)


def part(examples: int, **changes: Block) -> Jacobian:
    blocks: dict[str, Block] = {
        "w": Rows(torch.full((examples, 1, 3), float(examples)), "w"),
        "v": Factored(torch.ones(examples, 2, 3), torch.ones(examples, 1, 2, 4), VIEW, None, None),
    }
    return Jacobian(tuple((blocks | changes).values()), examples, 1)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
def test_parts_lie_one_after_the_other() -> None:
    whole = Assembly(5)
    assert whole.add(part(2))
    assert whole.add(part(3))
    found = whole.jacobian
    (rows, factored) = found.blocks
    assert isinstance(rows, Rows)
    assert isinstance(factored, Factored)
    assert rows.rows[:, 0, 0].tolist() == [2, 2, 3, 3, 3]
    assert (found.examples, found.outputs, factored.outputs.shape) == (5, 1, (5, 1, 2, 4))


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "other",
    [
        part(3, u=Rows(torch.ones(3, 1, 1), "u")),
        part(3, w=Rows(torch.ones(3, 1, 2), "w")),
        part(3, v=Rows(torch.ones(3, 1, 12), "v")),
    ],
    ids=["another parameter", "more of a parameter", "another way"],
)
def test_parts_of_another_form_are_not_joined(other: Jacobian) -> None:
    whole = Assembly(5)
    assert whole.add(part(2))
    assert not whole.add(other)


def test_parameters_have_one_order_in_every_process() -> None:
    """Python orders a set of names anew in every process, and sums in another order are other bits."""
    for k in range(20):
        weight, bias = (View(f"{kind}{k}", (1, 1), (1, 1), 0) for kind in ("weight", "bias"))
        block = Factored(torch.ones(1, 1, 1), torch.ones(1, 1, 1, 1), weight, bias, 1.0)
        assert list(block.extents) == list(block.names) == [f"weight{k}", f"bias{k}"]
