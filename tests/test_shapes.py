"""Shapes in signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from ntkexp.kernel.features.adjoint import inner
from ntkexp.kernel.features.blocks import Rows
from tests.shapes import checked


def test_a_function_refuses_sizes_that_differ() -> None:
    with pytest.raises(TypeCheckError, match="size"):
        inner(torch.ones(2, 1, 3), torch.ones(2, 1, 4))


def test_a_function_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="left"):
        inner(torch.ones(2, 3), torch.ones(2, 1, 3))


def test_a_dataclass_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="rows"):
        Rows(torch.ones(2, 3), "weight")


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3)])
def test_one_call_that_fits_excuses_no_other(sizes: tuple[int, int]) -> None:
    """Neither one of other arguments, nor one that returns something else."""

    @checked
    def rows(x: Float[Tensor, "row size"], count: int, size: int) -> Float[Tensor, "row size"]:
        return torch.ones(count, size)

    rows(torch.ones(2, 2), 2, 2)
    with pytest.raises(TypeCheckError, match="return value"):
        rows(torch.ones(2, 2), *sizes)
    with pytest.raises(TypeCheckError, match="parameters"):
        rows(torch.ones(2), 2, 2)
