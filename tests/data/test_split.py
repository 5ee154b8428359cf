"""Cutting, noise and scales, on examples made up here."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import ValidationError
from torch.nn.functional import cosine_similarity
from torch.overrides import TorchFunctionMode

import ntkexp
from ntkexp.config.compose import compose
from ntkexp.data.base import AbstractSource, Data, Examples, add_label_noise
from ntkexp.data.synthetic import Sphere
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import draw_network
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.networks import MLP
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.run.setting import prepare
from ntkexp.stream import Purpose, stream
from tests.config.components import choices, configured, networks
from tests.data.conftest import READY, source_of


class Numbered(AbstractSource):
    """A source whose example k has the input k and, with classes, the label k mod classes."""

    count: int = 50
    classes: int = 0
    outlier: tuple[int, float] | None = None
    constant: bool = False

    def examples(self, generator: torch.Generator) -> Examples:
        number = torch.arange(self.count)
        inputs = torch.stack([number.double(), torch.full((self.count,), 0.1, dtype=torch.float64)], 1)
        if self.outlier is not None:
            inputs[self.outlier[0], 0] = self.outlier[1]
        if self.classes:
            return Examples(inputs, number % self.classes, tuple(str(k) for k in range(self.classes)))
        return Examples(inputs, (0 * number if self.constant else number).double()[:, None])


class Unnamed(Numbered):
    """A source with more labels than names of classes."""

    def examples(self, generator: torch.Generator) -> Examples:
        whole = super().examples(generator)
        return Examples(whole.inputs, whole.target, whole.classes[1:])


class Unseeded(Numbered):
    """A source that draws from torch's global generator."""

    def examples(self, generator: torch.Generator) -> Examples:
        whole = super().examples(generator)
        return Examples(whole.inputs + torch.randn(whole.inputs.shape).double(), whole.target, whole.classes)


UNFIT = {
    Unnamed: r"the target of example 2 \(counting from 0\) is 2, and there are 2 classes; give labels from 0 to 1",
    Unseeded: "data=unseeded: examples.. returns other examples when it is called again with the same seed",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_examples_of_a_source_are_refused(kind: type[Numbered]) -> None:
    with pytest.raises(Mistake, match=UNFIT[kind]):
        kind(train=10, query=5, test=5, count=50, classes=3).split()


@given(st.integers(2, 40), st.integers(0, 40), st.none() | st.integers(0, 40), st.integers(0, 80), st.integers(0, 99))
def test_splits_are_disjoint_and_exhaustive_or_refused(
    train: int, query: int, test: int | None, count: int, seed: int
) -> None:
    source = Numbered(train=train, query=query, test=test, count=count, seed=seed)
    if train + query + (test or 0) > count:
        with pytest.raises(Mistake, match=rf"data\.train={train}.*data\.query={query}.*there are {count};"):
            source.split()
        return
    data = source.split()
    index = torch.cat([data.train.index, data.query.index, data.test.index])
    assert len(set(index.tolist())) == len(index) == (count if test is None else train + query + test)
    assert (len(data.train.index), len(data.query.index)) == (train, query)
    assert torch.equal(torch.cat([data.train.shown, data.query.shown, data.test.shown])[:, 0], index.double())


def test_more_training_examples_contain_fewer() -> None:
    few, many = Numbered(train=5, query=0).split(), Numbered(train=20, query=0).split()
    assert torch.equal(few.train.index, many.train.index[:5])


def test_statistics_are_those_of_the_training_split_alone() -> None:
    plain = Numbered(train=20, query=10)
    untouched = plain.split()
    outsider = int(untouched.test.index[0])
    changed = plain.model_copy(update={"outlier": (outsider, 1e6)}).split()
    assert torch.equal(untouched.train.inputs, changed.train.inputs)
    assert torch.equal(untouched.query.inputs, changed.query.inputs)
    shown = untouched.train.shown[:, 0]
    expected = (1e6 - shown.mean()) / shown.std(correction=0)
    # a handful of roundings in numbers near 1e5
    assert changed.test.inputs[0, 0].item() == pytest.approx(expected.item(), rel=1e-14)


def test_a_feature_that_does_not_vary_is_zero_although_its_deviation_rounds_to_something() -> None:
    data = Numbered(train=20, query=10).split()
    assert (data.train.inputs[:, 1] == 0).all()
    assert (data.test.inputs[:, 1] == 0).all()


def test_regression_targets_are_scaled_by_the_training_split() -> None:
    data = Numbered(train=20, query=10).split()
    raw = data.train.index.double()
    expected = (data.test.index.double() - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(data.test.target[:, 0], expected, rtol=0, atol=1e-14)  # numbers of order 1, a few roundings


@given(st.integers(2, 200), st.integers(2, 12), st.floats(0, 0.99), st.integers(0, 99))
def test_noise_replaces_exactly_the_share_by_other_classes(count: int, classes: int, share: float, seed: int) -> None:
    labels = torch.arange(count) % classes
    changed = add_label_noise(labels, classes, share, torch.Generator().manual_seed(seed))
    assert (changed != labels).sum() == round(share * count)
    assert set(changed.tolist()) <= set(range(classes))


def test_every_other_class_is_as_likely() -> None:
    changed = add_label_noise(torch.zeros(9000, dtype=torch.int64), 4, 0.999, torch.Generator().manual_seed(0))
    counts = changed.bincount(minlength=4)[1:]
    assert (counts - 2997).abs().max() < 4 * (9000 * 2 / 9) ** 0.5  # four standard deviations of a count


def test_noise_on_real_targets_has_the_deviation_asked_for() -> None:
    values = torch.linspace(-3, 3, 10000, dtype=torch.float64)[:, None]
    noise = add_label_noise(values, 0, 0.5, torch.Generator().manual_seed(0)) - values
    # the deviation of 10,000 normal numbers is known to 1/√20000 = 0.7 %: four deviations
    assert (noise.std() / (0.5 * values.std())).item() == pytest.approx(1, abs=0.03)


def at_example_7(value: float) -> torch.Tensor:
    """Return the numbers from 0 to 49, with another number at example 7."""
    return torch.arange(50.0, dtype=torch.float64).index_fill(0, torch.tensor(7), value)[:, None]


class Given(AbstractSource):
    """Fifty examples with these columns, and labels if there are classes."""

    column: Any = None
    target: Any = None
    classes: tuple[str, ...] = ()

    def examples(self, generator: torch.Generator) -> Examples:
        return Examples(self.column, self.target, self.classes)


def given_columns(column: torch.Tensor, target: torch.Tensor, *classes: str, noise: float = 0.0) -> AbstractSource:
    return Given(train=20, query=10, column=column, target=target, classes=classes, label_noise=noise)


PLAIN = at_example_7(0.0)
ZEROS = torch.zeros(50, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], AbstractSource], str]] = {
    **{
        f"{value} among inputs": (partial(given_columns, at_example_7(value), PLAIN), "input of example 7")
        for value in (float("nan"), float("inf"), -float("inf"))
    },
    **{
        f"{value} among targets": (partial(given_columns, PLAIN, at_example_7(value)), "target of example 7")
        for value in (float("nan"), float("inf"), -float("inf"))
    },
    **{
        f"a unit of {unit}": (partial(given_columns, unit * PLAIN, torch.arange(50) % 2, "a", "b"), "unit")
        for unit in (1e300, 1e-320)
    },
    "a single class": (lambda: Numbered(train=20, query=10, classes=1), "data.train=20"),
    "one class under noise": (lambda: given_columns(PLAIN, ZEROS, "a", "b", noise=0.5), "same target"),
    "equal targets": (lambda: Numbered(train=20, query=10, constant=True), "same target"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_examples_that_nothing_can_be_learned_from_are_refused(
    kind: str, refusal: Callable[[AbstractSource], str]
) -> None:
    make, words = REFUSED[kind]
    assert words in refusal(make())


@pytest.mark.parametrize(
    "field", [{"train": 0}, {"query": -1}, {"test": -1}, {"label_noise": 1.0}, {"seed": -1}, {"standardise": "some"}]
)
def test_fields_have_ranges(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        Numbered.model_validate(field)


# Every random number comes from `stream`, and no two purposes share a number.


PACKAGE = Path(ntkexp.__file__).parent
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
FROM_LIBRARIES = {"huggingface", "timm"}  # drawn by torch's own generator, which `adapted` starts at the same place


class Overheard(TorchFunctionMode):
    """The starts of the generators that draw tensors."""

    def __init__(self) -> None:
        self.starts: set[int] = set()
        super().__init__()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None:
            self.starts.add(generator.initial_seed())
        elif torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, func.__name__, None), "tags", ()):
            self.starts.add(torch.initial_seed())
        return func(*args, **(kwargs or {}))


def overheard(draw: Callable[[], object]) -> frozenset[int]:
    with Overheard() as found:
        draw()
    return frozenset(found.starts)


@cache
def of_data(name: str) -> frozenset[int]:
    """Return the starts for a source's examples, their order and their noise, at seed 0."""
    source: AbstractSource = source_of(name, train=8, query=4, test=4, label_noise=0.5)
    return overheard(lambda: source.split(0))


def epochs(optimizer: AbstractOptimizer) -> None:
    """The batches of two epochs."""
    for step in range(8):
        optimizer.batch_indices(step, 8, 0)


@cache
def of_batches() -> frozenset[int]:
    """Return the starts for every optimizer's first epochs, at seed 0."""
    found: frozenset[int] = frozenset()
    for name, replacement in product(choices("optimizer"), (False, True)):
        optimizer = configured("optimizer", name)
        assert isinstance(optimizer, AbstractOptimizer)
        if "batch" in type(optimizer).model_fields:
            found |= overheard(partial(epochs, optimizer.model_copy(update={"batch": 2, "replacement": replacement})))
    return found


@cache
def usual() -> tuple[Experiment, Data]:
    """The default experiment, on few data."""
    experiment = compose(["data.train=8", "data.query=2", "data.test=2"])
    return experiment, experiment.data.split()


@pytest.mark.parametrize("name", sorted(set(networks()) - FROM_LIBRARIES))
def test_no_network_draws_what_data_or_batches_draw(name: str) -> None:
    model = configured("model", name, width=8)
    assert isinstance(model, AbstractArchitecture)
    experiment, data = usual()
    weights = overheard(lambda: draw_network(experiment.model_copy(update={"model": model}), data, 1))
    assert weights
    others = [of_batches(), *map(of_data, READY)]
    assert [found for found in others if found & weights] == []
    assert all(others)


def test_batches_are_drawn_apart_from_data() -> None:
    assert len(of_batches()) > 3
    assert [name for name in READY if of_data(name) & of_batches()] == []


def test_examples_their_order_and_their_noise_are_drawn_apart() -> None:
    assert len(of_data("sphere")) == 3


def test_no_two_streams_share_a_number() -> None:
    streams = [stream(purpose, seed) for purpose in PURPOSES for seed in (0, 1, 2, 3, 2**32, 2**40 - 1)]
    streams += [stream("batches", 0, epoch) for epoch in range(20)]
    drawn = torch.stack([torch.randn(200, generator=each, dtype=torch.float64) for each in streams])
    assert len(set(drawn.flatten().tolist())) == drawn.numel()
    correlation = drawn.corrcoef().fill_diagonal_(0)
    # 2,000 correlations of deviation 1/√200: the largest of 2,000 normal numbers is about 3.5 deviations
    assert correlation.abs().max() < 5 * 200**-0.5


def test_a_thousand_seeds_are_a_thousand_streams() -> None:
    starts = Counter(stream(purpose, seed).initial_seed() for purpose in PURPOSES for seed in range(1000))
    assert max(starts.values()) == 1


def test_what_is_to_be_learned_has_nothing_to_do_with_the_first_unit() -> None:
    cosines = []
    for seed in range(40):
        data = Sphere(train=20, query=0, test=0, degree=1, standardise="none").split(seed).train
        direction = torch.linalg.lstsq(data.inputs, data.target - data.target.mean()).solution[:, 0]
        student = MLP(width=8).module(NTK(W_std=1, b_std=0), (10,), 1, stream("weights", seed))
        cosines.append(cosine_similarity(direction, next(student.parameters())[0], dim=0))
    # a cosine in ten dimensions has a deviation of 1/√10, the mean of 40 one of 0.05
    assert torch.stack(cosines).mean().abs() < 4 * 400**-0.5


def test_data_follow_the_seed_unless_they_have_their_own() -> None:
    small = ("data=moons", "data.train=8", "data.query=2", "data.test=2", "model.width=8")
    own = ("seed=1", "data.seed=0")
    first, followed, apart = (prepare(compose([*small, *words])) for words in (("seed=0",), ("seed=1",), own))
    assert torch.equal(first.problem.data.train.inputs, apart.problem.data.train.inputs)
    assert not torch.equal(first.problem.data.train.inputs, followed.problem.data.train.inputs)
    assert all(
        torch.equal(followed.problem.weights[name], apart.problem.weights[name]) for name in first.problem.weights
    )


DOORS = ("manual_seed", "default_rng", "RandomState", "seed_all", "SystemRandom")
"""Names that give access to random numbers."""


def doors(code: str) -> set[str]:
    """Return the names that give access to random numbers in the code, and not in its texts."""
    if not any(door in code for door in DOORS):
        return set()
    nodes = ast.walk(ast.parse(code))
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes} & set(DOORS)


def test_chance_has_one_door() -> None:
    found = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if doors(file.read_text("utf-8"))}
    # simulated tables and resampled rows decide no result of a run
    assert found == {"stream.py", "claim/simulation.py", "report/validation.py"}


def test_every_purpose_is_asked_for_in_one_file() -> None:
    """Trials of claims are experiments of their own: each draws its networks as a run draws its own."""
    trials = PACKAGE / "claim" / "papers"
    asked = Counter(
        purpose
        for file in PACKAGE.rglob("*.py")
        if file.name != "stream.py" and trials not in file.parents
        for purpose in set(re.findall(r'\bstream\(\s*"([\w ]+)"', file.read_text("utf-8")))
    )
    own = Counter({"cue": 1, "permuted labels": 1, "pixels": 1, "splits": 1})  # that trials alone ask for
    assert asked + own == Counter(PURPOSES)
