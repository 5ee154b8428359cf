"""Convolution as a product of matrices: patches of the input times the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

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
    shown = shown_by(padded(x, padding), window, stride, dilation)  # [example, channel, *offset, *pixel]
    return shown.reshape(len(x), x.shape[1] * prod(window), -1).mT


def padded(x: Float[Tensor, "example channel *pixels"], padding: Sequence[int]) -> Float[Tensor, "example channel *_"]:
    """Images with a border of zeros."""
    return nn.functional.pad(x, [width for width in reversed(padding) for _ in range(2)])


def shown_by(
    image: Float[Tensor, "example channel *pixels"],
    window: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "example channel *offsets_and_pixels"]:
    """A view of an image with its border: for every offset in the window, what is seen there from every pixel."""
    for axis, (size, step, apart) in enumerate(zip(window, stride, dilation, strict=True), start=2):
        image = image.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
    axes = len(window)
    return image.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))


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
        how = (self.size, self.stride, self.dilation)
        pixel = [1] * len(self.size)
        bare = list(self.size) == pixel and list(self.stride) == pixel and not any(self.padding)
        if bare:
            yield slice(None), self.x.flatten(2)
            return
        border = self.x.new_empty(1, self.x.shape[1], *self.bordered)
        seen = shown_by(border, *how)
        step = min(max(1, AT_ONCE // (seen.numel() * seen.element_size())), len(self.x))
        if step == len(self.x):  # nothing is overwritten, so that a program can be made of it
            yield slice(None), self.rows.mT
            return
        border = self.x.new_zeros(step, *border.shape[1:])
        shown = self.x.new_empty(step, *seen.shape[1:])
        for at in range(0, len(self.x), step):
            part = self.x[at : at + step]
            inner = [slice(p, p + n) for p, n in zip(self.padding, part.shape[2:], strict=True)]
            border[(slice(len(part)), slice(None), *inner)] = part
            rows = shown[: len(part)].copy_(shown_by(border[: len(part)], *how))
            yield slice(at, at + step), rows.view(len(part), part.shape[1] * prod(self.size), -1)

    @property
    def bordered(self) -> list[int]:
        """The pixels of an image with its border."""
        return [n + 2 * p for n, p in zip(self.x.shape[2:], self.padding, strict=True)]
