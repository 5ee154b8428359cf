"""Cutting, noise and scales, on examples made up here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ntkexp.data.base import AbstractSource, Examples, noisy
from ntkexp.mistake import Mistake


class Numbered(AbstractSource):
    """Example k has the input k and, if there are classes, the label k mod classes."""

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


@given(st.integers(2, 40), st.integers(0, 40), st.none() | st.integers(0, 40), st.integers(0, 80), st.integers(0, 99))
def test_splits_are_disjoint_and_exhaustive_or_refused(
    train: int, probe: int, test: int | None, count: int, seed: int
) -> None:
    source = Numbered(train=train, probe=probe, test=test, count=count, seed=seed)
    if train + probe + (test or 0) > count:
        with pytest.raises(Mistake, match=rf"data\.train={train}.*data\.probe={probe}.*there are {count};"):
            source.split()
        return
    data = source.split()
    index = torch.cat([data.train.index, data.probe.index, data.test.index])
    assert len(set(index.tolist())) == len(index) == (count if test is None else train + probe + test)
    assert (len(data.train.index), len(data.probe.index)) == (train, probe)
    assert torch.equal(torch.cat([data.train.shown, data.probe.shown, data.test.shown])[:, 0], index.double())


def test_more_training_examples_contain_fewer() -> None:
    few, many = Numbered(train=5, probe=0).split(), Numbered(train=20, probe=0).split()
    assert torch.equal(few.train.index, many.train.index[:5])


def test_statistics_are_those_of_the_training_split_alone() -> None:
    plain = Numbered(train=20, probe=10)
    untouched = plain.split()
    outsider = int(untouched.test.index[0])
    changed = plain.model_copy(update={"outlier": (outsider, 1e6)}).split()
    assert torch.equal(untouched.train.inputs, changed.train.inputs)
    assert torch.equal(untouched.probe.inputs, changed.probe.inputs)
    shown = untouched.train.shown[:, 0]
    expected = (1e6 - shown.mean()) / shown.std(correction=0)
    # a handful of roundings in numbers near 1e5
    assert changed.test.inputs[0, 0].item() == pytest.approx(expected.item(), rel=1e-14)


def test_a_feature_that_does_not_vary_is_zero_although_its_deviation_rounds_to_something() -> None:
    data = Numbered(train=20, probe=10).split()
    assert (data.train.inputs[:, 1] == 0).all()
    assert (data.test.inputs[:, 1] == 0).all()


def test_regression_targets_are_scaled_by_the_training_split() -> None:
    data = Numbered(train=20, probe=10).split()
    raw = data.train.index.double()
    expected = (data.test.index.double() - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(data.test.target[:, 0], expected, rtol=0, atol=1e-14)  # numbers of order 1, a few roundings


@given(st.integers(2, 200), st.integers(2, 12), st.floats(0, 0.99), st.integers(0, 99))
def test_noise_replaces_exactly_the_share_by_other_classes(count: int, classes: int, share: float, seed: int) -> None:
    labels = torch.arange(count) % classes
    changed = noisy(labels, classes, share, torch.Generator().manual_seed(seed))
    assert (changed != labels).sum() == round(share * count)
    assert set(changed.tolist()) <= set(range(classes))


def test_every_other_class_is_as_likely() -> None:
    changed = noisy(torch.zeros(9000, dtype=torch.int64), 4, 0.999, torch.Generator().manual_seed(0))
    counts = changed.bincount(minlength=4)[1:]
    assert (counts - 2997).abs().max() < 4 * (9000 * 2 / 9) ** 0.5  # four standard deviations of a count


def test_noise_on_real_targets_has_the_deviation_asked_for() -> None:
    values = torch.linspace(-3, 3, 10000, dtype=torch.float64)[:, None]
    noise = noisy(values, 0, 0.5, torch.Generator().manual_seed(0)) - values
    # the deviation of 10,000 normal numbers is known to 1/√20000 = 0.7 %: four of these
    assert (noise.std() / (0.5 * values.std())).item() == pytest.approx(1, abs=0.03)


def at_example_7(value: float) -> torch.Tensor:
    """A column in which one number is another."""
    return torch.arange(50.0, dtype=torch.float64).index_fill(0, torch.tensor(7), value)[:, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["input", "target"])
def test_numbers_that_are_not_finite_are_refused(
    value: float, place: str, refusal: Callable[[AbstractSource], str]
) -> None:
    class Broken(AbstractSource):
        def examples(self, generator: torch.Generator) -> Examples:
            column = {"input": at_example_7(0.0), "target": at_example_7(0.0)} | {place: at_example_7(value)}
            return Examples(column["input"], column["target"])

    assert f"{place} of example 7" in refusal(Broken(train=20, probe=10))


@pytest.mark.parametrize("unit", [1e300, 1e-320])
def test_numbers_without_a_variance_are_refused(unit: float, refusal: Callable[[AbstractSource], str]) -> None:
    class Extreme(AbstractSource):
        def examples(self, generator: torch.Generator) -> Examples:
            return Examples(unit * at_example_7(0.0), torch.arange(50) % 2, ("a", "b"))

    assert "unit" in refusal(Extreme(train=20, probe=10))


def test_a_single_class_is_refused(refusal: Callable[[AbstractSource], str]) -> None:
    assert "data.train=20" in refusal(Numbered(train=20, probe=10, classes=1))


def test_noise_does_not_hide_that_there_is_one_class(refusal: Callable[[AbstractSource], str]) -> None:
    class Uniform(AbstractSource):
        def examples(self, generator: torch.Generator) -> Examples:
            return Examples(at_example_7(0.0), torch.zeros(50, dtype=torch.int64), ("a", "b"))

    assert "same target" in refusal(Uniform(train=20, probe=10, label_noise=0.5))


def test_targets_that_are_all_equal_are_refused(refusal: Callable[[AbstractSource], str]) -> None:
    assert "same target" in refusal(Numbered(train=20, probe=10, constant=True))


@pytest.mark.parametrize(
    "field", [{"train": 0}, {"probe": -1}, {"test": -1}, {"label_noise": 1.0}, {"seed": -1}, {"standardise": "some"}]
)
def test_fields_have_ranges(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        Numbered.model_validate(field)
