"""Compute convolutions for a few images at a time: forward, backward to the input, and
as patches for products with a weight.

A convolution is a matrix product of *patches* with the kernel. A patch holds the pixels
of the input under the kernel at one position. In double precision, torch copies the
patches of all examples before it multiplies. For a 3×3 kernel, they take nine times the
memory of the input, and the system has to clear this memory first. Here the patches of
only a few examples are copied at a time, so they stay in the cache. The results are
bitwise equal, because torch also multiplies one example after another.

If the stride is 1, the gradient x with respect to the input is itself a convolution, of
the output gradient w (padded with zeros) with the reversed kernel k. For input channel i
and pixel p, it sums over the features o and the offsets r in the window:

    x[i, p] = Σ_or k[o, i, r] w[o, p − r]

torch multiplies the kernel with every pixel instead, and adds the overlapping patches
element by element. The addition takes two to three times as long as the products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

# bytes of patches or copies that one thread makes at a time, half of a core's cache
CACHED_PATCH_BYTES = 2**20
# bytes of patches that are copied for a product with a weight
PRODUCT_PATCH_BYTES = 2**22


def convolve(
    x: Float[Tensor, "example channel *pixels"],
    kernel: Float[Tensor, "_ _ *window"],
    bias: Float[Tensor, " features"] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> Float[Tensor, "example features *pixels_"]:
    """Compute `torch.convolution`, for a few examples at a time if torch would copy
    patches. `extra` is torch's `output_padding`.

    >>> x, kernel = torch.randn(9, 8, 32, 32, dtype=torch.float64), torch.randn(4, 8, 5, 5, dtype=torch.float64)
    >>> how = ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)
    >>> torch.equal(convolve(x, kernel, None, *how), torch.convolution(x, kernel, None, *how))
    True
    """
    how = (kernel, bias, stride, padding, dilation, transposed, extra, groups)
    by_patches = (
        x.dtype == torch.float64
        and x.device.type == "cpu"
        and prod(kernel.shape[2:]) > 1
    )
    if (
        transposed
        or groups > 1
        or not by_patches
        or x.dim() != kernel.dim()
        or not len(x)
    ):
        return torch.convolution(x, *how)
    patches = x.nbytes * prod(kernel.shape[2:]) // (len(x) * prod(stride))
    step = max(1, CACHED_PATCH_BYTES // max(1, patches)) * torch.get_num_threads()
    if len(x) <= step:
        return torch.convolution(x, *how)
    first = torch.convolution(x[:step], *how)
    images = first.new_empty(len(x), *first.shape[1:])
    images[:step] = first
    for at in range(step, len(x), step):
        images[at : at + step] = torch.convolution(x[at : at + step], *how)
    return images


def convolve_back(
    w: Float[Tensor, "image feature *pixels_"],
    shape: Sequence[int],
    kernel: Float[Tensor, "_ _ *window"],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> Float[Tensor, "image channel *pixels"]:
    """Compute the gradient with respect to the input from the gradient w of the result.
    `shape` is the shape of one input image.

    For float64 convolutions of stride 1 on one CPU thread, call `convolve_flipped`.
    Otherwise call torch's backward pass. (With several threads, `convolve_flipped`
    would be slower: its products are so small that threads wait for each other.)

    >>> w, kernel = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)
    >>> convolve_back(w, [1, 1, 3], kernel, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    tensor([[[[1., 3., 2.]]]], dtype=torch.float64)
    """
    border = [
        d * (size - 1) - p
        for d, size, p in zip(dilation, kernel.shape[2:], padding, strict=True)
    ]
    if set(stride) == {1} and groups == 1 and not transposed and len(w):
        # a window of one pixel: the gradient is kᵀ w
        if prod(kernel.shape[2:]) == 1 and not any(padding):
            pixels = torch.bmm(
                kernel.flatten(1).t().expand(len(w), -1, -1), w.flatten(2)
            )
            return pixels.view(len(w), *shape)
        alone = w.device.type == "cpu" and torch.get_num_threads() == 1
        if alone and w.dim() <= 4 and w.dtype == torch.float64 and min(border) >= 0:
            plane, window = (
                images if images.dim() == 4 else images.unsqueeze(2)
                for images in (w, kernel)
            )
            return convolve_flipped(
                plane, window, (0, *border)[-2:], (1, *dilation)[-2:]
            ).view(len(w), *shape)
    blank = w.new_empty(len(w), *shape)  # torch reads only the shape of this tensor
    how = (stride, padding, dilation, transposed, extra, groups)
    result: Tensor = torch.ops.aten.convolution_backward(
        w, blank, kernel, None, *how, [True, False, False]
    )[0]
    return result


def convolve_flipped(
    w: Float[Tensor, "image feature height_ width_"],
    kernel: Float[Tensor, "feature channel rows columns"],
    border: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "image channel height width"]:
    """Return the convolution of w, padded with `border` zeros, and the reversed kernel.

    For each column of the window, make a copy of w that is shifted along the last axis.
    For each row of the window, read these copies from a different
    start, without copying again."""
    features, channels, rows, columns = kernel.shape
    (before, side) = border
    (down, across) = dilation
    (high, wide) = w.shape[2:]
    height = high + 2 * before - down * (rows - 1)
    width = wide + 2 * side - across * (columns - 1)
    flipped = (
        kernel.flip(2, 3)
        .permute(2, 1, 0, 3)
        .reshape(rows, channels, features * columns)
    )
    copy_numbers = features * columns * (high + 2 * before) * width
    step = min(len(w), max(1, CACHED_PATCH_BYTES // (copy_numbers * w.element_size())))
    copies = w.new_zeros(step, features, columns, high + 2 * before, width)
    images = w.new_empty(len(w), channels, height * width)
    for at in range(0, len(w), step):
        part = w[at : at + step]
        result = images[at : at + step]
        for column in range(columns):
            # pixel p of the copy is pixel p + `moved` of w
            moved = column * across - side
            seen = slice(max(0, -moved), max(0, -moved, min(width, wide - moved)))
            copy = copies[: len(part), :, column, before : before + high, seen]
            copy.copy_(part[..., seen.start + moved : seen.stop + moved])
        flat = copies[: len(part)].view(len(part), features * columns, -1)
        # Σ_r k_r w_r, by one matrix product for each row r of the window
        for row, factor in enumerate(flipped):
            pixels = flat.narrow(2, row * down * width, height * width)
            factors = factor.expand(len(part), -1, -1), pixels
            result.baddbmm_(*factors) if row else torch.bmm(*factors, out=result)
    return images.view(len(w), channels, height, width)


# Register the function as one torch operation, because compiled programs consist of
# operations that overwrite nothing, and the function writes into a buffer that it
# allocates.
OPERATORS = torch.library.Library("ntkexp", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
OPERATORS.define(  # type: ignore[no-untyped-call]  # torch's own
    "convolve_back(Tensor w, int[] shape, Tensor kernel, int[] stride, int[] padding, int[] "
    "dilation, bool transposed, int[] extra, int groups) -> Tensor"
)
OPERATORS.impl("convolve_back", convolve_back, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's own
CONVOLVE_BACK = torch.ops.ntkexp.convolve_back.default


# Patches for the gradient of the kernel. In a patch tensor, neighbouring pixels are
# adjacent in memory, as in x. This makes copying faster, and copying takes longer than
# multiplying.


def sliding_windows(
    image: Float[Tensor, "example channel *pixels"],
    window: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "example channel *offsets_and_pixels"]:
    """Return a padded image as a view of patches: for every offset in the window, the
    input pixel at this offset from every output pixel."""
    for axis, (size, step, apart) in enumerate(
        zip(window, stride, dilation, strict=True), start=2
    ):
        image = image.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
    axes = len(window)
    return image.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))


@dataclass(frozen=True, eq=False)
class Window:
    """The patches of a convolution's input. The patches are copied only when they are
    multiplied."""

    x: Float[Tensor, "example channel *pixels"]
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def rows(self) -> Float[Tensor, "example use size"]:
        """The elements of the window at each output pixel, channel by channel."""
        padded = nn.functional.pad(
            self.x, [width for width in reversed(self.padding) for _ in range(2)]
        )
        windows = sliding_windows(padded, self.size, self.stride, self.dilation)
        return windows.reshape(len(self.x), self.x.shape[1] * prod(self.size), -1).mT

    def batches(self) -> Iterator[tuple[slice, Float[Tensor, "part size use"]]]:
        """Yield the transposed patches of a few examples at a time,
        always in the same memory."""
        how = (self.size, self.stride, self.dilation)
        pixel = [1] * len(self.size)
        if (
            list(self.size) == pixel
            and list(self.stride) == pixel
            and not any(self.padding)
        ):
            yield slice(None), self.x.flatten(2)  # a pixel is its own patch
            return
        padded = [
            n + 2 * p for n, p in zip(self.x.shape[2:], self.padding, strict=True)
        ]
        border = self.x.new_empty(1, self.x.shape[1], *padded)
        one = sliding_windows(border, *how)
        step = min(
            max(1, PRODUCT_PATCH_BYTES // (one.numel() * one.element_size())),
            len(self.x),
        )
        # a single batch needs no buffer; compiled programs require this, because they
        # overwrite nothing
        if step == len(self.x):
            yield slice(None), self.rows.mT
            return
        border = self.x.new_zeros(step, *border.shape[1:])
        memory = self.x.new_empty(step, *one.shape[1:])
        for at in range(0, len(self.x), step):
            part = self.x[at : at + step]
            inner = [
                slice(p, p + n)
                for p, n in zip(self.padding, part.shape[2:], strict=True)
            ]
            border[(slice(len(part)), slice(None), *inner)] = part
            rows = memory[: len(part)].copy_(sliding_windows(border[: len(part)], *how))
            yield (
                slice(at, at + step),
                rows.view(len(part), part.shape[1] * prod(self.size), -1),
            )
