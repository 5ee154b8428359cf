"""The tangent kernel of any module is that of plain Jacobians, example by example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features import adjoint as chapter
from ntkexp.kernel.features import gram as gram_chapter
from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.blocks import Copies, Factored, Rows
from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Jacobian, gathered, in_few_uses
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.uses import Element, Trained, View, plain_uses
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.oracle import agree
from tests.kernel.problems import DENSE, KINDS, READ, known, problem

ROUNDING = 100  # times eps: sums of a hundred products or so, relative to the largest entry

EPS = torch.finfo(torch.float64).eps


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.sample(16)
@pytest.mark.parametrize("name", [*READ, *DENSE])
def test_the_kernel_is_that_of_jacobians_by_example(name: str) -> None:
    network = known(name)
    found = tangent_kernel(network.given.module, network.given.x, network.other)
    agree(found, network.kernel[:, :, 5:], ROUNDING * EPS, network.kernel.abs().max())


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_one_set_of_inputs_stands_for_both(name: str) -> None:
    network = known(name)
    kernel = tangent_kernel(network.given.module, network.given.x)
    agree(kernel, network.kernel[:, :, :5], ROUNDING * EPS)
    agree(kernel, kernel.permute(2, 3, 0, 1), ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", ["relu", "tanh", "called twice", "low rank", "tokens", "convolution"])
def test_the_kernel_in_single_precision(name: str) -> None:
    given = problem(name, dtype=torch.float32)
    expected = oracle.tangent(given.module, given.x, given.x)
    agree(tangent_kernel(given.module, given.x), expected, ROUNDING * torch.finfo(torch.float32).eps)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", READ)
def test_both_readings_of_a_tangent_agree(name: str) -> None:
    """Autograd along the recorded graph, where it can be asked, and the replay at length zero."""
    network = known(name)
    replayed = network.reader.secant(network.tape, network.tape).jacobian
    expected = network.kernel[:, :, :5]
    agree(gram(replayed, replayed), expected, ROUNDING * EPS)
    agree(gram(network.features, replayed), expected, ROUNDING * EPS)


PLAIN = (
    "attention",
    "convolution in two",
    "encoder, norm after",
    "encoder, norm before",
    "gains and shifts",
    "group norm",
)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", [*PLAIN, "tokens"])
def test_no_difference_is_replayed_where_autograd_can_be_asked(name: str) -> None:
    """Norms, groups, gains, and biases and tokens beside products are seen from the results of operations."""
    network = known(name)
    owned = network.reader.checks.owners(network.tape)
    uses = plain_uses(Trained(network.tape, network.reader.trained, owned.constants))
    assert uses is not None
    assert [use.tap.numel() for use in uses if isinstance(use, Element)] == [
        owner.numel() for use, owner in zip(uses, owned.of_uses, strict=True) if isinstance(use, Element)
    ]


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", ["relu", "called twice", "left multiplication", "scaled weight", "two heads"])
def test_frozen_parameters_add_nothing(name: str) -> None:
    given = problem(name, seed=3)
    whole = tangent_kernel(given.module, given.x)
    parameters = list(given.module.parameters())
    parts = []
    for chosen in parameters:
        for weight in parameters:
            weight.requires_grad_(weight is chosen)
        kernel = tangent_kernel(given.module, given.x)
        agree(kernel, oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS, whole.abs().max())
        parts.append(kernel)
    agree(torch.stack(parts).sum(0), whole, ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_a_frozen_layer() -> None:
    given = problem("tanh", seed=4)
    assert isinstance(given.module, nn.Sequential)
    given.module[0].requires_grad_(False)
    agree(tangent_kernel(given.module, given.x), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("name", ["adapter beside a weight", "adapter inside a weight"])
def test_adapters_of_a_frozen_weight(name: str) -> None:
    given = problem(name, seed=5)
    for key, weight in given.module.named_parameters():
        weight.requires_grad_("base" not in key and "original" not in key)
    agree(tangent_kernel(given.module, given.x), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)


class Tokens(nn.Module):
    """Embedded tokens, some of which never occur, and one of which is padding."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.table(tokens)).mean(1))
        return outputs


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("padding", [None, 0])
def test_tokens(padding: int | None) -> None:
    """Padding trains nothing, wherever it stands, and tokens that never occur train nothing either."""
    made = Tokens(padding).double()
    with torch.no_grad():
        made.table.weight.copy_(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double())
    ones, others = torch.tensor([[0, 3, 5], [1, 0, 0], [2, 2, 2]]), torch.tensor([[3, 0, 0], [0, 6, 3], [1, 2, 0]])
    for tokens in (ones, others):  # who owns an element was asked where padding stood elsewhere
        agree(tangent_kernel(made, tokens, ones), oracle.tangent(made, tokens, ones), ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_network_keeps_its_factors(bias: bool) -> None:
    """One block a layer, nothing multiplied out: the whole speed of the kernel lies here."""
    given = problem("relu" if bias else "no bias")
    walker, own = reader_of(given.module)
    blocks = walker.tangent(walker.record(own, given.x)).blocks
    assert len(blocks) == 3
    assert all(isinstance(block, Factored) and block.inputs.shape[1] == 1 for block in blocks)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_inputs_that_are_zero_hide_nothing() -> None:
    """Who owns an element is asked once, on inputs that may be black where later ones are not."""
    given = problem("gains and shifts")
    walker, own = reader_of(given.module)
    dark = walker.tangent(walker.record(own, torch.zeros_like(given.x)))
    light = walker.tangent(walker.record(own, given.x))
    agree(gram(light, light), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)
    agree(gram(dark, light), oracle.tangent(given.module, torch.zeros_like(given.x), given.x), ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_a_dead_unit_that_wakes_up_is_owned() -> None:
    given = problem("relu")
    walker, own = reader_of(given.module)
    dead = own | {"0.bias": own["0.bias"] - 100}
    walker.tangent(walker.record(dead, given.x))
    awake = walker.tangent(walker.record(own, given.x))
    agree(gram(awake, awake), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_modules_in_short_numbers_are_refused_in_one_line(kind: torch.dtype) -> None:
    module, x = nn.Linear(2, 1).to(kind), torch.ones(3, 2, dtype=kind)
    start = dict(module.named_parameters())
    with pytest.raises(Mistake, match=r"'bias' is in b?float16, whose rounding"):
        tangent_kernel(module, x)
    with pytest.raises(Mistake, match=r"give module\.float"):
        secant_kernel(module, start, start, queries=x, train=x)
    with pytest.raises(Mistake, match=r"'bias' is in b?float16, whose rounding"):
        tangent_kernel(module, x, sketch=8)


# Uses that share their β are one.


MASKS = {
    "all": torch.ones(5, 6),
    "last": torch.eye(6)[5].expand(5, 6),
    "masked": (torch.arange(6) < torch.tensor([[3], [6], [1], [4], [0]])).double(),
}
"""Which positions of five examples are read: before a mean, a look at the last, a mean without padding."""


def block(read: Tensor, shift: float | None, seed: int = 0) -> Factored:
    """Random inputs, and for every example one β at the positions that are read."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*read.shape, 30, generator=draw, dtype=torch.float64)
    beta = torch.randn(len(read), 2, 1, 20, generator=draw, dtype=torch.float64)
    bias = None if shift is None else View("b", (20,), (1,), 0)
    view = View("w", (30, 20), (20, 1), 0)
    return Factored(inputs, beta * read.double()[:, None, :, None], view, bias, shift)


@pytest.mark.parametrize("shift", [None, 1.0, 0.5])
@pytest.mark.parametrize("read", MASKS.values(), ids=MASKS)
def test_gradients_stay_the_same(read: Tensor, shift: float | None) -> None:
    given = block(read, shift)
    found = gathered(given)
    assert found.inputs.shape[1] == 1
    agree(oracle.dense(found), oracle.dense(given), 10 * EPS)


@pytest.mark.parametrize("example", [0, 4])
def test_other_uses_stay_as_they_are(example: int) -> None:
    for other in (0.5, float("nan")):
        given = block(MASKS["all"], None)
        given.outputs[example, 1, 3, 7] *= other
        assert gathered(given) is given


def test_nothing_is_gathered_of_nothing() -> None:
    for shape in ((0, 6), (5, 0)):
        given = block(torch.ones(shape), None)
        assert gathered(given) is given


def test_a_kernel_between_gathered_and_other_uses() -> None:
    left, right = block(MASKS["masked"], 1.0), block(torch.rand(5, 6), 1.0, 1)
    found = gram(*(in_few_uses(Jacobian((side,), 5, 2)) for side in (left, right)))
    agree(found, torch.einsum("qcio,ndio->qcnd", oracle.dense(left), oracle.dense(right)), 100 * EPS)


# The adjoint of the sum backwards is a dense vector that takes in Jacobians and is multiplied with others.


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
        for name, rows in oracle.by_name(block).items():
            total[name][:, :, : rows.shape[2]] += rows
    return total


def filled(name: str, times: int) -> tuple[Adjoint, dict[str, Tensor], Jacobian, Weights]:
    """An adjoint that took in a Jacobian so many times, the same by dense vectors, the features and the weights."""
    found, own = features(name, slice(0, 3))
    made, rows = zero_adjoint(found, own), dense(found, own)
    total = {name: torch.zeros_like(part) for name, part in rows.items()}
    generator = torch.Generator().manual_seed(2)
    for _ in range(times):
        scale = {name: torch.rand(w.shape, generator=generator, dtype=w.dtype) for name, w in own.items()}
        made.accumulate(found, scale, 0.75)
        total = {name: 0.75 * part + scale[name].flatten() * rows[name] for name, part in total.items()}
    return made, total, found, own


@pytest.mark.parametrize("pieces", [1, 2**18])
@pytest.mark.parametrize("cheaper", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_adjoint_is_its_dense_vector(name: str, cheaper: bool, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adjoint, "left_first_is_cheaper", lambda adjoint, right: cheaper)
    monkeypatch.setattr(chapter, "CACHED_NUMBERS", pieces)
    monkeypatch.setattr(gram_chapter, "PIECE_ELEMENTS", pieces)
    monkeypatch.setattr(gram_chapter, "PIECE_BYTES", pieces)
    made, total, found, own = filled(name, times=3)
    rows = dense(found, own)
    expected = sum((torch.einsum("qcp,ndp->qcnd", total[name], rows[name]) for name in own), start=torch.zeros(()))
    agree(made.kernel(found), torch.as_tensor(expected), 100 * EPS)
    applied = sum((total[name] @ own[name].detach().flatten() for name in own), start=torch.zeros(()))
    agree(made.applied(own), torch.as_tensor(applied), 100 * EPS)


def test_an_adjoint_takes_in_what_was_read_of_a_table() -> None:
    """Once more and once less often than before, beside rows of all of it."""
    draw = torch.Generator().manual_seed(3)
    own = {"table": torch.zeros(7, 2, dtype=torch.float64)}
    total = torch.zeros(3, 2, 14, dtype=torch.float64)
    made: Adjoint | None = None
    for read in (4, 6, 1, 0):
        values, rows = (torch.randn(3, 2, n, generator=draw, dtype=torch.float64) for n in (max(read, 1), 14))
        copies = Copies(values, torch.randint(14, (3, max(read, 1)), generator=draw), "table")
        block = copies if read else Rows(rows, "table")
        scale = torch.rand(7, 2, generator=draw, dtype=torch.float64)
        made = made or zero_adjoint(Jacobian((block,), 3, 2), own)
        made.accumulate(Jacobian((block,), 3, 2), {"table": scale}, 0.5)
        full, size = oracle.by_name(block)["table"], block.size
        total = 0.5 * total
        total[..., :size] += scale.flatten()[:size] * full
    assert made is not None
    agree(made.parts["table"], total, 10 * EPS)


@pytest.mark.parametrize("name", NAMES)
def test_features_of_other_keys_meet_parameter_by_parameter(name: str) -> None:
    made, _, found, _ = filled(name, times=1)
    apart = [Rows(rows, name) for block in found.blocks for name, rows in oracle.by_name(block).items()]
    other = Jacobian(tuple(apart), found.examples, found.outputs)
    assert len(apart) == len(other.blocks)
    agree(made.kernel(other), made.kernel(found), 100 * EPS)


def test_parts_are_added_up_in_the_order_of_the_features() -> None:
    """Python orders sets of names anew in every process, and sums in another order are other bits."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(5, 5), nn.Tanh())]
    reader, own = reader_of(nn.Sequential(*layers).double())
    found = reader.tangent(reader.record(own, torch.rand(4, 5, dtype=torch.float64)))
    made = zero_adjoint(found, own)
    made.accumulate(found, {name: torch.ones_like(w) for name, w in own.items()}, 1.0)
    first, *rest = (
        made.of(block.names).kernel(Jacobian((block,), found.examples, found.outputs)) for block in found.blocks
    )
    assert len(rest) == 7
    assert torch.equal(made.kernel(found), sum(rest, start=first))


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
    adjoint = Adjoint({"w": torch.zeros(4, 1, 9)})
    assert adjoint.left_first_is_cheaper(narrow)
    wide = Factored(torch.zeros(2, 50, 3), torch.zeros(2, 1, 50, 3), None, None, None)
    assert not adjoint.left_first_is_cheaper(wide)


# Most modules are recorded as they run; those that write in place or read numbers run again with help.


MODES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]] = {
    "plain": (torch.relu, torch.relu, 1),
    "written in place": (torch.relu_, torch.relu, 2),
    "a number read": (lambda z: z * float(z.shape[1]), lambda z: z * 4.0, 1),
    "a number of a tensor read": (lambda z: z * float(z.sum()), lambda z: z * z.sum().item(), 2),
}


class Layered(nn.Module):
    """Two layers with something in between; `runs` are counted."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(3, 4).double(), nn.Linear(4, 1).double(), between
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = self.last(self.between(self.first(x)))
        return result


def recorded(module: Layered) -> Tape:
    """At ones; in a way that can be differentiated."""
    reader, weights = reader_of(module)
    return reader.record(weights, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_a_module_runs_again_only_where_it_needs_help_and_its_tape_is_the_same(mode: str) -> None:
    given, twin, runs = MODES[mode]
    module = Layered(given)
    found, expected = recorded(module), recorded(Layered(twin))
    assert module.runs == runs
    assert [entry.op for entry in found.entries] == [entry.op for entry in expected.entries]
    assert torch.equal(found.outputs, expected.outputs)
    assert any(entry.reads for entry in found.entries) == (mode == "a number of a tensor read")
