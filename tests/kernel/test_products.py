"""Laws of convolutions of a few examples at a time: they are those of all, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.assemble import assemble, pull_back, row_index, select_rows
from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.read.program_cache import ProgramCache, parts
from ntkexp.kernel.record import convolution
from ntkexp.kernel.record.convolution import CONVOLVE_BACK, Window, convolve, convolve_back
from ntkexp.kernel.record.taping import composed, record, unfused
from ntkexp.kernel.secant.call import inner_products
from ntkexp.kernel.secant.replay import Replay
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.oracle import agree
from tests.kernel.problems import DENSE, KINDS, Known, known

How: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]

HOW: dict[str, How] = {
    "padded": ((1, 1), (2, 1), (1, 1), False, (0, 0), 1),
    "strided": ((2, 1), (0, 0), (1, 1), False, (0, 0), 1),
    "dilated": ((1, 1), (1, 1), (1, 2), False, (0, 0), 1),
    "transposed": ((2, 2), (1, 1), (1, 1), True, (1, 1), 1),
    "grouped": ((1, 1), (1, 1), (1, 1), False, (0, 0), 2),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_few_examples_at_a_time_have_the_bits_of_all(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = torch.randn(7, 4, 6, 5, dtype=torch.float64), torch.randn(4, 4 // how[-1], 3, 3, dtype=torch.float64)
    expected = torch.convolution(x, kernel, bias := torch.randn(4, dtype=torch.float64), *how)
    monkeypatch.setattr(convolution, "CACHED_PATCH_BYTES", 2 * x[:1].nbytes * 9)
    found = convolve(x, kernel, bias, *how)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_of_any_number_of_dimensions(dimensions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, *[4] * dimensions, dtype=torch.float64)
    kernel = torch.randn(3, 2, *[2] * dimensions, dtype=torch.float64)
    ones, none = [1] * dimensions, [0] * dimensions
    expected = torch.convolution(x, kernel, None, ones, ones, ones, False, none, 1)
    monkeypatch.setattr(convolution, "CACHED_PATCH_BYTES", 1)
    assert torch.equal(convolve(x, kernel, None, ones, ones, ones, False, none, 1), expected)


# The law of the way back through a convolution: ⟨w, x ∗ k⟩ = ⟨back(w), x⟩, for all that a convolution may be.


EPS = torch.finfo(torch.float64).eps
WayBack: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int]
WAYS_BACK: dict[str, WayBack] = {  # window, stride, padding, dilation, transposed, groups
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
}


@pytest.mark.parametrize("together", [1, 2, 9])
@pytest.mark.parametrize("name", WAYS_BACK)
def test_it_is_the_transpose(name: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    window, stride, padding, dilation, transposed, groups = WAYS_BACK[name]
    torch.manual_seed(0)
    x = torch.randn(5, 4, *(6, 5)[: len(window)], dtype=torch.float64)
    kernel = torch.randn(6 if not transposed else 4, 4 // groups, *window, dtype=torch.float64)
    how = (stride, padding, dilation, transposed, (0,) * len(window), groups)
    there = torch.convolution(x, kernel, None, *how)
    w = torch.randn_like(there)
    monkeypatch.setattr(convolution, "CACHED_PATCH_BYTES", together * 6 * window[-1] * 8 * 8 * 8)
    back = CONVOLVE_BACK(w, x.shape[1:], kernel, *how)
    assert back.shape == x.shape
    terms = torch.cat([(w * there).flatten(), (back * x).flatten()])
    assert abs((w * there).sum() - (back * x).sum()) <= 10 * EPS * terms.abs().sum()


def test_of_nobody() -> None:
    how = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    kernel = torch.ones(2, 3, 3, 3, dtype=torch.float64)
    assert convolve_back(kernel.new_empty(0, 2, 4, 4), (3, 4, 4), kernel, *how).shape == (0, 3, 4, 4)


# Patches that are brought together a few examples at a time are those that are brought together at once.


WINDOWS = {
    "plain": ((4, 5), (3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": ((4, 5), (3, 3), (1, 1), (1, 2), (1, 1)),
    "in steps": ((6, 5), (2, 3), (2, 3), (1, 0), (1, 1)),
    "wide": ((6, 5), (2, 2), (1, 2), (0, 1), (3, 2)),
    "pixels": ((2, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
    "every other pixel": ((3, 3), (1, 1), (2, 2), (0, 0), (1, 1)),
    "one dimension": ((7,), (3,), (2,), (1,), (2,)),
    "three dimensions": ((3, 2, 3), (2, 2, 2), (1, 1, 2), (0, 1, 1), (1, 1, 1)),
}


def images(examples: int, *shape: int) -> Tensor:
    """Random ones."""
    return torch.randn(examples, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("together", [1, 4, 9])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_few_at_a_time_are_all(name: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, *how = WINDOWS[name]
    window = Window(images(9, 2, *pixels), *how)
    monkeypatch.setattr(convolution, "PRODUCT_PATCH_BYTES", together * window.rows[:1].nbytes)
    parts = [shown.mT.clone() for _, shown in window.turns()]
    assert torch.equal(torch.cat(parts), window.rows)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_kernel_of_more_images_than_are_brought_together_at_once(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "PRODUCT_PATCH_BYTES", 2 * 4 * 3 * 4 * 9 * 8)  # two of the larger patches
    layers = (nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.Tanh(), nn.Conv2d(4, 4, 2, stride=2, groups=groups))
    made, x = nn.Sequential(*layers, nn.Flatten()).double(), images(5, 4, 3, 4)
    agree(tangent_kernel(made, x[-2:], x), oracle.tangent(made, x[-2:], x), 100 * EPS)


@pytest.mark.parametrize(("side", "kept"), [(2, True), (5, False)])
def test_factors_are_kept_where_pixels_are_few(side: int, kept: bool) -> None:
    made = nn.Sequential(nn.Conv2d(8, 8, 2), nn.Flatten()).double()
    walker, own = reader_of(made)
    blocks = walker.tangent(walker.record(own, images(2, 8, side, side))).blocks
    assert all(isinstance(block, Factored) == kept for block in blocks)


# Maps that are given with their transposes pull many vectors back at once as they pull back one after the other.


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


@pytest.mark.parametrize("name", BRANCHES)
def test_many_vectors_at_once(name: str) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 1), nn.Tanh(), BRANCHES[name], nn.Flatten(), nn.LazyLinear(OUTPUTS))
    module, x = nn.Sequential(*layers).eval(), torch.randn(3, *SHAPE, dtype=torch.float64)
    module(x.float())  # how wide the last layer is follows from what comes before
    reader, start = reader_of(module.double())
    end = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in start.items()}
    tapes = reader.record(start, x), reader.record(end, x)
    replay, owned = Replay(*tapes, reader.trained), reader.checks.owners(tapes[0])
    mixtures = torch.randn(4, 3, OUTPUTS, dtype=torch.float64)

    def read(*, at_once: bool) -> list[Tensor]:
        given = (replay.delta, replay.uses, owned, replay.leaves, mixtures)
        return parts(assemble(pull_back(*given, at_once=at_once)))

    for found, expected in zip(read(at_once=True), read(at_once=False), strict=True):
        agree(found, expected, 100 * EPS)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("way", [nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Linear(4, 6)])
def test_what_examples_share_is_pulled_back_once(way: nn.Module, *, at_once: bool) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 2, 1), deepcopy(way), nn.Flatten(), nn.LazyLinear(OUTPUTS))
    module, x = nn.Sequential(*layers), torch.randn(3, *SHAPE)
    module(x)  # how wide the last layer is follows from what comes before
    reader, start = reader_of(module.double())
    tape = reader.record(start, x.double())
    replay, owned = Replay(tape, tape, reader.trained), reader.checks.owners(tape)
    shared = torch.randn(4, 1, OUTPUTS, dtype=torch.float64).expand(-1, 3, -1)
    found, expected = (
        parts(assemble(pull_back(replay.delta, replay.uses, owned, replay.leaves, mixtures, at_once=at_once)))
        for mixtures in (shared, shared.contiguous())
    )
    if at_once:  # one by one, outputs are copied to stand beside each other
        assert any(part.dim() > 2 and part.stride(0) == 0 for part in found)
    for one, other in zip(found, expected, strict=True):
        agree(one, other, 100 * EPS)


def test_inner_products_are_those_of_rows() -> None:
    vectors, fixed = torch.arange(24.0).view(2, 3, 1, 4), torch.ones(5, 3, 1, 4) * torch.arange(5.0).view(5, 1, 1, 1)
    assert torch.equal(inner_products(vectors, fixed), (vectors * fixed[:, None]).sum(-1, keepdim=True))


# Recurrent layers that a GPU runs as one operation are taped as the operations they are composed of.


class Last(nn.Module):
    """Two layers in two directions, read at the last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)[0][:, -1]
        return outputs


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_torch_composes_has_no_cell_left_and_the_same_values(kind: Callable[..., nn.Module]) -> None:
    """torch's compositions are the same for every device; its cells are what a GPU would run instead."""
    module, x = Last(kind).double(), torch.randn(5, 3, 3, dtype=torch.float64)
    with unfused(), composed():
        tape = record(function_of(module), weights_of(module), x)
    assert not [entry.name for entry in tape.entries if "rnn" in entry.name or "cell" in entry.name]
    torch.testing.assert_close(tape.outputs, module(x).detach(), rtol=1e-14, atol=1e-14)


# What is pulled back to rows of products is grouped by the example that owns it.


class Twice(nn.Module):
    """One weight and one bias in two products, each with a factor of its own before the bias."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), first, second

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight.t(), self.layer.bias
        return torch.addmm(bias, torch.addmm(bias, x, weight, beta=self.first).tanh(), weight, beta=self.second)


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


@pytest.mark.parametrize("factors", [(2.0, 2.0), (2.0, 0.5), (1.0, 0.0)], ids=str)
def test_a_bias_that_is_used_twice_with_factors_of_its_own(factors: tuple[float, float]) -> None:
    torch.manual_seed(0)
    module, x = Twice(*factors), torch.randn(5, 4, dtype=torch.float64)
    agree(tangent_kernel(module, x), oracle.tangent(module, x, x), 100 * EPS)
    agree(secant_kernel(module, {}, {}, x, x), oracle.tangent(module, x, x), 100 * EPS)


# A Jacobian kept use by use contracts as the Jacobian does, and holds no row as long as the weights.


def rows(network: Known) -> dict[str, Tensor]:
    """The oracle's Jacobian of the five, by parameter."""
    return {name: found[:5] for name, found in network.jacobians.items()}


def drawn(network: Known) -> Weights:
    """A random vector in the shape of the trained weights."""
    draw = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in network.given.module.named_parameters() if p.requires_grad}
    return {name: torch.randn(p.shape, generator=draw, dtype=p.dtype) for name, p in trained.items()}


@pytest.mark.parametrize("name", KINDS)
def test_it_contracts_as_the_jacobian_does_on_both_sides(name: str) -> None:
    network = known(name)
    found, jacobians, weights = network.reader.use_by_use(network.tape), rows(network), drawn(network)
    applied = torch.stack([jacobians[key] @ weights[key].flatten() for key in jacobians]).sum(0)
    size = sum(float(jacobians[key].abs().amax()) * float(weights[key].norm()) for key in jacobians)
    agree(found.applied(weights), applied, 100 * EPS, size)
    left = torch.randn(applied.shape, generator=torch.Generator().manual_seed(2), dtype=applied.dtype)
    gradient = found.weighted(left).total(weights)
    for key, jacobian in jacobians.items():
        expected = torch.einsum("nc,ncp->p", left, jacobian).view(weights[key].shape)
        agree(gradient[key], expected, 100 * EPS, jacobian.abs().sum((0, 1)).max() * left.abs().max() + 1e-300)


class Looked(nn.Module):
    """A table that a text looks up, and the same table against which it is read."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(torch.tanh(self.table(x)))
        return hidden.sum(1)


def test_a_table_takes_what_was_read_of_it() -> None:
    """Twice the words, and the same memory: no example has a row as long as the table."""
    texts = torch.tensor([[0, 4, 4, 1], [2, 2, 0, 3]])
    sizes = []
    for words in (1000, 2000):
        reader, own = reader_of(Looked(words).double())
        sizes.append(reader.use_by_use(reader.record(own, texts)).nbytes)
    assert sizes[0] == sizes[1] < 8 * 1000 * 3


# Products of a Jacobian with a vector on either side are those of its features, however many outputs there are.


@pytest.mark.sample(20)
@pytest.mark.parametrize("planned", [False, True], ids=["as it comes", "by programs"])
@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_mixed_outputs_are_pulled_back_as_the_jacobian_is(name: str, planned: bool) -> None:
    network = known(name)
    reader = replace(network.reader, programs=ProgramCache() if planned else None)
    tape = reader.record(network.given.start, network.given.x)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3 if planned else 1):  # the last comes from a program that has been compared with the usual way
        mixture = torch.randn(tape.outputs.shape, generator=draw, dtype=torch.float64)
        gradient = reader.weighted(tape, mixture).total(dict(network.given.start))
        for key, jacobian in network.jacobians.items():
            rows = jacobian[: len(mixture)]
            expected = torch.einsum("nc,ncp->p", mixture, rows).view(gradient[key].shape)
            agree(gradient[key], expected, 100 * EPS, rows.abs().sum((0, 1)).max() * mixture.abs().max() + 1e-300)


@pytest.mark.parametrize("name", [*KINDS, *DENSE])
def test_a_direction_is_passed_through_as_the_jacobian_says(name: str) -> None:
    network = known(name)
    draw = torch.Generator().manual_seed(1)
    start = {key: weight for key, weight in network.given.start.items() if key in network.reader.trained}
    direction = {key: torch.randn(w.shape, generator=draw, dtype=w.dtype) for key, w in start.items()}
    rows = {key: network.jacobians[key][:5] @ direction[key].flatten() for key in network.jacobians}
    size = sum(float(each.abs().amax()) * float(direction[key].norm()) for key, each in network.jacobians.items())
    agree(network.reader.applied(network.tape, direction), torch.stack([*rows.values()]).sum(0), 100 * EPS, size)
