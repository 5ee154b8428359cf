"""Laws of convolutions of a few examples at a time: they are those of all, to the bit."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from ntkexp.kernel.record import convolution
from ntkexp.kernel.record.convolution import convolve

How: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]

HOW: dict[str, How] = {
    "padded": ((1, 1), (2, 1), (1, 1), False, (0, 0), 1),
    "strided": ((2, 1), (0, 0), (1, 1), False, (0, 0), 1),
    "dilated": ((1, 1), (1, 1), (1, 2), False, (0, 0), 1),
    "transposed": ((2, 2), (1, 1), (1, 1), True, (1, 1), 1),
    "grouped": ((1, 1), (1, 1), (1, 1), False, (0, 0), 2),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_few_examples_at_a_time_have_the_bits_of_all(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = torch.randn(7, 4, 6, 5, dtype=torch.float64), torch.randn(4, 4 // how[-1], 3, 3, dtype=torch.float64)
    expected = torch.convolution(x, kernel, bias := torch.randn(4, dtype=torch.float64), *how)
    monkeypatch.setattr(convolution, "CACHED", 2 * x[:1].nbytes * 9)
    found = convolve(x, kernel, bias, *how)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_of_any_number_of_dimensions(dimensions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, *[4] * dimensions, dtype=torch.float64)
    kernel = torch.randn(3, 2, *[2] * dimensions, dtype=torch.float64)
    ones, none = [1] * dimensions, [0] * dimensions
    expected = torch.convolution(x, kernel, None, ones, ones, ones, False, none, 1)
    monkeypatch.setattr(convolution, "CACHED", 1)
    assert torch.equal(convolve(x, kernel, None, ones, ones, ones, False, none, 1), expected)
