"""The law of the way back through a convolution: ⟨w, x ∗ k⟩ = ⟨back(w), x⟩, for all that a convolution may be."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from ntkexp.kernel.record import convolution
from ntkexp.kernel.record.convolution import CONVOLVE_BACK, convolve_back

EPS = torch.finfo(torch.float64).eps
How: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int]
HOW: dict[str, How] = {  # window, stride, padding, dilation, transposed, groups
    "plain": ((3, 2), (1, 1), (0, 0), (1, 1), False, 1),
    "padded": ((3, 3), (1, 1), (1, 1), (1, 1), False, 1),
    "padded by less and by all": ((3, 4), (1, 1), (2, 1), (1, 1), False, 1),
    "dilated": ((2, 3), (1, 1), (1, 2), (3, 2), False, 1),
    "wider than the image": ((1, 13), (1, 1), (0, 6), (1, 1), False, 1),
    "with a border that no pixel reaches": ((2, 2), (1, 1), (3, 0), (1, 1), False, 1),
    "strided": ((3, 3), (2, 1), (1, 1), (1, 1), False, 1),
    "pixels": ((1, 1), (1, 1), (0, 0), (1, 1), False, 1),
    "padded pixels": ((1, 1), (1, 1), (1, 1), (1, 1), False, 1),
    "in groups": ((3, 3), (1, 1), (1, 1), (1, 1), False, 2),
    "transposed": ((3, 3), (2, 2), (1, 1), (1, 1), True, 1),
    "along one axis": ((3,), (1,), (1,), (1,), False, 1),
}


@pytest.mark.parametrize("together", [1, 2, 9])
@pytest.mark.parametrize("name", HOW)
def test_it_is_the_transpose(name: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    window, stride, padding, dilation, transposed, groups = HOW[name]
    torch.manual_seed(0)
    x = torch.randn(5, 4, *(6, 5)[: len(window)], dtype=torch.float64)
    kernel = torch.randn(6 if not transposed else 4, 4 // groups, *window, dtype=torch.float64)
    how = (stride, padding, dilation, transposed, (0,) * len(window), groups)
    there = torch.convolution(x, kernel, None, *how)
    w = torch.randn_like(there)
    monkeypatch.setattr(convolution, "CACHED", together * 6 * window[-1] * 8 * 8 * 8)
    back = CONVOLVE_BACK(w, x.shape[1:], kernel, *how)
    assert back.shape == x.shape
    terms = torch.cat([(w * there).flatten(), (back * x).flatten()])
    assert abs((w * there).sum() - (back * x).sum()) <= 10 * EPS * terms.abs().sum()


def test_of_nobody() -> None:
    how = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    kernel = torch.ones(2, 3, 3, 3, dtype=torch.float64)
    assert convolve_back(kernel.new_empty(0, 2, 4, 4), (3, 4, 4), kernel, *how).shape == (0, 3, 4, 4)
