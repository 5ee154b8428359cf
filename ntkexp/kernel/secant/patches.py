"""Convolution as a product of matrices: patches of the input times the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn


def patches(
    x: Float[Tensor, "example channel *pixels"],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "example use size"]:
    """What the window of a convolution shows at each output pixel, channel by channel.

    Pixels follow each other in memory, as they do in x: to bring a patch together takes longer than to multiply it.
    """
    x = nn.functional.pad(x, [width for width in reversed(padding) for _ in range(2)])
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    shown = []
    for offset in product(*map(range, window)):
        corner = [d * o for d, o in zip(dilation, offset, strict=True)]
        places = [slice(c, n - r + c, s) for c, n, r, s in zip(corner, x.shape[2:], reach, stride, strict=True)]
        shown.append(x[(slice(None), slice(None), *places)])
    return torch.stack(shown, dim=2).flatten(3).flatten(1, 2).mT  # [example, pixel, (channel, offset)]


AT_ONCE = 2**22  # bytes of patches that are brought together: they are multiplied while they are in the cache


@dataclass(frozen=True, eq=False)
class Window:
    """What the window of a convolution shows, brought together when it is multiplied."""

    x: Float[Tensor, "example channel *pixels"]
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def rows(self) -> Float[Tensor, "example use size"]:
        """All patches."""
        return patches(self.x, self.size, self.stride, self.padding, self.dilation)

    def turns(self) -> Iterator[tuple[slice, Float[Tensor, "part size use"]]]:
        """The patches of a few examples at a time, transposed; each time in the memory of the time before."""
        pixel = [1] * len(self.size)
        bare = list(self.size) == pixel and list(self.stride) == pixel and not any(self.padding)
        if bare:
            yield slice(None), self.x.flatten(2)
            return
        seen = shown_by(self.x.new_empty(1, self.x.shape[1], *self.padded), self)
        step = min(max(1, AT_ONCE // (seen.numel() * seen.element_size())), len(self.x))
        if step == len(self.x):  # nothing is overwritten, so that a program can be made of it
            image = nn.functional.pad(self.x, [width for width in reversed(self.padding) for _ in range(2)])
            yield slice(None), shown_by(image, self).reshape(step, self.x.shape[1] * prod(self.size), -1)
            return
        border = self.x.new_zeros(step, self.x.shape[1], *self.padded)
        shown = self.x.new_empty(step, *seen.shape[1:])
        for at in range(0, len(self.x), step):
            part = self.x[at : at + step]
            inner = [slice(p, p + n) for p, n in zip(self.padding, part.shape[2:], strict=True)]
            border[(slice(len(part)), slice(None), *inner)] = part
            rows = shown[: len(part)].copy_(shown_by(border[: len(part)], self))
            yield slice(at, at + step), rows.view(len(part), part.shape[1] * prod(self.size), -1)

    @property
    def padded(self) -> list[int]:
        """The pixels of an image with its border."""
        return [n + 2 * p for n, p in zip(self.x.shape[2:], self.padding, strict=True)]


def shown_by(
    image: Float[Tensor, "example channel *pixels"], window: Window
) -> Float[Tensor, "example channel *offsets_and_pixels"]:
    """A view of an image with its border: for every offset in the window, what is seen there from every pixel."""
    strides = image.stride()
    counts = [
        (n - d * (w - 1) - 1) // s + 1
        for n, w, s, d in zip(image.shape[2:], window.size, window.stride, window.dilation, strict=True)
    ]
    offsets = [step * d for step, d in zip(strides[2:], window.dilation, strict=True)]
    pixels = [step * s for step, s in zip(strides[2:], window.stride, strict=True)]
    return image.as_strided((*image.shape[:2], *window.size, *counts), (*strides[:2], *offsets, *pixels))
