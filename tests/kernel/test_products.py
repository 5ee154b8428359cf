"""Convolutions and norms: a few examples at a time have the bits of all, and every way back is the transpose."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.assemble import assemble, pull_back, row_index, select_rows
from ntkexp.kernel.read.program_cache import parts
from ntkexp.kernel.record.convolution import CONVOLVE_BACK, Window, convolve, convolve_back
from ntkexp.kernel.record.taping import composed, record, unfused
from ntkexp.kernel.secant.call import inner_products
from ntkexp.kernel.secant.replay import Replay
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.model.functional import function_of, weights_of
from tests.kernel import oracle
from tests.kernel.networks import Formula, last_state
from tests.kernel.oracle import EPS, agree, normal

How: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int]
CONVOLUTIONS: dict[str, How] = {  # window, stride, padding, dilation, transposed, groups
    "plain": ((3, 2), (1, 1), (0, 0), (1, 1), False, 1),
    "padded": ((3, 3), (1, 1), (1, 1), (1, 1), False, 1),
    "padded by less and by all": ((3, 4), (1, 1), (2, 1), (1, 1), False, 1),
    "dilated": ((2, 3), (1, 1), (1, 2), (3, 2), False, 1),
    "wider than the image": ((1, 13), (1, 1), (0, 6), (1, 1), False, 1),
    "with a border that no pixel reaches": ((2, 2), (1, 1), (3, 0), (1, 1), False, 1),
    "strided": ((3, 3), (2, 1), (1, 1), (1, 1), False, 1),
    "pixels": ((1, 1), (1, 1), (0, 0), (1, 1), False, 1),
    "padded pixels": ((1, 1), (1, 1), (1, 1), (1, 1), False, 1),
    "in groups": ((3, 3), (1, 1), (1, 1), (1, 1), False, 2),
    "transposed": ((3, 3), (2, 2), (1, 1), (1, 1), True, 1),
    "along one axis": ((3,), (1,), (1,), (1,), False, 1),
    "along three axes": ((2, 2, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), False, 1),
}


@pytest.mark.parametrize("pixels", [(6, 5, 4), (60, 50, 3)], ids=["all at once", "a few at a time"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_has_the_bits_of_torch_and_its_way_back_is_the_transpose(
    name: str, pixels: tuple[int, ...]
) -> None:
    """⟨w, x ∗ k⟩ = ⟨back(w), x⟩. Large images exceed the cache of a core, and are taken a few at a time."""
    window, stride, padding, dilation, transposed, groups = CONVOLUTIONS[name]
    x = normal(7, 4, *(pixels if len(window) > 1 else (9000,))[: len(window)])
    kernel = normal(6 if not transposed else 4, 4 // groups, *window, seed=1)
    how = (stride, padding, dilation, transposed, (0,) * len(window), groups)
    bias = normal(6 if not transposed else 4 // groups, seed=2)
    assert torch.equal(convolve(x, kernel, bias, *how), torch.convolution(x, kernel, bias, *how))
    there = torch.convolution(x, kernel, None, *how)
    w = normal(*there.shape, seed=3)
    back = CONVOLVE_BACK(w, x.shape[1:], kernel, *how)
    assert back.shape == x.shape
    terms = torch.cat([(w * there).flatten(), (back * x).flatten()])
    assert abs((w * there).sum() - (back * x).sum()) <= 10 * EPS * terms.abs().sum()


def test_the_way_back_of_no_images() -> None:
    how = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    kernel = torch.ones(2, 3, 3, 3, dtype=torch.float64)
    assert convolve_back(kernel.new_empty(0, 2, 4, 4), (3, 4, 4), kernel, *how).shape == (0, 3, 4, 4)


# Patches that are collected a few examples at a time are those that are collected at once.


WINDOWS = {  # pixels, size, stride, padding, dilation
    "plain": ((4, 5), (3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": ((4, 5), (3, 3), (1, 1), (1, 2), (1, 1)),
    "in steps": ((6, 5), (2, 3), (2, 3), (1, 0), (1, 1)),
    "wide": ((6, 5), (2, 2), (1, 2), (0, 1), (3, 2)),
    "pixels": ((2, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
    "every other pixel": ((3, 3), (1, 1), (2, 2), (0, 0), (1, 1)),
    "one dimension": ((7,), (3,), (2,), (1,), (2,)),
    "three dimensions": ((3, 2, 3), (2, 2, 2), (1, 1, 2), (0, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("channels", [2, 4000])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_few_patches_at_a_time_are_all(name: str, channels: int) -> None:
    """With 4,000 channels one example has megabytes of patches."""
    pixels, *how = WINDOWS[name]
    window = Window(normal(5, channels, *pixels), *how)
    assert torch.equal(torch.cat([shown.mT.clone() for _, shown in window.batches()]), window.rows)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_kernel_of_more_images_than_are_collected_at_once(groups: int) -> None:
    layers = (nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=9, groups=groups))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = normal(5, 4, 70, 80)
    agree(tangent_kernel(net, x[-2:], x), oracle.tangent(net, x[-2:], x), 1000 * EPS)


# Maps with transposes of their own pull many vectors back at once as they do one after the other.


SHAPE, OUTPUTS = (2, 5, 4), 3
BRANCHES = {
    "convolution": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "of single pixels": nn.Conv2d(4, 6, 1),
    "of single pixels in groups": nn.Conv2d(4, 6, 1, groups=2),
    "of some pixels": nn.Conv2d(4, 6, 1, stride=2),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2),
    "group norm": nn.GroupNorm(2, 4),
    "group norm without gains": nn.GroupNorm(2, 4, affine=False),
    "layer norm": nn.LayerNorm(SHAPE[1:]),
    "layer norm of rows": nn.LayerNorm(SHAPE[2:]),
    "batch norm": nn.BatchNorm2d(4),
}


def pulled(layers: list[nn.Module], *, moves: bool) -> Callable[[Tensor, bool], list[Tensor]]:
    """Return a function that pulls mixtures of the outputs of these layers back to their weights."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(OUTPUTS)).eval(), normal(3, *SHAPE)
    net(x.float())  # the width of the last layer follows from the others
    reader, start = reader_of(net.double())
    end = {name: weight + 0.3 * normal(*weight.shape) for name, weight in start.items()} if moves else start
    tapes = reader.record(start, x), reader.record(end, x)
    replay, owned = Replay(*tapes, reader.trained), reader.checks.owners(tapes[0])

    def read(mixtures: Tensor, at_once: bool) -> list[Tensor]:
        return parts(assemble(pull_back(replay.delta, replay.uses, owned, replay.leaves, mixtures, at_once=at_once)))

    return read


@pytest.mark.parametrize("name", BRANCHES)
def test_many_vectors_at_once(name: str) -> None:
    read = pulled([nn.Conv2d(2, 4, 1), nn.Tanh(), deepcopy(BRANCHES[name])], moves=True)
    mixtures = normal(4, 3, OUTPUTS, seed=1)
    for found, expected in zip(read(mixtures, True), read(mixtures, False), strict=True):
        agree(found, expected, 100 * EPS)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("way", [nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Linear(4, 6)])
def test_a_vector_that_examples_share_is_pulled_back_once(way: nn.Module, *, at_once: bool) -> None:
    read = pulled([nn.Conv2d(2, 2, 1), deepcopy(way)], moves=False)
    shared = normal(4, 1, OUTPUTS, seed=1).expand(-1, 3, -1)
    found = read(shared, at_once)
    if at_once:  # one by one, outputs are copied into one tensor
        assert any(part.dim() > 2 and part.stride(0) == 0 for part in found)
    for one, other in zip(found, read(shared.contiguous(), at_once), strict=True):
        agree(one, other, 100 * EPS)


def test_inner_products_are_those_of_rows() -> None:
    vectors, fixed = torch.arange(24.0).view(2, 3, 1, 4), torch.ones(5, 3, 1, 4) * torch.arange(5.0).view(5, 1, 1, 1)
    assert torch.equal(inner_products(vectors, fixed), (vectors * fixed[:, None]).sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_taped_as_its_operations_with_the_same_values(kind: Callable[..., nn.Module]) -> None:
    """torch's compositions are the same for every device. A GPU would run one operation for a cell instead."""
    module = last_state(kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)).double()
    x = normal(5, 3, 3)
    with unfused(), composed():
        tape = record(function_of(module), weights_of(module), x)
    assert not [entry.name for entry in tape.entries if "rnn" in entry.name or "cell" in entry.name]
    torch.testing.assert_close(tape.outputs, module(x).detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("owner", [[0, 1, 2, 0, 1, 2], [2, 0, 1, 0, 1, 2], [0, 2, 2, -1, 0, 2]], ids=str)
def test_rows_of_any_order_come_example_by_example(owner: list[int]) -> None:
    whose, rows = torch.tensor(owner), torch.arange(1.0, 25).view(6, 4)
    places = row_index(whose, 3)
    assert places is not None
    found = select_rows(rows, 0, places)
    for example in range(3):
        own = rows[whose == example]
        assert torch.equal(found[example, : len(own)], own)
        assert not found[example, len(own) :].any()
    assert torch.equal(select_rows(rows[None], 1, places), found[None])


class Looked(nn.Module):
    """A table that texts read, and a norm."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(torch.tanh(self.table(x)))
        return hidden.sum(1)


def test_a_table_takes_memory_for_the_rows_that_are_read() -> None:
    """With twice the words, the memory is the same: no example has a row as long as the table."""
    texts = torch.tensor([[0, 4, 4, 1], [2, 2, 0, 3]])
    readers = [reader_of(Looked(words).double()) for words in (1000, 2000)]
    sizes = [reader.use_by_use(reader.record(own, texts)).nbytes for reader, own in readers]
    assert sizes[0] == sizes[1] < 8 * 1000 * 3


def twice(first: float, second: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One weight and one bias in two products, with different factors of the bias."""
    return lambda x, w, b: torch.addmm(b, torch.addmm(b, x, w, beta=first).tanh(), w, beta=second)


SHARED: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    **{
        f"a bias times {pair}": (twice(*pair), {"w": (12, 12), "b": (12,)})
        for pair in ((2.0, 2.0), (2.0, 0.5), (1.0, 0))
    },
    "copied on the left": (
        lambda x, w: torch.bmm(w.expand(len(x), 2, 3), x.view(-1, 3, 4).tanh()).flatten(1),
        {"w": (2, 3)},
    ),
    "copied on the right": (
        lambda x, w: torch.bmm(x.view(-1, 4, 3).tanh(), w.t().expand(len(x), 3, 2)).flatten(1),
        {"w": (2, 3)},
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_weight_that_is_used_twice_or_copied_along_a_batch_is_one_weight(name: str) -> None:
    function, shapes = SHARED[name]
    made, x = Formula(function, **shapes).double(), normal(5, 12)
    start, end = ({key: normal(*shape, seed=seed) / 3 for key, shape in shapes.items()} for seed in (1, 2))
    expected = oracle.tangent(made, x, x, start)
    agree(tangent_kernel(made, x, weights=start), expected, 100 * EPS)
    linear = "copied" in name
    agree(secant_kernel(made, start, end if linear else start, x, x), expected, 100 * EPS)
