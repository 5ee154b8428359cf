"""Laws of every source that needs no path. The YAML files are globbed, so that a new one is tested too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from ntkexp.data.base import AbstractSource, Data
from ntkexp.data.images import Digits
from ntkexp.data.sequence import ModularAddition, Text
from ntkexp.data.synthetic import Circle, Cued, Moons, Parity, Sphere, Teacher, distinct_corners, hermite

EPS = torch.finfo(torch.float64).eps


def same(one: Data, other: Data) -> bool:
    """Return whether two draws agree in every bit."""
    parts = ("shown", "inputs", "target", "index")
    return all(
        torch.equal(getattr(getattr(one, split), part), getattr(getattr(other, split), part))
        for split in ("train", "query", "test")
        for part in parts
    )


def test_the_yaml_states_every_default(name: str, configured: Callable[..., AbstractSource]) -> None:
    source = configured(name)
    assert source == type(source)()
    assert source.fields().keys() == {"_target_", *type(source).model_fields}


def test_the_number_of_threads_changes_no_bit() -> None:
    """There are enough pixels for torch to sum them in several threads."""
    source, before, drawn, after = Digits(classes="all", train=1297, query=0, test=500), torch.get_num_threads(), [], []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn.append(source.split())
            after.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert after == [1, 2]
    assert same(*drawn)


def test_splits_have_the_sizes_and_types_asked_for(source: AbstractSource) -> None:
    data = source.split()
    for split, size in ((data.train, 40), (data.query, 20), (data.test, 30)):
        assert len(split.shown) == len(split.inputs) == len(split.target) == len(split.index) == size
        assert split.shown.shape == split.inputs.shape
        assert split.inputs.dtype == split.shown.dtype == torch.float64
        assert split.target.dtype == (torch.int64 if data.classes else torch.float64)
        assert split.target.ndim == (1 if data.classes else 2)
        assert all(tensor.isfinite().all() for tensor in (split.shown, split.inputs, split.target))


def test_splits_share_no_example(source: AbstractSource) -> None:
    data = source.split()
    index = torch.cat([data.train.index, data.query.index, data.test.index])
    assert len(set(index.tolist())) == len(index)
    shown = torch.cat([data.train.shown, data.query.shown, data.test.shown]).flatten(1)
    assert len(torch.unique(shown, dim=0)) == len(shown)


def test_a_seed_gives_the_same_bits_whatever_the_global_generators_do(source: AbstractSource) -> None:
    torch.manual_seed(1)
    first = source.split()
    torch.manual_seed(2)
    np.random.seed(3)  # noqa: NPY002  this test is about the global state
    assert same(first, source.split())


def test_global_generators_are_left_alone(source: AbstractSource) -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002  as above
    source.split()
    assert torch.equal(before, torch.get_rng_state())
    after_numpy = np.random.get_state(legacy=False)  # noqa: NPY002  as above
    np.testing.assert_equal(after_numpy, before_numpy)


def test_another_seed_is_another_draw(source: AbstractSource) -> None:
    assert not same(source.split(), source.model_copy(update={"seed": 1}).split())


def test_every_training_class_is_a_class(source: AbstractSource) -> None:
    data = source.split()
    if data.classes:
        assert set(data.train.target.tolist()) <= set(range(len(data.classes)))
        assert len(data.classes) >= 2
    else:
        # rounding of a mean over 40 numbers of size about 1
        assert data.train.target.mean(0).abs().max() < 100 * EPS
        assert (data.train.target.std(0, correction=0) - 1).abs().max() < 100 * EPS


def test_each_and_all_standardise_the_training_split(source: AbstractSource) -> None:
    each = source.model_copy(update={"standardise": "each"}).split().train
    varying = (each.shown != each.shown[:1]).any(0)
    # centring loses digits where a feature's mean is large against its deviation: up to 1e4 times in these sets
    assert each.inputs.mean(0).abs().max() < 1e5 * EPS
    assert (each.inputs.std(0, correction=0)[varying] - 1).abs().max() < 1e5 * EPS
    assert (each.inputs[:, ~varying] == 0).all()
    together = source.model_copy(update={"standardise": "all"}).split().train.inputs
    assert together.mean().abs() < 1e3 * EPS
    assert abs(together.std(correction=0) - 1) < 1e3 * EPS


def test_none_leaves_the_inputs_as_they_are_shown(source: AbstractSource) -> None:
    test = source.model_copy(update={"standardise": "none"}).split().test
    assert torch.equal(test.inputs, test.shown)


def test_label_noise_touches_training_targets_only(source: AbstractSource) -> None:
    clean, noisy = source.split(), source.model_copy(update={"label_noise": 0.25}).split()
    assert torch.equal(clean.train.inputs, noisy.train.inputs)
    if clean.classes:
        assert (clean.train.target != noisy.train.target).sum() == 10
        assert torch.equal(clean.test.target, noisy.test.target)
        assert torch.equal(clean.query.target, noisy.query.target)
    else:
        # an affine change of scale is all that the noise does to targets elsewhere
        both = torch.cat([clean.test.target, noisy.test.target], 1)
        assert torch.corrcoef(both.t())[0, 1] > 1 - 1e3 * EPS
        assert not torch.allclose(clean.train.target, noisy.train.target)


# Sources that are made: against their formulas, written here a second time.


def draw(source: AbstractSource) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets before the split."""
    examples = source.examples(torch.Generator().manual_seed(0))
    return examples.inputs, examples.target


def test_the_circle_carries_its_waves() -> None:
    inputs, target = draw(Circle(frequencies=(2, 5)))
    angle = torch.atan2(inputs[:, 1], inputs[:, 0])
    waves = sum((k * angle).cos() + (k * angle).sin() for k in (2, 5))
    assert torch.allclose(target[:, 0], torch.as_tensor(waves), rtol=0, atol=100 * EPS)


def test_angles_are_uniform() -> None:
    inputs, _ = draw(Circle(train=4000))
    assert inputs.mean(0).abs().max() < 4 * (2 * len(inputs)) ** -0.5  # four deviations of the mean of cos a


def test_the_sphere_has_radius_one_and_no_preferred_direction() -> None:
    inputs, _ = draw(Sphere(train=4000, dimension=5))
    assert (inputs.norm(dim=1) - 1).abs().max() < 10 * EPS
    covariance = inputs.t() @ inputs / len(inputs)
    # an entry of x xᵀ has a deviation of at most √(2/d²) = 0.28; four of these over √n
    assert (covariance - torch.eye(5) / 5).abs().max() < 4 * 0.28 * len(inputs) ** -0.5


def test_hermite_polynomials_are_orthonormal() -> None:
    z, weight = torch.linspace(-10, 10, 4001, dtype=torch.float64), 20 / 4000
    density = weight * (-(z**2) / 2).exp() / (2 * torch.pi) ** 0.5
    values = torch.stack(hermite(z, 4))
    # the trapezium rule converges faster than any power here; the tail beyond 10 is below 1e-14
    assert torch.allclose((values * density) @ values.t(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_degree_one_is_linear() -> None:
    inputs, target = draw(Sphere(degree=1))
    solution = torch.linalg.lstsq(inputs, target).solution
    assert torch.allclose(inputs @ solution, target, rtol=0, atol=1e4 * EPS)  # the condition number is far below 100
    assert solution.norm().item() == pytest.approx(10**0.5, rel=1e-12)


@pytest.mark.parametrize("source", [Teacher, Sphere])
def test_more_examples_are_of_the_same_function(source: type[Teacher | Sphere]) -> None:
    few, many = draw(source(train=50, query=0, test=0)), draw(source(train=60, query=0, test=0))
    shared = [k for k in range(50) if torch.equal(few[0][k], many[0][k])]
    # blocks of sixteen normal numbers are equal, except for the last
    assert len(shared) > 10
    assert torch.allclose(few[1][shared], many[1][shared], rtol=0, atol=100 * EPS)


def test_the_teacher_is_a_sum_over_its_units() -> None:
    inputs, target = draw(Teacher(dimension=3, hidden=4, train=5, query=0, test=0))
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    second = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    for x, y in zip(inputs, target, strict=True):
        units = [second[j, 0] * torch.tanh(sum(x[i] * first[i, j] for i in range(3)) / 3**0.5) for j in range(4)]
        assert abs(sum(units) / 2 - y[0]) < 10 * EPS


def test_moons_without_noise_lie_on_two_half_circles() -> None:
    inputs, labels = draw(Moons(noise=0))
    centre = torch.tensor([[0.0, 0.0], [1.0, 0.5]], dtype=torch.float64)[labels]
    assert ((inputs - centre).norm(dim=1) - 1).abs().max() < 10 * EPS
    side = torch.tensor([1.0, -1.0], dtype=torch.float64)[labels]
    assert (side * (inputs - centre)[:, 1] > -10 * EPS).all()
    assert labels.bincount().tolist() == [256, 256]


@pytest.mark.parametrize("inputs", ["signs", "gaussian"])
def test_parity_is_the_sign_of_the_product(inputs: str) -> None:
    points, labels = draw(Parity(order=3, inputs=inputs))
    assert torch.equal(points[:, 0] * points[:, 1] * points[:, 2] > 0, labels == 1)


def test_all_corners_of_a_cube_can_be_asked_for() -> None:
    found = distinct_corners(16, 4, torch.Generator().manual_seed(0))
    assert {tuple(corner) for corner in found.tolist()} == set(product((-1.0, 1.0), repeat=4))


def test_corners_are_drawn_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = sum(distinct_corners(3, 2, generator).sum(0) for _ in range(600))
    # leaving out one of four corners moves each sum by ±1: four deviations of a sum of 600
    assert torch.as_tensor(counts).abs().max() < 4 * 600**0.5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Parity(dimension=3), "data.dimension=3"),
        (Parity(order=11), "data.order=11 coordinates are multiplied, but data.dimension=10"),
        (
            ModularAddition(modulus=5, train=20, query=6),
            "data.modulus=5 makes 25 sums, and data.train, data.query and data.test ask for 26; lower one of them, or "
            "raise data.modulus",
        ),
    ],
)
def test_more_than_there_is_is_refused(
    source: AbstractSource, words: str, refusal: Callable[[AbstractSource], str]
) -> None:
    assert words in refusal(source)


def test_cued_tasks_are_two_orthogonal_directions_at_the_same_points() -> None:
    parts = [draw(Cued(task=task, dimension=4, cue=3.0)) for task in (1, 2)]
    points = parts[0][0][:, :4]
    found = [torch.linalg.lstsq(points, target).solution[:, 0] for _, target in parts]
    assert torch.allclose(
        torch.stack(found) @ torch.stack(found).t(), torch.eye(2).double(), atol=1e-12
    )  # 512 equations
    for number, (inputs, target) in enumerate(parts):
        assert torch.equal(inputs[:, :4], points)
        assert torch.allclose(points @ found[number], target[:, 0], rtol=0, atol=1e-12)
        assert torch.equal(inputs[:, 4:], 3.0 * torch.eye(2)[number].double().expand(len(inputs), 2))


# Sentences of tokens: sums against their definition, text against the file it comes from.


FEW = ("data.train=4", "data.query=2", "data.test=2", "steps=3", "ladder.machine=[secant]")
LINE = b"the quick brown fox jumps over the lazy dog\n"


def shown(data: Data) -> list[tuple[list[int], int]]:
    """Tokens and label of every example, split by split."""
    splits = (data.train, data.query, data.test)
    return [
        (tokens, label)
        for split in splits
        for tokens, label in zip(split.inputs.long().tolist(), split.target.tolist(), strict=True)
    ]


@pytest.mark.parametrize("equals", [False, True])
def test_every_sum_is_there_once(equals: bool) -> None:
    data = ModularAddition(modulus=7, train=20, query=10, equals=equals).split()
    sign = [7] if equals else []
    expected = [([a, b, *sign], (a + b) % 7) for a, b in product(range(7), repeat=2)]
    assert sorted(shown(data)) == expected
    assert data.vocabulary == 7 + equals
    assert data.classes == tuple("0123456")


def test_one_hot_vectors_are_the_tokens() -> None:
    tokens, vectors = (
        ModularAddition(modulus=5, train=20, query=5, encoding=encoding).split() for encoding in ("tokens", "one_hot")
    )
    assert (tokens.vocabulary, vectors.vocabulary) == (5, 0)
    assert vectors.train.inputs.shape == (20, 2, 5)
    assert torch.equal(vectors.train.inputs.argmax(2).double(), tokens.train.inputs)
    assert torch.equal(vectors.train.inputs.sum(2), torch.ones(20, 2, dtype=torch.float64))


def test_a_text_is_cut_into_windows_and_their_next_bytes(tmp_path: Path) -> None:
    """Every window begins in the file at a multiple of its length; bytes that do not occur are no tokens."""
    file = tmp_path / "a.txt"
    file.write_bytes(LINE * 3)
    data = Text(path=file, context=6, train=8, query=4, test=None).split()
    letters = bytes(sorted(set(LINE)))
    found = {bytes(letters[token] for token in [*tokens, label]) for tokens, label in shown(data)}
    assert found == {(LINE * 3)[at : at + 7] for at in range(0, 3 * len(LINE) - 6, 7)}
    assert data.vocabulary == len(data.classes) == len(letters)
    assert data.classes[:3] == ("0x0a", "0x20", "a")


@pytest.mark.parametrize(
    ("content", "train", "words"),
    [
        *(
            (content, 8, f"holds {len(content)} bytes, and in them {len(content) // 7} different windows")
            for content in (b"", b"a", LINE)
        ),
        (LINE, 8, "ask for 16"),
        (b"aaaaaab" * 9 + b"baaaaab" * 9, 2, "every training example has the same target"),
    ],
)
def test_a_text_with_too_little_is_refused(
    content: bytes, train: int, words: str, tmp_path: Path, refusal: Callable[[AbstractSource], str]
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    queries = 4 if train == 8 else 0
    assert words in refusal(Text(path=file, context=6, train=train, query=queries, test=queries))


def test_a_text_that_is_not_there_is_refused(tmp_path: Path, refusal: Callable[[AbstractSource], str]) -> None:
    (tmp_path / "book.txt").write_bytes(LINE)
    assert "did you mean 'book.txt'?" in refusal(Text(path=tmp_path / "bok.txt"))
    assert "is a folder" in refusal(Text(path=tmp_path))
