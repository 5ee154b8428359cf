"""Sketches are linear maps of weight space whose mean is right, and error bars hold on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import reader, sketched
from ntkexp.kernel.read.sketched import sketched_kernel
from ntkexp.kernel.secant.uses import View
from ntkexp.kernel.sketch import Sketch, error_bar, operations, random_vectors, sketched_gram
from ntkexp.library import tangent_kernel
from tests.kernel import oracle
from tests.kernel.oracle import EPS, agree, refused
from tests.kernel.problems import KINDS, Known, known, problem
from tests.kernel.test_gram import Alone, Few, factored, jacobian


def shapes(network: Known) -> dict[str, torch.Size]:
    """The shapes of the trained weights."""
    return {name: p.shape for name, p in network.given.module.named_parameters() if p.requires_grad}


def matrix(sketch: Sketch) -> Tensor:
    """S, a row for every weight."""
    sizes = [shape.numel() for shape in sketch.shapes.values()]
    each = torch.split(torch.eye(sum(sizes), dtype=torch.float64), sizes, dim=1)
    rows = []
    for parts in zip(*each, strict=True):
        blocks = [Rows(part.view(1, 1, -1), name) for name, part in zip(sketch.shapes, parts, strict=True)]
        rows.append(sketch.of(blocks)[0, 0])
    return torch.stack(rows)


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", KINDS)
def test_every_block_is_the_jacobian_times_one_matrix(name: str) -> None:
    """Factors, copies and rows: ties between parameters may be of any kind."""
    network = known(name)
    sketch = Sketch(7, 3, shapes(network))
    rows = torch.cat(list(network.jacobians.values()), 2)[:5]
    expected, scale = rows @ matrix(sketch), rows.abs().sum(2).max()
    agree(sketch.of(network.reader.use_by_use(network.tape).blocks), expected, 100 * EPS, scale)
    agree(sketch.of(network.features.blocks), expected, 100 * EPS, scale)


def test_outer_products_are_convolved_or_multiplied_out() -> None:
    """These sizes lead to both algorithms, with and without a bias, and with transposed views."""
    ways = set()
    for uses, width, size in ((1, 30, 8), (2, 40, 64), (50, 3, 64)):
        block = factored(4, uses, width, width + 1, 2, seed=uses)
        together, apart = operations(block.inputs, block.outputs, size)
        ways.add(together <= apart)
        for shape, strides in (((width, width + 1), (width + 1, 1)), ((width + 1, width), (1, width))):
            weight, bias = View("v", (width, width + 1), strides, 0), View("b", (width + 1,), (1,), 0)
            sketch = Sketch(size, 3, {"v": torch.Size(shape), "b": torch.Size((width + 1,))})
            given = Factored(block.inputs, block.outputs, weight, bias, 0.5)
            found = oracle.by_name(given)
            rows = torch.cat([found["v"], found["b"]], 2)
            agree(sketch.of([given]), rows @ matrix(sketch), 100 * EPS, rows.abs().sum(2).max())
    assert ways == {True, False}


def test_the_mean_over_sketches_is_the_kernel() -> None:
    """The mean of 400 sketches has a twentieth of the error of one. A bias of a tenth of that would show."""
    network = known("two heads")
    parts, kernel = network.reader.use_by_use(network.tape).blocks, network.kernel[:, :, :5]
    rows = [Sketch(8, seed, shapes(network)).of(parts) for seed in range(400)]
    errors = torch.stack([sketched_gram(each, each) - kernel for each in rows])
    typical = errors.square().mean(0).sqrt()
    assert bool((errors.mean(0).abs() < 4 * typical / 20).all())  # 4 deviations, at 225 entries


@pytest.mark.parametrize("name", ["relu", "convolution", "encoder, norm before"])
def test_the_error_falls_like_the_root_of_the_size(name: str) -> None:
    network = known(name)
    parts, kernel = network.reader.use_by_use(network.tape).blocks, network.kernel[:, :, :5]

    def error(size: int) -> float:
        rows = [Sketch(size, seed, shapes(network)).of(parts) for seed in range(30)]
        squares = [(sketched_gram(each, each) - kernel).square().sum() for each in rows]
        return float(torch.stack(squares).mean().sqrt() / kernel.norm())

    few, many = error(16), error(1024)
    assert few < 2.0  # a sketch of a ⊗ β errs at most like √(8/k) of its norm, and sums of several by less
    assert 0.5 < few / many / 8 < 2.0  # √64, from 30 seeds each


@pytest.mark.slow
def test_the_bar_is_as_large_as_the_error_in_95_of_100_cases() -> None:
    """200 cases, from all networks and sizes, and the worst one, an error in a single direction."""
    covered = 0
    for case in range(150):
        network = known(KINDS[case % len(KINDS)])
        if network.kernel.norm() == 0:
            continue
        parts, kernel = network.reader.use_by_use(network.tape).blocks, network.kernel[:, :, :5]
        rows = Sketch(4 ** (1 + case % 4), case, shapes(network)).of(parts)
        covered += holds(sketched_gram(rows, rows) - kernel, case)
    for case in range(50):
        one = torch.randn(5, 2, 1, generator=torch.Generator().manual_seed(case), dtype=torch.float64)
        covered += holds(torch.einsum("qck,ndk->qcnd", one, one), case)
    assert covered >= 190


def holds(error: Tensor, seed: int) -> bool:
    """Return whether the bar covers this error."""
    vectors = random_vectors(error.shape[2:], seed, error)
    return error_bar(torch.einsum("qcnd,vnd->vqc", error, vectors)) >= float(error.norm()) * (1 - 1e-12)


# The sketched kernel as users call it.


@pytest.mark.filterwarnings("ignore:.*example by example")  # test_rules.py expects them
@pytest.mark.parametrize("name", ["two heads", "convolution", "tied embedding", "encoder, norm before", "entropy"])
def test_the_kernel_lies_within_its_bar(name: str) -> None:
    network = known(name)
    found, bar = tangent_kernel(network.given.module, network.given.x, network.other, sketch=2000)
    error = float((found - network.kernel[:, :, 5:]).norm())
    assert error <= bar < 0.5 * float(network.kernel.norm())


def test_it_repeats_bit_by_bit_and_another_seed_is_another_sketch() -> None:
    given = problem("tanh")
    one, two, other = (tangent_kernel(given.module, given.x, sketch=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.kernel, two.kernel)
    assert one.error_bar == two.error_bar
    assert not torch.equal(one.kernel, other.kernel)


@pytest.mark.parametrize("kind", [Few, Alone])
@pytest.mark.parametrize("name", ["convolution", "tied embedding", "relu"])
def test_examples_in_turns_change_only_rounding(name: str, kind: type[Few]) -> None:
    network = known(name)
    usual = tangent_kernel(network.given.module, network.given.x, network.other, sketch=64)
    own, outputs = dict(network.given.start), range(network.tape.outputs.shape[1])
    one, other = (kind(network.reader, own, x, outputs) for x in (network.given.x, network.other))
    found = sketched_kernel(one, other, own, 64, 0)
    agree(found.kernel, usual.kernel, 1000 * EPS)
    assert found.error_bar == pytest.approx(usual.error_bar, rel=1e-9)


def test_some_outputs_are_those_blocks() -> None:
    given = problem("two heads")
    whole = tangent_kernel(given.module, given.x, sketch=30).kernel
    some = tangent_kernel(given.module, given.x, sketch=30, outputs=[2, 0]).kernel
    agree(some, whole[:, [2, 0]][..., [2, 0]], 100 * EPS)


def test_calls_that_cannot_be_sketched_are_refused() -> None:
    given = problem("tanh")
    for size in (0, -3, True):
        with refused(f"sketch={size!r}: give the number of dimensions"):
            tangent_kernel(given.module, given.x, sketch=size)
    with refused("it cannot be sketched"):
        tangent_kernel(given.module, given.x, sketch=8, outputs="trace")
    # 400,000 outputs, as of a language model whose scores of every word are read
    with refused(r"of 3 × 3 examples with 400000 outputs each takes 5\.76e\+03 GB, and this"):
        tangent_kernel(torch.nn.Linear(1, 400_000), torch.ones(3, 1), sketch=8)


# A remark tells when a sketch takes more than the exact kernel, and only then.


def layers(count: int, positions: int) -> Jacobian:
    """Return two examples of layers like a language model's, whose numbers take no memory."""
    nothing = torch.zeros(())
    factors = nothing.expand(2, positions, 768), nothing.expand(2, 1, positions, 2304)
    views = [View(f"{k}", (768, 2304), (1, 768), 0) for k in range(count)]
    return jacobian(*(Factored(*factors, view, None, None) for view in views))


def with_rows(count: int) -> Jacobian:
    """Add a parameter of 9.5 million elements whose gradients are rows."""
    return jacobian(*layers(count, 64).blocks, Rows(torch.zeros(()).expand(2, 1, 9_500_000), "rows"))


@pytest.mark.parametrize(
    ("some", "examples", "remarked"),
    [
        (layers(40, 64), 32, True),
        (layers(1, 64), 2000, False),
        (layers(40, 64), 100, False),  # 3.1 GB of factors
        (layers(1, 64), 32, False),
        (layers(11, 64), 32, False),  # 0.94e11 multiplications
        (with_rows(11), 32, True),  # and 8 + 16 for each number of a row, 1.01e11 together
    ],
    ids=["a few texts", "many examples", "more than are held", "done in no time", "done soon", "rows of a table too"],
)
def test_a_few_texts_are_cheaper_exactly(some: Jacobian, examples: int, remarked: bool) -> None:
    remark = sketched.remark(some, examples, 0, size=1024)
    assert (remark is not None) == remarked
    assert remark is None or remark.startswith("the exact kernel of these 32 examples takes fewer")


def test_layers_of_one_use_are_counted_by_their_factors() -> None:
    """⟨a, a′⟩⟨β, β′⟩ for half of all pairs, against outer products."""
    some = layers(1, positions=1)
    assert reader.kernel_operations(some, 100, 0) == 100 * 100 / 2 * (768 + 2304 + 1)
    assert reader.kernel_operations(some, 100, 50) == 100 * 50 * (768 + 2304 + 1)


def test_a_long_sketch_of_few_examples_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more multiplications than the limit, and the exact kernel fewer."""
    monkeypatch.setattr(sketched, "LONG_MULTIPLICATIONS", 1e5)
    layers = torch.nn.Linear(30, 30), torch.nn.Tanh(), torch.nn.AdaptiveAvgPool2d((1, None)), torch.nn.Flatten()
    with pytest.warns(UserWarning, match="leave sketch out"):
        tangent_kernel(torch.nn.Sequential(*layers), torch.randn(16, 20, 30), sketch=64, outputs=[0])
