"""The tangent kernel of any module is that of plain Jacobians, example by example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.secant.uses import Element, Trained, plain_uses
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import DENSE, KINDS, READ, problem

ROUNDING = 100  # times eps: sums of a hundred products or so, relative to the largest entry
pytestmark = pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them

EPS = torch.finfo(torch.float64).eps


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", [*READ, *DENSE])
def test_the_kernel_is_that_of_jacobians_by_example(name: str) -> None:
    network = known(name)
    found = tangent_kernel(network.given.module, network.given.x, network.other)
    agree(found, network.kernel[:, :, 5:], ROUNDING * EPS, network.kernel.abs().max())


@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_one_set_of_inputs_stands_for_both(name: str) -> None:
    network = known(name)
    kernel = tangent_kernel(network.given.module, network.given.x)
    agree(kernel, network.kernel[:, :, :5], ROUNDING * EPS)
    agree(kernel, kernel.permute(2, 3, 0, 1), ROUNDING * EPS)


@pytest.mark.parametrize("name", ["relu", "tanh", "called twice", "low rank", "tokens", "convolution"])
def test_the_kernel_in_single_precision(name: str) -> None:
    given = problem(name, dtype=torch.float32)
    expected = oracle.tangent(given.module, given.x, given.x)
    agree(tangent_kernel(given.module, given.x), expected, ROUNDING * torch.finfo(torch.float32).eps)


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


def test_a_frozen_layer() -> None:
    given = problem("tanh", seed=4)
    assert isinstance(given.module, nn.Sequential)
    given.module[0].requires_grad_(False)
    agree(tangent_kernel(given.module, given.x), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)


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


@pytest.mark.parametrize("padding", [None, 0])
def test_tokens(padding: int | None) -> None:
    """Padding trains nothing, wherever it stands, and tokens that never occur train nothing either."""
    made = Tokens(padding).double()
    with torch.no_grad():
        made.table.weight.copy_(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double())
    ones, others = torch.tensor([[0, 3, 5], [1, 0, 0], [2, 2, 2]]), torch.tensor([[3, 0, 0], [0, 6, 3], [1, 2, 0]])
    for tokens in (ones, others):  # who owns an element was asked where padding stood elsewhere
        agree(tangent_kernel(made, tokens, ones), oracle.tangent(made, tokens, ones), ROUNDING * EPS)


@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_network_keeps_its_factors(bias: bool) -> None:
    """One block a layer, nothing multiplied out: the whole speed of the kernel lies here."""
    given = problem("relu" if bias else "no bias")
    walker, own = reader_of(given.module)
    blocks = walker.tangent(walker.record(own, given.x)).blocks
    assert len(blocks) == 3
    assert all(isinstance(block, Factored) and block.inputs.shape[1] == 1 for block in blocks)


def test_inputs_that_are_zero_hide_nothing() -> None:
    """Who owns an element is asked once, on inputs that may be black where later ones are not."""
    given = problem("gains and shifts")
    walker, own = reader_of(given.module)
    dark = walker.tangent(walker.record(own, torch.zeros_like(given.x)))
    light = walker.tangent(walker.record(own, given.x))
    agree(gram(light, light), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)
    agree(gram(dark, light), oracle.tangent(given.module, torch.zeros_like(given.x), given.x), ROUNDING * EPS)


def test_a_dead_unit_that_wakes_up_is_owned() -> None:
    given = problem("relu")
    walker, own = reader_of(given.module)
    dead = own | {"0.bias": own["0.bias"] - 100}
    walker.tangent(walker.record(dead, given.x))
    awake = walker.tangent(walker.record(own, given.x))
    agree(gram(awake, awake), oracle.tangent(given.module, given.x, given.x), ROUNDING * EPS)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_modules_in_short_numbers_are_refused_in_one_line(kind: torch.dtype) -> None:
    module, x = nn.Linear(2, 1).to(kind), torch.ones(3, 2, dtype=kind)
    start = dict(module.named_parameters())
    with pytest.raises(Mistake, match=r"'bias' is in b?float16, to whose rounding"):
        tangent_kernel(module, x)
    with pytest.raises(Mistake, match=r"give module\.float"):
        secant_kernel(module, start, start, probes=x, train=x)
    with pytest.raises(Mistake, match=r"'bias' is in b?float16, to whose rounding"):
        tangent_kernel(module, x, sketch=8)
