"""Kernels of gradient blocks, whichever way they are computed: by factors, multiplied out, in pieces or in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, cycle

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.adjoint import Adjoint, inner, is_outer_product, zero_adjoint
from ntkexp.kernel.features.blocks import Block, Copies, Factored, Rows
from ntkexp.kernel.features.cancellation import term_sizes
from ntkexp.kernel.features.gram import MIN_STRIP_ROWS, double_sum, gram, sizes, trace
from ntkexp.kernel.features.jacobian import Assembly, Jacobian, merge_uses, with_merged_uses
from ntkexp.kernel.read.plan import ChosenOutputs, chunks, selected_outputs
from ntkexp.kernel.read.sketched import BatchedJacobian, Batches, batches, even_slices, kernel_by_groups
from ntkexp.kernel.secant.uses import View
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.library.tangent import kernel
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.networks import ROUTED, Formula, drawn
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import DENSE, KINDS, known, problem, routed

SHAPES = [(1, 8, 8, 1), (2, 8, 8, 1), (2, 3, 4, 2), (6, 2, 2, 3), (30, 2, 2, 1), (4, 20, 1, 2)]

pytestmark = pytest.mark.filterwarnings("ignore:.*example by example")


def factored(
    examples: int, uses: int, inputs: int, features: int, outputs: int, seed: int, name: str = "v"
) -> Factored:
    """Return random factors."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(examples, uses, inputs, generator=generator, dtype=torch.float64)
    b = torch.randn(examples, outputs, uses, features, generator=generator, dtype=torch.float64)
    return Factored(a, b, View(name, (inputs, features), (features, 1), 0), None, None)


def jacobian(*blocks: Block) -> Jacobian:
    return Jacobian(blocks, *blocks[0].gradients)


def dense_kernel(left: Sequence[Factored], right: Sequence[Factored]) -> Tensor:
    """Σ over blocks of the inner products of gradients that are multiplied out."""
    pairs = zip(left, right, strict=True)
    shares = [inner(oracle.dense(one).flatten(2), oracle.dense(other).flatten(2)) for one, other in pairs]
    return torch.stack(shares).sum(0)


@pytest.mark.parametrize(("uses", "inputs", "width", "outputs"), SHAPES)
def test_factors_and_multiplied_out_gradients_agree(uses: int, inputs: int, width: int, outputs: int) -> None:
    left, right = factored(4, uses, inputs, width, outputs, 0), factored(3, uses, inputs, width, outputs, 1)
    expected = dense_kernel([left], [right])
    agree(double_sum(left, right), expected, 100 * EPS)
    agree(gram(jacobian(left), jacobian(right)), expected, 100 * EPS)


def test_the_cost_model_takes_every_way() -> None:
    chosen = {sizes(factored(4, *shape, 0), factored(3, *shape, 1)).method for shape in SHAPES}
    assert chosen == {"one product", "double sum", "multiplied out"}


@pytest.mark.sample(16)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("examples", [1, MIN_STRIP_ROWS, 2 * MIN_STRIP_ROWS + 3, 450])
@pytest.mark.parametrize("uses", [1, 2, 9])
def test_a_kernel_with_itself_takes_half_the_products(uses: int, examples: int, outputs: int) -> None:
    """Strips end between examples, and the halves are mirror images. Strips of 1,350 rows are cut into blocks."""
    shared, rows = factored(examples, uses, 2, 3, outputs, 0), factored(examples, 1, 5, 1, outputs, 1).multiplied_out()
    found = jacobian(shared, Rows(rows, "w"), factored(examples, 1, 2, 3, outputs, 2, "u"))
    expected = gram(found, jacobian(*(replace(block) for block in found.blocks)))
    agree(gram(found, found), expected, 100 * EPS)


@pytest.mark.parametrize("examples", [(5, 4), (500, 400)])
@pytest.mark.parametrize(("outputs", "outputs_"), [(1, 1), (2, 3), (4, 1)])
def test_layers_of_one_use_are_summed_block_by_block(outputs: int, outputs_: int, examples: tuple[int, int]) -> None:
    """Several layers with biases, and a readout, whose β are the same for all examples."""

    def layers(count: int, outputs: int, seed: int) -> list[Factored]:
        made = [replace(factored(count, 1, 3, 4, outputs, seed + k, name), shift=0.5) for k, name in enumerate("abc")]
        readout = torch.eye(4, dtype=torch.float64)[:outputs, None].expand(count, -1, -1, -1)
        return [*made[:2], replace(made[2], outputs=readout)]

    left, right = layers(examples[0], outputs, 0), layers(examples[1], outputs_, 10)
    agree(gram(jacobian(*left), jacobian(*right)), dense_kernel(left, right), 100 * EPS)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("width", [2, 40])
def test_gradients_side_by_side_are_gradients_one_by_one(outputs: int, width: int) -> None:
    """Wide ones take more columns than one product of matrices has."""
    left, right = (
        [factored(n, 90, width, 40, outputs, n), factored(n, 90, 30, width, outputs, n + 1, "u")] for n in (4, 3)
    )
    agree(gram(jacobian(*left), jacobian(*right)), dense_kernel(left, right), 100 * EPS)


def test_small_chunks_are_not_lost_in_a_large_sum() -> None:
    """K = 1 + 60 · 4.5e-8, and sums in float32 would return 1. A weight with two uses is processed in chunks."""
    small, half = torch.full((2, 1, 2049), 4.7e-6), torch.full((2, 1, 1), 0.5)
    blocks = [Rows(half, "w"), Rows(half, "w"), *(Rows(small, f"v{k}") for k in range(60))]
    found = gram(jacobian(*blocks), jacobian(*blocks))
    torch.testing.assert_close(found, torch.full_like(found, 1 + 60 * 2049 * 4.7e-6**2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (4, 1)], ids=["rows", "columns", "some of a row"])
def test_factors_meet_rows_of_the_same_parameter(stride: tuple[int, int]) -> None:
    """The two sides have different forms. Elements that one side lacks are zero."""
    left = factored(4, 5, 2, 3, 2, 0)
    view = View("v", (2, 3), stride, 1)
    given = jacobian(replace(left, weight=view, bias=View("v", (3,), (1,), 0), shift=2.0))
    rows = normal(3, 2, 12, seed=1)
    dense = torch.zeros(4, 2, 12, dtype=torch.float64)
    dense.index_add_(2, view.of(torch.arange(12)).flatten(), left.of_weight().flatten(2))
    dense.index_add_(2, torch.arange(3), 2.0 * left.of_bias())
    agree(gram(given, jacobian(Rows(rows, "v"))), inner(dense, rows), 100 * EPS)
    expected = torch.einsum("qcnc->qn", inner(dense, rows))[:, None, :, None]
    agree(trace(given, jacobian(Rows(rows, "v"))), expected, 100 * EPS)
    for start, stop in combinations(range(13), 2):
        agree(given.chunk("v", range(start, stop)), dense.flatten(0, 1)[:, start:stop], 100 * EPS)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["a vector", "a matrix"])
@pytest.mark.parametrize(
    "block",
    [
        replace(factored(4, 1, 2, 3, 1, 0), weight=View("v", (2, 3), (3, 1), 0)),
        Rows(normal(4, 1, 6), "v"),
        Copies(normal(4, 1, 2), torch.tensor([[0, 5], [1, 0], [3, 2], [5, 0]]), "v"),
    ],
    ids=["factors", "rows", "copies"],
)
def test_sizes_of_terms_are_those_of_their_examples(block: Block, shape: tuple[int, ...]) -> None:
    """Each example uses the parameter once. A vector has a size for each element, a matrix has one."""
    given = jacobian(block)
    terms = given.chunk("v", range(6))
    expected = terms.abs().sum(0) if len(shape) == 1 else terms.norm(dim=1).sum()
    agree(term_sizes([given], {"v": torch.zeros(shape, dtype=torch.float64)})["v"], expected, 100 * EPS)


def test_an_empty_jacobian_has_no_kernel() -> None:
    with refused("requires gradients"):
        gram(Jacobian((), 2, 1), Jacobian((), 2, 1))


def test_parameters_have_one_order_in_every_process() -> None:
    """Python orders a set of names differently in every process, and sums in another order have other bits."""
    for k in range(20):
        weight, bias = (View(f"{kind}{k}", (1, 1), (1, 1), 0) for kind in ("weight", "bias"))
        block = Factored(torch.ones(1, 1, 1), torch.ones(1, 1, 1, 1), weight, bias, 1.0)
        assert list(block.extents) == list(block.names) == [f"weight{k}", f"bias{k}"]


def test_the_total_of_a_weight_whose_row_is_its_bias_is_the_gradient_of_autograd() -> None:
    """No other row is used."""
    made, x = Formula(lambda x, w: torch.addmm(w[2], x, w[1:3]), w=(4, 3)).double(), torch.eye(2, dtype=torch.float64)
    reader, weights = reader_of(made)
    found = reader.tangent(reader.record(weights, x))
    (block,) = found.blocks
    assert isinstance(block, Factored)
    cotangent = normal(2, 3, seed=1)
    expected = torch.autograd.grad(made(x), made.get_parameter("w"), cotangent)[0]
    agree(found.weighted(cotangent).total(weights)["w"], expected, 100 * EPS)


# Some outputs, or the trace over all outputs.


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gelu", "called twice", "convolution", "encoder, norm before", "lstm"])
def test_the_trace_of_a_secant(name: str) -> None:
    given = problem(name)
    end, queries = given.end(0.3), given.inputs(2)
    whole = torch.einsum("qcnc->qn", secant_kernel(given.module, {}, end, queries, given.x))[:, None, :, None]
    agree(secant_kernel(given.module, {}, end, queries, given.x, outputs="trace"), whole, 100 * EPS)


@pytest.mark.parametrize("name", ["tokens", "softmax", "entropy"])
def test_every_choice_of_outputs_is_those_blocks(name: str) -> None:
    """One module answers one after the other: findings about a structure hold for every output."""
    given = problem(name)
    expected = oracle.tangent(given.module, given.x, given.x)
    for outputs in ([0], [1, 0], (1,), [1, 1]):
        chosen = list(outputs)
        blocks = expected[:, chosen][:, :, :, chosen]
        agree(tangent_kernel(given.module, given.x, outputs=outputs), blocks, 100 * EPS, expected.abs().max())


def test_a_thousand_outputs_fit_and_are_taken_in_chunks() -> None:
    """The closed form for one layer: ⟨a, a′⟩ + 1 for each output. All blocks would be 23 GB."""
    layer, x = nn.Linear(3, 1000).double(), normal(54, 3)
    expected = 1000 * (x @ x.t() + 1)[:, None, :, None]
    agree(tangent_kernel(layer, x, outputs="trace"), expected, 100 * EPS)
    reader, own = reader_of(layer)
    tape = reader.record(own, x)
    few, many = (
        list(chunks(tape, examples, 1000, lambda chosen: reader.assembled(tape, chosen))) for examples in (10, 10**5)
    )
    assert few == [range(1000)]
    assert [c for chunk in many for c in chunk] == list(range(1000))
    assert len(many) > 100


def test_blocks_of_a_thousand_outputs_that_do_not_fit_are_refused_before_they_are_read() -> None:
    layer, x = nn.Linear(3, 1000).double(), torch.zeros(1, 3, dtype=torch.float64).expand(20_000, 3)
    with refused(r"^the kernel of 20000 × 20000 examples with 1000 outputs each takes 3\.2e\+06 GB"):
        tangent_kernel(layer, x)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ("diagonal", ("outputs='diagonal'", "'all', 'trace'")),
        ([2], (r"outputs=\[2\]", "has 2, numbered from 0 to 1")),
        ([-1], (r"outputs=\[-1\]",)),
        ([], (r"outputs=\[\]",)),
    ],
)
def test_outputs_that_do_not_exist_are_refused(outputs: ChosenOutputs | str, words: tuple[str, ...]) -> None:
    with refused(*words):
        selected_outputs(outputs, 2)


@pytest.mark.parametrize("name", ["relu", "softmax", "entropy"])
def test_a_caller_without_gradients_gets_the_same(name: str) -> None:
    given = problem(name)
    expected = tangent_kernel(given.module, given.x)
    with torch.no_grad():
        assert torch.equal(tangent_kernel(given.module, given.x), expected)


# Batches, or a few examples at a time, give the kernel of all examples at once.


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "outputs"), [*zip([*KINDS, *DENSE, *ROUTED], cycle(("all", "trace")))])
def test_batches_change_only_rounding(name: str, outputs: ChosenOutputs) -> None:
    given = routed(name) if name in ROUTED else known(name).given
    reader, own = reader_of(given.module)
    side = Batches(reader, own, given.x, even_slices(5, 2), reader.record(own, given.x[:2]))
    expected = oracle.tangent(given.module, given.x, given.x)
    size = expected.abs().max()
    if outputs == "trace":
        expected = torch.einsum("qcnc->qn", expected)[:, None, :, None]
    agree(kernel(side, side, outputs), expected, 100 * EPS, size)


def test_a_kernel_of_many_examples_is_read_in_batches_that_fit() -> None:
    """The tape of all would take 80 MB, and 64 MB are allowed: one side, and the training side of a secant."""
    layers = nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 2, 3, stride=9), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net, x = drawn(nn.Sequential(*layers)), normal(84, 1, 100, 100)
    reader, own = reader_of(net)
    assert len(batches(reader, own, x).places) > 1
    parts = [reader.tangent(reader.record(own, half)) for half in x.tensor_split(2)]
    expected = torch.cat([torch.cat([gram(one, other) for other in parts], 2) for one in parts])
    agree(tangent_kernel(net, x), expected, 1000 * EPS)
    agree(secant_kernel(net, {}, {}, x[:2], x), expected[:2], 1000 * EPS)


class Few(BatchedJacobian):
    """Examples that are read two or three at a time. One share is held at a time if `alone`."""

    alone = False

    @cached_property
    def places(self) -> list[slice]:
        return list(even_slices(self.examples, self.examples // 2))

    @cached_property
    def groups(self) -> list[list[slice]]:
        return [[place] for place in self.places] if self.alone else [self.places]


class Alone(Few):
    alone = True


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "kind"), [*zip(KINDS, cycle((BatchedJacobian, Few, Alone)))])
def test_examples_in_turns_have_the_kernel_of_all_at_once(name: str, kind: type[BatchedJacobian]) -> None:
    network = known(name)
    reader, own, outputs = network.reader, dict(network.given.start), network.tape.outputs.shape[1]
    for chosen in (range(outputs), [outputs - 1, 0]):
        one, other = (kind(reader, own, x, chosen) for x in (network.given.x, network.other))
        blocks, size = network.kernel[:, chosen][..., chosen], network.kernel.abs().max()
        agree(kernel_by_groups(one, one), blocks[:, :, :5], 1000 * EPS, size)
        agree(kernel_by_groups(one, other), blocks[:, :, 5:], 1000 * EPS, size)


@pytest.mark.slow
def test_a_table_whose_jacobians_would_not_fit_is_read_in_turns() -> None:
    """28 rows of 42 MB each. A word's row of the kernel is ⟨h, h′⟩ δ(word, word′): an embedding is linear."""
    words, net = 2**18, nn.Sequential(nn.Embedding(2**18, 20), nn.Flatten(), nn.Linear(20, 2)).double()
    x = torch.tensor([[3], [5], [3], [words - 1], [0], [5], [7], [9], [8], [8], [1], [2], [6], [4]])
    table, _, last = net
    assert isinstance(last, nn.Linear)
    hidden, readout = table(x)[:, 0].detach(), last.weight.detach()
    equal = (x == x.t()).double()
    expected = torch.einsum("nm,cd->ncmd", equal, readout @ readout.t())
    expected = expected + torch.einsum("nm,cd->ncmd", hidden @ hidden.t() + 1, torch.eye(2).double())
    agree(tangent_kernel(net, x), expected, 100 * EPS)


def text(x: Tensor, words: nn.Embedding, places: nn.Module, mix: nn.Module) -> Tensor:
    """Compute the mean log-likelihood of next words, with a tied table of words and a table of positions."""
    hidden = torch.tanh(mix(words(x) + places(torch.arange(x.shape[1]))))
    scores = (hidden[:, :-1] @ words.weight.t()).log_softmax(2)
    return scores.gather(2, x[:, 1:, None]).mean((1, 2))


@pytest.mark.parametrize("words", [7, 700])
def test_texts_are_read_in_turns(words: int) -> None:
    """The words decide which rows are gathered, in every batch others. A long table is multiplied out in pieces."""
    parts = {"words": nn.Embedding(words, 16), "places": nn.Embedding(6, 16), "mix": nn.Linear(16, 16)}
    module, x = drawn(Formula(text, **parts)), torch.randint(words, (6, 5), generator=torch.Generator().manual_seed(0))
    reader, own = reader_of(module)
    expected = oracle.tangent(module, x, x)
    agree(tangent_kernel(module, x), expected, 1000 * EPS)
    few = Few(reader, own, x, [0])
    agree(kernel_by_groups(few, few), expected, 1000 * EPS)


@pytest.mark.parametrize("chosen", [(0,), (0, 1)])
def test_rows_are_written_to_their_place(chosen: tuple[int, ...]) -> None:
    """The gradients of a weight that is used once. A second use is not written over the first."""
    layers = {"tied": nn.Conv2d(3, 3, 3, padding=1), "other": nn.Conv2d(3, 3, 3), "last": nn.Linear(3, 2)}
    net = Formula(lambda x, tied, other, last: last(tied(other(tied(x).tanh()).tanh()).sum((2, 3))), **layers)
    reader, weights = reader_of(net.double())
    tape = reader.record(weights, normal(4, 3, 8, 8))
    expected = reader.assembled(tape, chosen)
    places = {name: torch.zeros(9, len(chosen), weight.numel()).double() for name, weight in weights.items()}
    found = reader.assembled(tape, chosen, places)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        one, two = (torch.cat(list(oracle.by_name(side).values()), 2) for side in (block, other))
        agree(one, two, EPS)
    assert places["other.weight"].any(2).any(1).tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize(("total", "count"), [(5, 1), (5, 2), (6, 3), (7, 3)])
def test_batches_differ_by_one_example_at_most(total: int, count: int) -> None:
    places = even_slices(total, count)
    assert [k for place in places for k in range(total)[place]] == list(range(total))
    assert {place.stop - place.start for place in places} <= {total // count, total // count + 1}


def part(examples: int, **changes: Block) -> Jacobian:
    weight = View("v", (3, 4), (4, 1), 0)
    blocks: dict[str, Block] = {
        "w": Rows(torch.full((examples, 1, 3), float(examples)), "w"),
        "v": Factored(torch.ones(examples, 2, 3), torch.ones(examples, 1, 2, 4), weight, None, None),
    }
    return Jacobian(tuple((blocks | changes).values()), examples, 1)


OTHER_FORMS = {
    "another parameter": part(3, u=Rows(torch.ones(3, 1, 1), "u")),
    "more of a parameter": part(3, w=Rows(torch.ones(3, 1, 2), "w")),
    "another way": part(3, v=Rows(torch.ones(3, 1, 12), "v")),
}


def test_parts_are_joined_in_order_if_they_have_one_form() -> None:
    for other in OTHER_FORMS.values():
        whole = Assembly(5)
        assert whole.add(part(2))
        assert not whole.add(other)
    whole = Assembly(5)
    assert whole.add(part(2))
    assert whole.add(part(3))
    (rows, factors) = whole.jacobian.blocks
    assert isinstance(rows, Rows)
    assert isinstance(factors, Factored)
    assert rows.rows[:, 0, 0].tolist() == [2, 2, 3, 3, 3]
    assert (whole.jacobian.examples, whole.jacobian.outputs, factors.outputs.shape) == (5, 1, (5, 1, 2, 4))


# Uses that share their β are one.


MASKS = {
    "all": torch.ones(5, 6),
    "last": torch.eye(6)[5].expand(5, 6),
    "masked": (torch.arange(6) < torch.tensor([[3], [6], [1], [4], [0]])).double(),
}
"""The positions of five examples that are read: for a mean, for the last, for a mean without padding."""


def block(read: Tensor, shift: float | None, seed: int = 0) -> Factored:
    """Return random inputs, and for every example one β at the positions that are read."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*read.shape, 30, generator=draw, dtype=torch.float64)
    beta = torch.randn(len(read), 2, 1, 20, generator=draw, dtype=torch.float64)
    bias = None if shift is None else View("b", (20,), (1,), 0)
    view = View("w", (30, 20), (20, 1), 0)
    return Factored(inputs, beta * read.double()[:, None, :, None], view, bias, shift)


@pytest.mark.parametrize("shift", [None, 1.0, 0.5])
@pytest.mark.parametrize("read", MASKS.values(), ids=MASKS)
def test_gathered_uses_have_the_same_gradients(read: Tensor, shift: float | None) -> None:
    given = block(read, shift)
    found = merge_uses(given)
    assert found.inputs.shape[1] == 1
    agree(oracle.dense(found), oracle.dense(given), 10 * EPS)
    right = block(torch.rand(5, 6), shift, 1)
    shared = gram(*(with_merged_uses(jacobian(side)) for side in (given, right)))
    agree(shared, torch.einsum("qcio,ndio->qcnd", oracle.dense(given), oracle.dense(right)), 100 * EPS)


def test_other_uses_stay_as_they_are() -> None:
    for shape in ((0, 6), (5, 0)):
        given = block(torch.ones(shape), None)
        assert merge_uses(given) is given
    for example in (0, 4):
        for other in (0.5, float("nan")):
            given = block(MASKS["all"], None)
            given.outputs[example, 1, 3, 7] *= other
            assert merge_uses(given) is given


# The adjoint of the backward sum is a dense vector. Jacobians are added to it and multiplied with it.


def by_parameter(found: Jacobian, own: Weights) -> dict[str, Tensor]:
    """J of every parameter, [example, out, size]."""
    total = {name: torch.zeros(found.examples, found.outputs, w.numel(), dtype=w.dtype) for name, w in own.items()}
    for one in found.blocks:
        for name, rows in oracle.by_name(one).items():
            total[name][:, :, : rows.shape[2]] += rows
    return total


WIDE = nn.Sequential(nn.Linear(3, 90), nn.Tanh(), nn.Linear(90, 200), nn.Tanh(), nn.Linear(200, 3))
ADJOINTS = {
    **{name: problem(name) for name in ("called twice", "tokens", "an output for every token")},
    "wide": replace(problem("tanh"), module=drawn(WIDE), x=normal(60, 3)),  # more numbers than stay in the cache
}


@pytest.mark.parametrize("name", ADJOINTS)
def test_an_adjoint_is_its_dense_vector(name: str) -> None:
    given = ADJOINTS[name]
    reader, own = reader_of(given.module)
    found = reader.tangent(reader.record(own, given.x[:40]))
    made, rows = zero_adjoint(found, own), by_parameter(found, own)
    total = {name: torch.zeros_like(part) for name, part in rows.items()}
    for seed in range(3):
        scale = {name: normal(*w.shape, seed=seed).abs() for name, w in own.items()}
        made.accumulate(found, scale, 0.75)
        total = {name: 0.75 * part + scale[name].flatten() * rows[name] for name, part in total.items()}
    expected = torch.stack([torch.einsum("qcp,ndp->qcnd", total[name], rows[name]) for name in own]).sum(0)
    agree(made.kernel(found), expected, 100 * EPS)
    apart = [Rows(rows, name) for one in found.blocks for name, rows in oracle.by_name(one).items()]
    agree(made.kernel(jacobian(*apart)), expected, 100 * EPS)
    applied = torch.stack([total[name] @ w.detach().flatten() for name, w in own.items()]).sum(0)
    agree(made.applied(own), applied, 100 * EPS, sum(total[name].abs().sum(2).max() for name in own))
    factors = {name: 0.5 + k for k, name in enumerate(own)}
    for key, part in by_parameter(found.scaled(factors), own).items():
        agree(part, factors[key] * rows[key], 100 * EPS)


def test_both_products_of_an_adjoint_are_taken_and_agree() -> None:
    """Features of one use are multiplied with the adjoint from the left; features of many uses are multiplied out."""
    adjoint = Adjoint({"v": normal(4, 2, 12 * 20)})
    ways = set()
    for uses in (1, 2, 60):
        right = factored(3, uses, 12, 20, 2, seed=1)
        ways.add(adjoint.left_first_is_cheaper(right))
        expected = torch.einsum("qcp,ndp->qcnd", adjoint.parts["v"], oracle.dense(right).flatten(2))
        agree(adjoint.kernel(jacobian(right)), expected, 100 * EPS)
    assert ways == {True, False}


@pytest.mark.parametrize(("inputs", "features"), [(1, 3), (4, 1), (5, 3), (700, 600)])  # the last is cut into pieces
@pytest.mark.parametrize("by_feature", [True, False])
def test_an_adjoint_accumulates_outer_products(inputs: int, features: int, by_feature: bool) -> None:
    """The gradient of a layer with one use is a ⊗ β, in the memory order of its weight."""
    stride = (1, inputs) if by_feature else (features, 1)
    block = replace(factored(2, 1, inputs, features, 3, 0, "v"), weight=View("v", (inputs, features), stride, 0))
    made = zero_adjoint(jacobian(block), {"v": normal(inputs, features)})
    assert is_outer_product(made.parts["v"], block, "v")
    gradients = block.inputs[:, :, :, None] * block.outputs[:, :, 0, None]
    total = torch.zeros_like(made.parts["v"])
    for seed in (1, 2):
        scale = normal(inputs * features, seed=seed).abs()
        made.accumulate(jacobian(block), {"v": scale}, 0.75)
        total = 0.75 * total + scale * (gradients.mT if by_feature else gradients).flatten(2)
    agree(made.parts["v"], total, 10 * EPS)


def test_sums_over_uses_have_the_same_products() -> None:
    """Weights with several uses become rows, unless the rows are too long or another block uses the weight."""
    several = factored(3, 4, 5, 2, 2, 0, "several")
    long, tied = factored(3, 4, 50, 20, 2, 1, "long"), factored(3, 4, 5, 2, 2, 2, "tied")
    whole = jacobian(several, long, tied, replace(tied, inputs=-2 * tied.inputs), factored(3, 1, 5, 2, 2, 3, "single"))
    weights = {name: normal(size) for name, size in (("several", 10), ("long", 1000), ("tied", 10), ("single", 10))}
    found = whole.with_sums_over_uses(weights, 3 * 2 * 10 * 8)
    assert {block.names for block in found.blocks if isinstance(block, Rows)} == {("several",)}
    agree(found.applied(weights), whole.applied(weights), 10 * EPS)
    agree(gram(found, found), gram(whole, whole), 10 * EPS)


def test_an_adjoint_accumulates_the_rows_of_a_table() -> None:
    """Batches read different numbers of rows of the table, also all rows."""
    draw = torch.Generator().manual_seed(3)
    own = {"table": torch.zeros(7, 2, dtype=torch.float64)}
    total = torch.zeros(3, 2, 14, dtype=torch.float64)
    made: Adjoint | None = None
    for read in (4, 6, 1, 0):
        values, rows = (torch.randn(3, 2, n, generator=draw, dtype=torch.float64) for n in (max(read, 1), 14))
        copies = Copies(values, torch.randint(14, (3, max(read, 1)), generator=draw), "table")
        added = copies if read else Rows(rows, "table")
        scale = torch.rand(7, 2, generator=draw, dtype=torch.float64)
        made = made or zero_adjoint(jacobian(added), own)
        made.accumulate(jacobian(added), {"table": scale}, 0.5)
        total = 0.5 * total
        total[..., : added.size] += scale.flatten()[: added.size] * oracle.by_name(added)["table"]
    assert made is not None
    agree(made.parts["table"], total, 10 * EPS)


def test_parts_are_added_up_in_the_order_of_the_features() -> None:
    """Python orders sets of names differently in every process, and sums in another order have other bits."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(5, 5), nn.Tanh())]
    reader, own = reader_of(drawn(nn.Sequential(*layers)))
    found = reader.tangent(reader.record(own, normal(4, 5)))
    made = zero_adjoint(found, own)
    made.accumulate(found, {name: torch.ones_like(w) for name, w in own.items()}, 1.0)
    first, *rest = (made.of(one.names).kernel(jacobian(one)) for one in found.blocks)
    assert len(rest) == 7
    assert torch.equal(made.kernel(found), sum(rest, start=first))
