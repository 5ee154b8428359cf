"""Patches that are brought together a few examples at a time are those that are brought together at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.record import convolution
from ntkexp.kernel.record.convolution import Window
from ntkexp.library import reader_of, tangent_kernel
from tests.kernel import oracle
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps
WINDOWS = {
    "plain": ((4, 5), (3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": ((4, 5), (3, 3), (1, 1), (1, 2), (1, 1)),
    "in steps": ((6, 5), (2, 3), (2, 3), (1, 0), (1, 1)),
    "wide": ((6, 5), (2, 2), (1, 2), (0, 1), (3, 2)),
    "pixels": ((2, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
    "every other pixel": ((3, 3), (1, 1), (2, 2), (0, 0), (1, 1)),
    "one dimension": ((7,), (3,), (2,), (1,), (2,)),
    "three dimensions": ((3, 2, 3), (2, 2, 2), (1, 1, 2), (0, 1, 1), (1, 1, 1)),
}


def images(examples: int, *shape: int) -> Tensor:
    """Random ones."""
    return torch.randn(examples, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("together", [1, 4, 9])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_few_at_a_time_are_all(name: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, *how = WINDOWS[name]
    window = Window(images(9, 2, *pixels), *how)
    monkeypatch.setattr(convolution, "PATCHES", together * window.rows[:1].nbytes)
    parts = [shown.mT.clone() for _, shown in window.turns()]
    assert torch.equal(torch.cat(parts), window.rows)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_kernel_of_more_images_than_are_brought_together_at_once(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "PATCHES", 2 * 4 * 3 * 4 * 9 * 8)  # two of the larger patches
    layers = (nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.Tanh(), nn.Conv2d(4, 4, 2, stride=2, groups=groups))
    made, x = nn.Sequential(*layers, nn.Flatten()).double(), images(5, 4, 3, 4)
    agree(tangent_kernel(made, x[-2:], x), oracle.tangent(made, x[-2:], x), 100 * EPS)


@pytest.mark.parametrize(("side", "kept"), [(2, True), (5, False)])
def test_factors_are_kept_where_pixels_are_few(side: int, kept: bool) -> None:
    made = nn.Sequential(nn.Conv2d(8, 8, 2), nn.Flatten()).double()
    walker, own = reader_of(made)
    blocks = walker.tangent(walker.record(own, images(2, 8, side, side))).blocks
    assert all(isinstance(block, Factored) == kept for block in blocks)
