"""Comparisons that say where, and by what ratio, two arrays differ."""

from __future__ import annotations

import torch
from torch import Tensor


def agree(actual: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float | None = None) -> None:
    """|actual − expected| ≤ tolerance · scale everywhere; the scale is the largest expected entry, if none is given."""
    assert actual.shape == expected.shape, f"{list(actual.shape)} against {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype} against {expected.dtype}"
    size = expected.abs().max() if scale is None else torch.as_tensor(scale)
    error = (actual - expected).abs()
    worst = int(error.argmax())
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), error.shape))
    assert not error.isnan().any(), "there are entries that are no numbers"
    assert bool((error <= tolerance * size).all()), (
        f"at {place}: {actual.flatten()[worst]:.17g} against {expected.flatten()[worst]:.17g}, "
        f"off by {float(error.max() / size.max()):.1e} where {tolerance:.1e} is allowed"
    )
