"""The kernel by chunks of parameters is the kernel, however few examples and elements are taken at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features.gram import Sizes
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import checks, reader, sketched
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.ownership import Owners, owners
from ntkexp.library import tangent as library
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.oracle import tangent
from tests.kernel.problems import KINDS

EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jacobian never fit, strips have some elements; how many kernels were made so is counted."""
    made: list[int] = []

    def counted(left: Jacobian, right: Jacobian) -> torch.Tensor:
        made.append(left.examples)
        return chapter.gram(left, right)

    monkeypatch.setattr(reader, "FITS", -1.0)
    monkeypatch.setattr(library, "FITS", -1.0)
    monkeypatch.setattr(chapter, "WHOLE", 0)
    monkeypatch.setattr(chapter, "ROOM", 500)
    monkeypatch.setattr(chapter, "LEAST", 1)
    monkeypatch.setattr(sketched, "gram", counted)
    return made


FEW = ("tied embedding", "tied and transposed", "overlapping slices")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in FEW)]
)
def test_every_kind_of_use_has_its_share(name: str, nothing_fits: list[int]) -> None:
    network = known(name)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == [5]


@pytest.mark.parametrize("factors", ["double sum", "multiplied out"])
@pytest.mark.parametrize("name", ["relu", "convolution"])
def test_factors_are_kept_or_multiplied_out(
    name: str, factors: str, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(Sizes, "way", factors)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)


@pytest.mark.parametrize("held", [1.0, 1e9], ids=["groups of one or two", "all held"])
@pytest.mark.parametrize("name", ["relu", "tied embedding"])
def test_examples_a_few_at_a_time(
    name: str, held: float, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(sketched, "READ", 1.0)
    monkeypatch.setattr(sketched, "KEPT", held)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == ([5, 5] if held > 1 else [*[1] * 3, *[2] * 3, *[1] * 2, *[2] * 4])


def test_some_outputs_are_those_blocks(nothing_fits: list[int]) -> None:
    network = known("two heads")
    some = tangent_kernel(network.given.module, network.given.x, outputs=[2, 0])
    agree(some, network.kernel[:, [2, 0]][:, :, :5][..., [2, 0]], 1000 * EPS)
    assert nothing_fits == [5]


class Text(nn.Module):
    """The mean log-likelihood of a text's next words, of one table that is read at both ends and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.mix = nn.Embedding(7, 3), nn.Embedding(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.words(x) + self.places(torch.arange(x.shape[1]))))
        scores = (hidden[:, :-1] @ self.words.weight.t()).log_softmax(2)
        return scores.gather(2, x[:, 1:, None]).mean((1, 2))


def test_texts_are_asked_once_whose_positions_are(nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The words steer what is gathered, and are others in every batch; rows of positions are a use like any other."""
    torch.manual_seed(0)
    module, x = Text().double(), torch.randint(7, (6, 5))
    asked: list[int] = []

    def counted(tape: Tape, trained: frozenset[str]) -> Owners:
        asked.append(len(tape.outputs))
        return owners(tape, trained)

    monkeypatch.setattr(checks, "owners", counted)
    monkeypatch.setattr(sketched, "READ", 1.0)
    agree(tangent_kernel(module, x), tangent(module, x, x), 1000 * EPS)
    assert nothing_fits == [6]
    assert asked == [2]


class Sorted(nn.Module):
    """A layer whose rows are those of other examples wherever the inputs are not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[x[:, 0].argsort()]
        return result


@pytest.mark.parametrize("order", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_a_batch_that_is_sorted_is_refused_even_if_it_came_in_order(order: list[float]) -> None:
    with pytest.raises(Mistake, match="couples the examples"):
        tangent_kernel(Sorted().double(), torch.tensor(order).double()[:, None])


class Dealt(nn.Module):
    """A layer that meets its rows in the order of their first numbers, and gives each back, times the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        result: Tensor = self.layer(x[order, :1])[order.argsort()] * x[:, 1:]
        return result


def test_small_rows_have_owners_too() -> None:
    """Each belongs to the example whose output it reaches, also where another batch comes in another order."""
    module, in_order = Dealt().double(), torch.tensor([[1.0, 1.0], [2.0, 1e-9], [3.0, 1e-9]]).double()
    tangent_kernel(module, in_order)
    others = in_order[[0, 2, 1]]
    gradients = torch.cat([others[:, :1], torch.ones_like(others[:, 1:])], 1) * others[:, 1:]
    found = tangent_kernel(module, others)[:, 0, :, 0]
    torch.testing.assert_close(found, gradients @ gradients.t(), rtol=1e-12, atol=0)


class Many(nn.Module):
    """A weight that counts, and many others of which each adds less to the kernel than that is rounded by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + (x * self.others).sum(1, keepdim=True) * 1.5e-4


def test_small_chunks_are_not_lost_beside_a_large_sum(nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """K(1, 1) = 1 + 4096 · 2.25e-8, of which float32 would keep 1."""
    monkeypatch.setattr(chapter, "ROOM", 1)
    monkeypatch.setattr(chapter, "LEAST", 1)
    found = tangent_kernel(Many(), torch.ones(2, 1))
    torch.testing.assert_close(found, torch.full_like(found, 1 + 4096 * 1.5e-4**2), rtol=1e-6, atol=0)
    assert nothing_fits == [2]
