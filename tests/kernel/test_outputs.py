"""Some outputs, or the trace over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.read import plan as chapter
from ntkexp.kernel.read.plan import Outputs, wanted
from ntkexp.library import secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import DENSE, KINDS, problem

pytestmark = pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them

EPS = torch.finfo(torch.float64).eps


def diagonal(kernel: Tensor) -> Tensor:
    """Σ_c K[x, c, x′, c]."""
    return torch.einsum("qcnc->qn", kernel)[:, None, :, None]


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_the_trace_is_the_sum_of_the_diagonal_blocks(name: str) -> None:
    network = known(name)
    found = tangent_kernel(network.given.module, network.given.x, network.other, outputs="trace")
    agree(found, diagonal(network.kernel[:, :, 5:]), 100 * EPS, network.kernel.abs().max())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gelu", "called twice", "convolution", "encoder, norm before", "lstm"])
def test_the_trace_of_a_secant(name: str) -> None:
    given = problem(name)
    end, probes = given.end(0.3), given.inputs(2)
    whole = secant_kernel(given.module, {}, end, probes, given.x)
    agree(secant_kernel(given.module, {}, end, probes, given.x, outputs="trace"), diagonal(whole), 100 * EPS)


@pytest.mark.parametrize("name", ["tokens", "softmax", "running products"])
def test_outputs_a_few_at_a_time_change_only_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(name)
    usual = tangent_kernel(given.module, given.x, outputs="trace")
    monkeypatch.setattr(chapter, "AT_ONCE", 1.0)
    agree(tangent_kernel(given.module, given.x, outputs="trace"), usual, 100 * EPS)


@pytest.mark.parametrize("outputs", [[0], [1, 0], (1,), [1, 1]])
@pytest.mark.parametrize("name", ["tanh", "softmax", "running products"])
def test_some_outputs_are_those_blocks(name: str, outputs: list[int]) -> None:
    given, chosen = problem(name), list(outputs)
    expected = oracle.tangent(given.module, given.x, given.x)[:, chosen][:, :, :, chosen]
    agree(tangent_kernel(given.module, given.x, outputs=outputs), expected, 100 * EPS)


def test_another_output_is_read_after_the_first() -> None:
    """What was found of a structure holds for every output."""
    given = problem("two heads")
    expected = oracle.tangent(given.module, given.x, given.x)
    for c in range(3):
        agree(tangent_kernel(given.module, given.x, outputs=[c]), expected[:, [c]][:, :, :, [c]], 100 * EPS)


def test_a_thousand_outputs_fit() -> None:
    """The closed form for one layer: ⟨a, a′⟩ + 1 per output. All blocks would be 23 GB."""
    layer = nn.Linear(3, 1000).double()
    x = torch.randn(54, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = 1000 * (x @ x.t() + 1)[:, None, :, None]
    agree(tangent_kernel(layer, x, outputs="trace"), expected, 100 * EPS)


def test_blocks_of_a_thousand_outputs_that_do_not_fit_are_refused_before_any_is_read() -> None:
    layer, x = nn.Linear(3, 1000).double(), torch.zeros(1, 3, dtype=torch.float64).expand(20_000, 3)
    with pytest.raises(
        Mistake, match=r"^the kernel of 20000 × 20000 examples with 1000 outputs each takes 3\.2e\+06 GB"
    ):
        tangent_kernel(layer, x)


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


@pytest.mark.parametrize("name", ["relu", "softmax", "running products"])
def test_a_caller_without_gradients_gets_the_same(name: str) -> None:
    given = problem(name)
    expected = tangent_kernel(given.module, given.x)
    with torch.no_grad():
        assert torch.equal(tangent_kernel(given.module, given.x), expected)
