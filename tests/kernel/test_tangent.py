"""Kernels and Jacobian products of every network equal the results of plain Jacobians, example by example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Block, Factored
from ntkexp.kernel.features.gram import contributions, gram
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.uses import Element, Trained, plain_uses
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.networks import Formula, own_weights
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import DENSE, KINDS, READ, Known, known, problem

ROUNDING = 100 * EPS  # sums of about a hundred products, relative to the largest entry

pytestmark = pytest.mark.filterwarnings("ignore:.*example by example")


def diagonal(kernel: Tensor) -> Tensor:
    """Σ_c K[x, c, x′, c]."""
    return torch.einsum("qcnc->qn", kernel)[:, None, :, None]


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", [*READ, *DENSE])
def test_the_kernels_of_a_network_are_those_of_its_jacobians(name: str) -> None:
    """Two sets of inputs and one, the trace, and a secant of length zero, which the difference rules read."""
    network = known(name)
    module, x, other = network.given.module, network.given.x, network.other
    own, cross, size = network.kernel[:, :, :5], network.kernel[:, :, 5:], network.kernel.abs().max()
    agree(tangent_kernel(module, x, other), cross, ROUNDING, size)
    agree(tangent_kernel(module, x, other, outputs="trace"), diagonal(cross), ROUNDING, size)
    kernels = [tangent_kernel(module, x)]
    if name in READ:
        replayed = network.reader.secant(network.tape, network.tape).jacobian
        agree(gram(network.features, replayed), own, ROUNDING)
        kernels += [gram(replayed, replayed), secant_kernel(module, {}, own_weights(module), x, x)]
    for kernel in kernels:
        agree(kernel, own, ROUNDING)
        agree(kernel, kernel.permute(2, 3, 0, 1), ROUNDING)


@pytest.mark.parametrize("name", ["relu", "tanh", "called twice", "low rank", "tokens", "convolution"])
def test_the_kernel_in_single_precision(name: str) -> None:
    given = problem(name, dtype=torch.float32)
    expected = oracle.tangent(given.module, given.x, given.x)
    agree(tangent_kernel(given.module, given.x), expected, 100 * torch.finfo(torch.float32).eps)


# Products of a Jacobian with vectors on either side equal the products of the oracle's Jacobian.


Compared: TypeAlias = Iterator[tuple[Tensor, Tensor, Tensor | float | None]]
"""A result, the expected one, and the size of the terms that were added."""


def cotangent(network: Known, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(network.tape.outputs.shape, generator=generator, dtype=torch.float64)


def direction(network: Known) -> Weights:
    """A random vector in the shape of the trained weights."""
    draw, start = torch.Generator().manual_seed(1), network.given.start
    return {key: torch.randn(start[key].shape, generator=draw, dtype=torch.float64) for key in network.jacobians}


def compare_gradients(network: Known, left: Tensor, found: Weights) -> Compared:
    """Σ_nc left_nc ∂f_nc/∂θ for every parameter."""
    for key, jacobian in network.jacobians.items():
        rows = jacobian[:5]
        expected = torch.einsum("nc,ncp->p", left, rows).view(found[key].shape)
        yield found[key], expected, rows.abs().sum((0, 1)).max() * left.abs().max() + 1e-300


def compare_changes(network: Known, found: Tensor) -> Compared:
    """J v."""
    v = direction(network)
    rows = [jacobian[:5] @ v[key].flatten() for key, jacobian in network.jacobians.items()]
    size = sum(float(each.abs().amax()) * float(v[key].norm()) for key, each in network.jacobians.items())
    yield found, torch.stack(rows).sum(0), size


def contracted_kernel(network: Known) -> Compared:
    gradient, kernel = cotangent(network), gram(network.features, network.features)
    expected = torch.einsum("qcnd,nd->qcn", kernel, gradient)
    found = contributions(network.features, network.features, gradient)
    yield found, expected, kernel.abs().max() * gradient.abs().max()


def blocks_of_inputs(network: Known) -> Compared:
    blocks = torch.tensor_split(network.given.x, (1, 2))
    parts = [network.reader.tangent(network.reader.record(network.given.start, block)) for block in blocks]
    rows = [torch.cat([gram(left, right) for right in parts], 2) for left in parts]
    yield torch.cat(rows), gram(network.features, network.features), None


def features(network: Known) -> Compared:
    left = cotangent(network)
    yield from compare_gradients(network, left, network.features.weighted(left).total(network.given.start))


def use_by_use(network: Known) -> Compared:
    found, left = network.reader.use_by_use(network.tape), cotangent(network)
    yield from compare_changes(network, found.applied(direction(network)))
    yield from compare_gradients(network, left, found.weighted(left).total(direction(network)))


def mixed_outputs(network: Known) -> Compared:
    reader = replace(network.reader, programs=None)
    left = cotangent(network)
    yield from compare_gradients(network, left, reader.weighted(network.tape, left).total(network.given.start))


def mixed_by_programs(network: Known) -> Compared:
    """A program reads the third mixture, after it was compared with the usual way."""
    reader = replace(network.reader, programs=ProgramCache())
    tape = reader.record(network.given.start, network.given.x)
    for seed in range(3):
        left = cotangent(network, seed)
        yield from compare_gradients(network, left, reader.weighted(tape, left).total(dict(network.given.start)))


def passed_through(network: Known) -> Compared:
    yield from compare_changes(network, network.reader.applied(network.tape, direction(network)))


PRODUCTS: dict[str, Callable[[Known], Compared]] = {
    "contributions": contracted_kernel,
    "blocks of inputs": blocks_of_inputs,
    "features": features,
    "use by use": use_by_use,
    "mixed outputs": mixed_outputs,
    "mixed outputs by programs": mixed_by_programs,
    "a direction": passed_through,
}
OF_ANY_MODULE = ("mixed outputs", "mixed outputs by programs", "a direction")
CASES = [
    *((name, product) for name in KINDS for product in PRODUCTS),
    *((name, product) for name in DENSE for product in OF_ANY_MODULE),
]


@pytest.mark.sample(110)
@pytest.mark.parametrize(("name", "product"), CASES)
def test_every_product_is_that_of_the_jacobian(name: str, product: str) -> None:
    for found, expected, scale in PRODUCTS[product](known(name)):
        agree(found, expected, ROUNDING, scale)


PLAIN = ("attention", "convolution in two", "encoder, norm after", "encoder, norm before", "gains and shifts")


@pytest.mark.parametrize("name", [*PLAIN, "group norm", "tokens"])
def test_no_difference_is_replayed_where_autograd_can_be_asked(name: str) -> None:
    """Norms, groups, gains, and biases and tokens next to products are seen from the results of operations."""
    network = known(name)
    owned = network.reader.checks.owners(network.tape)
    uses = plain_uses(Trained(network.tape, network.reader.trained, owned.constants))
    assert uses is not None
    assert [use.tap.numel() for use in uses if isinstance(use, Element)] == [
        owner.numel() for use, owner in zip(uses, owned.of_uses, strict=True) if isinstance(use, Element)
    ]


def blocks(module: nn.Module, x: Tensor) -> tuple[Block, ...]:
    reader, own = reader_of(module)
    return reader.tangent(reader.record(own, x)).blocks


@pytest.mark.parametrize("name", ["relu", "no bias"])
def test_a_plain_network_keeps_its_factors(name: str) -> None:
    """There is one block for each layer, and nothing is multiplied out. The kernel is fast because of this."""
    given = problem(name)
    found = blocks(given.module, given.x)
    assert len(found) == 3
    assert all(isinstance(block, Factored) and block.inputs.shape[1] == 1 for block in found)


@pytest.mark.parametrize(("side", "kept"), [(2, True), (5, False)])
def test_factors_are_kept_where_pixels_are_few(side: int, kept: bool) -> None:
    made = nn.Sequential(nn.Conv2d(8, 8, 2), nn.Flatten()).double()
    assert all(isinstance(block, Factored) == kept for block in blocks(made, normal(2, 8, side, side)))


# Some parameters are frozen, some rows are never used, and findings of one batch hold for others.


@pytest.mark.parametrize(
    "name",
    [
        *("relu", "called twice", "left multiplication", "scaled weight", "two heads", "low rank"),
        *("adapter beside a weight", "adapter inside a weight"),
    ],
)
def test_frozen_parameters_may_move_and_add_nothing(name: str) -> None:
    """The kernels of single parameters add up to the whole kernel."""
    given = problem(name, seed=3)
    module, x, end = given.module, given.x, given.end(0.5)
    whole = [tangent_kernel(module, x), secant_kernel(module, {}, end, x, x)]
    shares = []
    for chosen in module.parameters():
        for weight in module.parameters():
            weight.requires_grad_(weight is chosen)
        shares.append(torch.stack([tangent_kernel(module, x), secant_kernel(module, {}, end, x, x)]))
        agree(shares[-1][0], oracle.tangent(module, x, x), ROUNDING, whole[0].abs().max())
    agree(torch.stack(shares).sum(0), torch.stack(whole), 3 * ROUNDING)


@pytest.mark.parametrize("padding", [None, 0])
def test_tokens_that_never_occur_and_padding_train_nothing(padding: int | None) -> None:
    """Padding may stand elsewhere than in the batch on which owners were found."""
    table, head = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(4, 2)
    made = Formula(lambda x, table, head: head(torch.tanh(table(x)).mean(1)), table=table, head=head).double()
    with torch.no_grad():
        table.weight.copy_(normal(9, 4))
    ones, others = torch.tensor([[0, 3, 5], [1, 0, 0], [2, 2, 2]]), torch.tensor([[3, 0, 0], [0, 6, 3], [1, 2, 0]])
    for tokens in (ones, others):
        agree(tangent_kernel(made, tokens, ones), oracle.tangent(made, tokens, ones), ROUNDING)


@pytest.mark.parametrize(
    ("name", "x", "bias"), [("gains and shifts", 0.0, 0.0), ("relu", 1.0, -100.0)], ids=["black inputs", "dead units"]
)
def test_first_batches_with_zeros_hide_nothing(name: str, x: float, bias: float) -> None:
    """Owners of rows are found for the first inputs, which may be zero or leave units inactive, unlike later inputs."""
    given = problem(name)
    reader, own = reader_of(given.module)
    dark = own | {key: weight + bias for key, weight in own.items() if key == "0.bias"}
    first = reader.tangent(reader.record(dark, x * given.x))
    light = reader.tangent(reader.record(own, given.x))
    agree(gram(light, light), oracle.tangent(given.module, given.x, given.x), ROUNDING)
    if not bias:
        agree(gram(first, light), oracle.tangent(given.module, x * given.x, given.x), ROUNDING)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_modules_in_short_numbers_are_refused(kind: torch.dtype) -> None:
    module, x = nn.Linear(2, 1).to(kind), torch.ones(3, 2, dtype=kind)
    words = (r"'bias' is in b?float16, and kernels do not include its rounding", r"give module\.float")
    start = own_weights(module)
    for kernel in (
        lambda: tangent_kernel(module, x),
        lambda: tangent_kernel(module, x, sketch=8),
        lambda: secant_kernel(module, start, start, queries=x, train=x),
    ):
        with refused(*words):
            kernel()


# Most modules are recorded as they run. A module that writes in place or reads numbers runs again.


MODES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]] = {
    "plain": (torch.relu, torch.relu, 1),
    "written in place": (torch.relu_, torch.relu, 2),
    "a number read": (lambda z: z * float(z.shape[1]), lambda z: z * 4.0, 1),
    "a number of a tensor read": (lambda z: z * float(z.sum()), lambda z: z * z.sum().item(), 2),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_module_runs_again_only_where_it_has_to_and_its_tape_is_the_same(mode: str) -> None:
    runs: list[str] = []

    def recorded(between: Callable[[Tensor], Tensor], name: str) -> Tape:
        def forward(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            runs.append(name)
            return between(x @ w) @ v

        reader, weights = reader_of(Formula(forward, w=(3, 4), v=(4, 1)).double())
        weights = {key: normal(*weight.shape) for key, weight in weights.items()}
        return reader.record(weights, torch.ones(2, 3, dtype=torch.float64))

    given, twin, count = MODES[mode]
    found, expected = recorded(given, "given"), recorded(twin, "twin")
    assert runs.count("given") == count
    assert [entry.op for entry in found.entries] == [entry.op for entry in expected.entries]
    assert torch.equal(found.outputs, expected.outputs)
    assert any(entry.reads_number for entry in found.entries) == (mode == "a number of a tensor read")
