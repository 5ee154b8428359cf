"""The data sets that come with the package are those that others load under their names, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ntkexp.data.images import Digits
from ntkexp.data.table import BreastCancer, Wine, read_bundled


def load(name: str, **options: Any) -> Any:
    """What scikit-learn loads."""
    from sklearn import datasets  # noqa: PLC0415  slow to import where tests are only collected

    return getattr(datasets, f"load_{name}")(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("breast_cancer", {}), ("diabetes", {"scaled": False}), ("digits", {}), ("wine", {})]
)
def test_the_numbers_are_those_of_scikit_learn(name: str, options: dict[str, bool]) -> None:
    inputs, target = read_bundled(name)
    their_inputs, their_target = load(name, return_X_y=True, **options)
    assert np.array_equal(inputs.numpy(), their_inputs)
    assert np.array_equal(target.numpy(), their_target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name"), [(BreastCancer(), "breast_cancer"), (Wine(), "wine"), (Digits(classes="all"), "digits")]
)
def test_classes_have_their_names(source: BreastCancer | Wine | Digits, name: str) -> None:
    assert source.split().classes == tuple(str(each) for each in load(name).target_names)
