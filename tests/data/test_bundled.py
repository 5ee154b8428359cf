"""The data sets that come with the package are those that others load under their names, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine

from ntkexp.data.breast_cancer import BreastCancer
from ntkexp.data.bundled import read_bundled
from ntkexp.data.digits import Digits
from ntkexp.data.wine import Wine


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("breast_cancer", load_breast_cancer),
        ("diabetes", partial(load_diabetes, scaled=False)),
        ("digits", load_digits),
        ("wine", load_wine),
    ],
)
def test_the_numbers_are_those_of_scikit_learn(name: str, load: Callable[..., Any]) -> None:
    inputs, target = read_bundled(name)
    their_inputs, their_target = load(return_X_y=True)
    assert np.array_equal(inputs.numpy(), their_inputs)
    assert np.array_equal(target.numpy(), their_target)


@pytest.mark.parametrize(
    ("source", "load"),
    [(BreastCancer(), load_breast_cancer), (Wine(), load_wine), (Digits(classes="all"), load_digits)],
)
def test_classes_have_their_names(source: BreastCancer | Wine | Digits, load: Callable[..., Any]) -> None:
    assert source.split().classes == tuple(str(name) for name in load().target_names)
