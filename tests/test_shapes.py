"""Shapes in signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from ntkexp.kernel.features.features import Rows
from ntkexp.kernel.features.gram import inner, with_itself


def test_a_function_refuses_sizes_that_differ() -> None:
    with pytest.raises(TypeCheckError, match="size"):
        inner(torch.ones(2, 1, 3), torch.ones(2, 1, 4))


def test_a_function_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="rows"):
        with_itself(torch.ones(2, 1, 3))


def test_a_dataclass_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="rows"):
        Rows(torch.ones(2, 3), "weight")
