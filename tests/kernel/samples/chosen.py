"""Choices, many of which change in the course of a long step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, image, ranked, square, volume


def overwritten(h: Tensor, k: Tensor) -> Tensor:
    """Masks that write into all elements, into those of a column and of an example, and by columns; and numbers."""
    h, k = h.clone(), k * 1.0
    h[h < 0] = 0.5
    h[:, 0][k[:, 1] < 0] = 2.0
    k[k[:, 0] > 0.5] = torch.arange(6.0, dtype=k.dtype)
    k[:, torch.arange(6) > 3] = h[:, :2]
    k[torch.arange(len(k))[:, None], torch.tensor([3, 1])] = h[:, 2:4]
    return h * k


CHOSEN: dict[str, Sample] = {
    "adaptive_max_pool2d": lambda h, k: torch.cat(
        [functional.adaptive_max_pool2d(image(h), size).flatten(1) for size in ((1, 2), (2, 2), 4)], 1
    ),
    "adaptive_max_pool3d": lambda h, k: functional.adaptive_max_pool3d(volume(h), (1, 1, 2)),
    "amax": lambda h, k: square(h).amax(2) + k.amax((1,), keepdim=True),
    "amin": lambda h, k: square(h).amin(2) + k.amin((1,), keepdim=True),
    "aminmax": lambda h, k: torch.stack(
        [*torch.aminmax(h, dim=1), *torch.stack([torch.stack(torch.aminmax(row)) for row in k], 1)], 1
    ),
    "bitwise_and": lambda h, k: torch.where((h > 0) & (k > 0) & (torch.arange(6) > 1), h, k),
    "bitwise_not": lambda h, k: torch.where(~(h > 0), h, k),
    "bitwise_or": lambda h, k: torch.where((h > 0) | (k > 0), h, k),
    "bitwise_xor": lambda h, k: torch.where((h > 0) ^ (k > 0), h, k),
    "cummax": lambda h, k: ranked(h).cummax(1).values,
    "cummin": lambda h, k: ranked(h).cummin(1).values,
    "eq": lambda h, k: (h.round() == k.round()) * (h + 2 * k),
    "ge": lambda h, k: (h >= k) * (h + 2 * k),
    "gt": lambda h, k: (h > 0.1) * (h + 2 * k),
    "index_put": overwritten,
    "kthvalue": lambda h, k: ranked(h).kthvalue(2, 1).values,
    "le": lambda h, k: (h <= k[:, :1]) * (h + 2 * k),
    "logical_and": lambda h, k: torch.where(torch.logical_and(h > 0, k > 0), h, k),
    "logical_not": lambda h, k: torch.logical_not(h > 0) * (h + 2 * k),
    "logical_or": lambda h, k: torch.where(torch.logical_or(h > 0, k > 0), h, k),
    "logical_xor": lambda h, k: torch.where(torch.logical_xor(h > 0, k > 0), h, k),
    "lt": lambda h, k: (h < k) * (h + 2 * k),
    "masked_fill": lambda h, k: h.masked_fill(h > 0.3, 2.0) + k.masked_fill(h > 0, 0.5),
    "max": lambda h, k: square(h).max(2).values + torch.stack([row.max() for row in k])[:, None],
    "max_pool2d_with_indices": lambda h, k: torch.cat(
        [
            functional.max_pool2d(image(h), 2, stride=1, padding=1, dilation=(1, 2)).flatten(1),
            functional.max_pool2d(image(k), 2, stride=(1, 2), ceil_mode=True).flatten(1),
            functional.max_pool2d(image(h), 2, stride=3, padding=1, ceil_mode=True).flatten(1),
            functional.max_pool1d(k[:, None], 2, stride=3, padding=1).flatten(1),
        ],
        1,
    ),
    "max_pool3d_with_indices": lambda h, k: functional.max_pool3d(volume(h), (1, 2, 2), stride=1, padding=(0, 1, 1)),
    "maximum": lambda h, k: torch.maximum(h, k[:, :1]) + torch.maximum(k, torch.ones(6, dtype=h.dtype)),
    "median": lambda h, k: ranked(h).median(1).values,
    "min": lambda h, k: square(h).min(2).values + torch.stack([row.min() for row in k])[:, None],
    "minimum": lambda h, k: torch.minimum(h, k[:, :1]) + torch.minimum(k, torch.ones(6, dtype=h.dtype)),
    "mode": lambda h, k: ranked(h).mode(1).values,
    "ne": lambda h, k: (h.round() != k.round()) * (h + 2 * k),
    "sort": lambda h, k: ranked(h).sort(1).values * k,
    "topk": lambda h, k: ranked(h).topk(2, 1).values,
    "where": lambda h, k: torch.where(h > k, h * k, h - 1),
}
