"""Sketches are linear maps of weight space whose mean is right, and error bars hold on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.kernel import sketch as chapter
from ntkexp.kernel.features.blocks import Factored, Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import reader, sketched
from ntkexp.kernel.read import sketched as sketched_reader
from ntkexp.kernel.secant.uses import View
from ntkexp.kernel.sketch import Sketch, error_bar, random_vectors, sketched_gram
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel.oracle import agree
from tests.kernel.problems import KINDS, Known, known, problem

EPS = torch.finfo(torch.float64).eps


def shapes(network: Known) -> dict[str, torch.Size]:
    """Those of the trained weights."""
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
@pytest.mark.parametrize("out", [True, False], ids=["multiplied out", "convolved"])
@pytest.mark.parametrize("name", KINDS)
def test_every_way_is_the_jacobian_times_one_matrix(name: str, out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From factors, from copies and from rows: ties between parameters may be of any kind."""
    network = known(name)
    monkeypatch.setattr(chapter, "operations", lambda *sizes: (0, 1) if out else (1, 0))
    sketch = Sketch(7, 3, shapes(network))
    jacobian = torch.cat(list(network.jacobians.values()), 2)[:5]
    expected = jacobian @ matrix(sketch)
    scale = jacobian.abs().sum(2).max()
    agree(sketch.of(network.reader.use_by_use(network.tape).blocks), expected, 100 * EPS, scale)
    agree(sketch.of(network.features.blocks), expected, 100 * EPS, scale)


def test_the_mean_over_sketches_is_the_kernel() -> None:
    """400 of them: what is left is a twentieth of the error of one, and a bias of a tenth of that would show."""
    network = known("two heads")
    parts, kernel = network.reader.use_by_use(network.tape).blocks, network.kernel[:, :, :5]
    found = []
    for seed in range(400):
        rows = Sketch(8, seed, shapes(network)).of(parts)
        found.append(sketched_gram(rows, rows) - kernel)
    errors = torch.stack(found)
    typical = errors.square().mean(0).sqrt()
    assert bool((errors.mean(0).abs() < 4 * typical / 20).all())  # 4 deviations, at 225 entries


@pytest.mark.parametrize("name", ["relu", "convolution", "encoder, norm before"])
def test_the_error_falls_like_the_root_of_the_size(name: str) -> None:
    network = known(name)
    parts, kernel = network.reader.use_by_use(network.tape).blocks, network.kernel[:, :, :5]

    def error(size: int) -> float:
        squares = []
        for seed in range(30):
            rows = Sketch(size, seed, shapes(network)).of(parts)
            squares.append((sketched_gram(rows, rows) - kernel).square().sum())
        return float(torch.stack(squares).mean().sqrt() / kernel.norm())

    few, many = error(16), error(1024)
    assert few < 2.0  # a sketch of a ⊗ β errs at most like √(8/k) of its norm, and sums of several by less
    assert 0.5 < few / many / 8 < 2.0  # √64, from 30 seeds each


@pytest.mark.slow
def test_the_bar_is_as_large_as_the_error_in_95_of_100_cases() -> None:
    """200 cases, of all networks and sizes; the worst there is, an error in one direction, among them."""
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
    """Whether the bar covers this error."""
    vectors = random_vectors(error.shape[2:], seed, error)
    return error_bar(torch.einsum("qcnd,vnd->vqc", error, vectors)) >= float(error.norm()) * (1 - 1e-12)


# The sketched kernel as users call it.


@pytest.mark.parametrize("name", ["two heads", "convolution", "tied embedding", "encoder, norm before"])
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


@pytest.mark.parametrize("kept", [0.0, 1e9], ids=["read again", "kept"])
@pytest.mark.parametrize("name", ["convolution", "tied embedding"])
def test_examples_a_few_at_a_time_change_only_rounding(name: str, kept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    network = known(name)
    usual = tangent_kernel(network.given.module, network.given.x, sketch=64)
    monkeypatch.setattr(sketched_reader, "READ_BYTES", 1.0)
    monkeypatch.setattr(sketched_reader, "MAX_JACOBIAN_BYTES", kept)
    found = tangent_kernel(network.given.module, network.given.x, sketch=64)
    agree(found.kernel, usual.kernel, 1000 * EPS)
    assert found.error_bar == pytest.approx(usual.error_bar, rel=1e-9)


def test_some_outputs_are_those_blocks() -> None:
    given = problem("two heads")
    whole = tangent_kernel(given.module, given.x, sketch=30).kernel
    some = tangent_kernel(given.module, given.x, sketch=30, outputs=[2, 0]).kernel
    agree(some, whole[:, [2, 0]][..., [2, 0]], 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them
def test_plain_jacobians_are_sketched_too() -> None:
    network = known("digamma")
    found, bar = tangent_kernel(network.given.module, network.given.x, sketch=2000)
    assert float((found - network.kernel[:, :, :5]).norm()) <= bar < 0.5 * float(network.kernel.norm())


def test_what_cannot_be_sketched_is_refused_in_one_line() -> None:
    given = problem("tanh")
    for size in (0, -3, True):
        with pytest.raises(Mistake, match=f"sketch={size!r}: give the number of dimensions"):
            tangent_kernel(given.module, given.x, sketch=size)
    with pytest.raises(Mistake, match="it is not sketched"):
        tangent_kernel(given.module, given.x, sketch=8, outputs="trace")


def test_more_outputs_than_the_machine_can_hold_are_refused_before_they_are_read() -> None:
    """As of a language model whose scores of every word are the outputs."""
    with pytest.raises(Mistake, match=r"of 3 × 3 examples with 400000 outputs each takes 5\.76e\+03 GB, and this"):
        tangent_kernel(torch.nn.Linear(1, 400_000), torch.ones(3, 1), sketch=8)


# It is said when a sketch takes more than the exact kernel, and only then.


def layers(count: int, positions: int) -> Jacobian:
    """Two examples of layers like those of a language model, whose numbers take no memory."""
    nothing = torch.zeros(())
    factors = nothing.expand(2, positions, 768), nothing.expand(2, 1, positions, 2304)
    views = [View(f"{k}", (768, 2304), (1, 768), 0) for k in range(count)]
    return Jacobian(tuple(Factored(*factors, view, None, None) for view in views), 2, 1)


def test_a_few_texts_are_cheaper_exactly() -> None:
    said = sketched.remark(layers(40, positions=64), 32, 0, size=1024)
    assert said is not None
    assert said.startswith("the exact kernel of these 32 examples takes less")


@pytest.mark.parametrize(
    ("count", "positions", "examples"),
    [(1, 64, 2000), (40, 64, 2000), (1, 64, 32)],
    ids=["many examples", "more than are held", "done in no time"],
)
def test_otherwise_nothing_is_said(count: int, positions: int, examples: int) -> None:
    assert sketched.remark(layers(count, positions), examples, 0, size=1024) is None


def test_layers_of_one_use_are_counted_by_their_factors() -> None:
    """⟨a, a′⟩⟨β, β′⟩ for half of all pairs, against outer products."""
    some = layers(1, positions=1)
    assert reader.kernel_operations(some, 100, 0) == 100 * 100 / 2 * (768 + 2304 + 1)
    assert reader.kernel_operations(some, 100, 50) == 100 * 50 * (768 + 2304 + 1)


def test_users_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("convolution")
    monkeypatch.setattr(sketched, "LONG_MULTIPLICATIONS", 1.0)
    with pytest.warns(UserWarning, match="leave sketch out"):
        tangent_kernel(given.module, given.x, sketch=20)
