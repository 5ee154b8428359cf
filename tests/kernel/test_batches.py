"""A kernel that is read in batches is that of all examples at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Block, Factored, Rows
from ntkexp.kernel.features.jacobian import Assembly, Jacobian
from ntkexp.kernel.read import sketched as chapter
from ntkexp.kernel.read.plan import Outputs
from ntkexp.kernel.read.sketched import even_slices
from ntkexp.kernel.secant.uses import View
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from tests.kernel import oracle
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.routed import ROUTED, routed

VIEW = View("v", (3, 4), (4, 1), 0)
pytestmark = pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them

EPS = torch.finfo(torch.float64).eps
READ = ("relu", "tokens", "convolution", "convolution in two", "encoder, norm before", "two heads", "running products")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches as can be, of two examples or three."""
    for name, value in (("AT_ONCE", 0), ("BATCH", 1), ("FEW", 1)):
        monkeypatch.setattr(chapter, name, value)


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


def test_a_secant_kernel_takes_its_training_examples_in_batches() -> None:
    network = known("convolution")
    module, x = network.given.module, network.given.x
    agree(secant_kernel(module, {}, {}, x[:2], x), network.kernel[:2, :, :5], 100 * EPS)


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


@pytest.mark.parametrize(("total", "count"), [(5, 1), (5, 2), (6, 3), (7, 3)])
def test_batches_differ_by_one_example_at_most(total: int, count: int) -> None:
    places = even_slices(total, count)
    assert [k for place in places for k in range(total)[place]] == list(range(total))
    assert {place.stop - place.start for place in places} <= {total // count, total // count + 1}


def dense(block: Block) -> Tensor:
    """The gradients, multiplied out."""
    return torch.cat([rows.rows for rows in block.by_name()], 2)


def part(examples: int, **changes: Block) -> Jacobian:
    blocks: dict[str, Block] = {
        "w": Rows(torch.full((examples, 1, 3), float(examples)), "w"),
        "v": Factored(torch.ones(examples, 2, 3), torch.ones(examples, 1, 2, 4), VIEW, None, None),
    }
    return Jacobian(tuple((blocks | changes).values()), examples, 1)


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
