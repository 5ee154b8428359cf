"""Pooling by maxima: a tournament in every window."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, Result, Rule
from ntkexp.kernel.secant.rules.choice import pairwise
from ntkexp.kernel.secant.rules.fold import fold


def max_pool(call: AbstractCall) -> Result:
    """The largest in each window, from shifted copies."""
    value, window, how = call.args[0], call.args[1], call.given
    space = value.start.dim() - 2
    window, stride, padding, dilation = (
        spelled_out(numbers, space) for numbers in (window, how["stride"] or window, how["padding"], how["dilation"])
    )
    count = call.start.shape[2:]
    reach = [s * (n - 1) + d * (w - 1) + 1 for s, n, d, w in zip(stride, count, dilation, window, strict=True)]
    # the last window may stand over the border; where it ends before it, what it does not reach is cut off
    borders = [
        width
        for p, far, n in reversed(list(zip(padding, reach, value.start.shape[2:], strict=True)))
        for width in (p, far - n - p)
    ]

    def shown(v: Tensor, fill: float) -> Tensor:
        v = torch.nn.functional.pad(v, borders, value=fill)
        views = []
        for offset in product(*map(range, window)):
            places = [
                slice(d * o, d * o + s * (n - 1) + 1, s)
                for d, o, n, s in zip(dilation, offset, count, stride, strict=True)
            ]
            views.append(v[(slice(None), slice(None), *places)])
        return torch.stack(views, dim=-1)

    lowest = torch.finfo(value.start.dtype).min / 4  # finite, so that differences of borders are zero
    windows = Ends(shown(value.start, lowest), shown(value.end, lowest), shown(call.delta(value), 0.0))
    return largest(call, windows).change


def adaptive_max_pool(call: AbstractCall) -> Result:
    """The largest in each of so many windows, axis by axis; a shorter window shows its last element again."""
    value = call.args[0]
    best = Ends(value.start, value.end, call.delta(value))
    for axis, count in enumerate(call.args[1], start=value.start.dim() - len(call.args[1])):
        places = windows_of(value.start.shape[axis], count).to(value.start.device)
        best = largest(call, best.view(partial(spread, axis, places)))
    return best.change


def windows_of(size: int, count: int) -> Tensor:
    """The places that each window shows."""
    ends = [(k * size // count, -(-(k + 1) * size // count)) for k in range(count)]
    wide = max(stop - start for start, stop in ends)
    return torch.tensor([[min(start + k, stop - 1) for k in range(wide)] for start, stop in ends])


def spread(axis: int, places: Tensor, v: Tensor) -> Tensor:
    """The windows in place of an axis, and what they show along the last."""
    shape = (*v.shape[:axis], *places.shape, *v.shape[axis + 1 :])
    return v.index_select(axis, places.flatten()).view(shape).movedim(axis + 1, -1)


def largest(call: AbstractCall, windows: Ends) -> Ends:
    """Pooling along the last axis."""
    return fold(windows, lambda left, right: pairwise(call, left, right, 1))


def spelled_out(numbers: list[int], space: int) -> list[int]:
    """One number for each dimension."""
    return numbers * space if len(numbers) == 1 else numbers


RULES: dict[str, Rule] = {
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), max_pool),
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool3d"), adaptive_max_pool),
}
