"""Linear operations: rearrangements, pooling by means, interpolation, writes by index."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, image, square, volume, whole


def resized(h: Tensor, k: Tensor, *, dims: int, mode: str, **how: bool) -> Tensor:
    shape = {1: h[:, None], 2: image(h), 3: volume(h)}[dims]
    return functional.interpolate(shape, scale_factor=2, mode=mode, **how)


def bordered(h: Tensor, k: Tensor, *, dims: int, mode: str) -> Tensor:
    """With a border that repeats what is inside."""
    shape, widths = {1: (h[:, None], (2, 1)), 2: (image(h), (2, 1, 1, 0)), 3: (volume(h), (2, 1, 1, 0, 0, 0))}[dims]
    return functional.pad(shape, widths, mode=mode)


def places(dims: int, h: Tensor) -> Tensor:
    """Where to look into a picture, the same for every example."""
    return (
        torch.linspace(-0.9, 0.8, 2 * dims, dtype=h.dtype)
        .view(1, *[1] * (dims - 1), 2, dims)
        .repeat(len(h), *[1] * (dims + 1))
    )


def diagonal_blocks(a: Tensor, b: Tensor) -> Tensor:
    """One beside and below the other."""
    found: Tensor = torch.block_diag(a[:2], b[:2])  # type: ignore[no-untyped-call]  # torch's own
    return found


def bags(h: Tensor, k: Tensor) -> Tensor:
    """Two rows for every example, in bags of its own: one of them twice, and one that is padding."""
    table, index = torch.cat([h.new_ones(1, 3), h.reshape(-1, 3)]), 2 * torch.arange(len(h))[:, None] + whole(1, 2, 1)
    gained = functional.embedding_bag(index, table, mode="sum", per_sample_weights=k[:, :3])
    starts = (3 * torch.arange(len(h))[:, None] + whole(0, 1)).flatten()
    ragged = functional.embedding_bag(index.flatten(), table, starts, mode="mean").view(len(h), 6)
    return torch.cat([gained, ragged, functional.embedding_bag(index * whole(1, 1, 0), table, padding_idx=0)], 1)


def columns(h: Tensor, *numbers: int) -> Tensor:
    return whole(*numbers).expand(len(h), -1)


ARRANGED: dict[str, Sample] = {
    "_adaptive_avg_pool2d": lambda h, k: functional.adaptive_avg_pool2d(image(h), (1, 2)),
    "_adaptive_avg_pool3d": lambda h, k: functional.adaptive_avg_pool3d(volume(h), (1, 1, 2)),
    "_embedding_bag": bags,
    "_neg_view": lambda h, k: torch.complex(h, k).conj().imag * h,
    "_to_copy": lambda h, k: h.to(torch.float64, copy=True) * k,
    "_upsample_bicubic2d_aa": partial(resized, dims=2, mode="bicubic", antialias=True),
    "_upsample_bilinear2d_aa": partial(resized, dims=2, mode="bilinear", antialias=True),
    "_upsample_nearest_exact1d": partial(resized, dims=1, mode="nearest-exact"),
    "_upsample_nearest_exact2d": partial(resized, dims=2, mode="nearest-exact"),
    "_upsample_nearest_exact3d": partial(resized, dims=3, mode="nearest-exact"),
    "affine_grid_generator": lambda h, k: functional.affine_grid(square(h), [len(h), 1, 2, 2], align_corners=False),
    "as_strided": lambda h, k: (h.t() * k.t()).as_strided((len(h), 2), (6, 2), 1),
    "avg_pool2d": lambda h, k: functional.avg_pool2d(image(h), 2, stride=1),
    "avg_pool3d": lambda h, k: functional.avg_pool3d(volume(h), (1, 2, 2), stride=1),
    "block_diag": lambda h, k: torch.stack([diagonal_blocks(*pair) for pair in zip(h, k, strict=True)]),
    "channel_shuffle": lambda h, k: functional.channel_shuffle(h[:, :, None, None], 2),
    "col2im": lambda h, k: functional.fold(square(h), (1, 4), (1, 2)),
    "deg2rad": lambda h, k: torch.deg2rad(h),
    "diag_embed": lambda h, k: torch.diag_embed(h),
    "diagonal_scatter": lambda h, k: torch.diagonal_scatter(square(h), k[:, :2], 0, 1, 2),
    "embedding": lambda h, k: functional.embedding(torch.arange(h.numel()).view(h.shape).flip(1), h.reshape(-1, 1)),
    "empty_like": lambda h, k: torch.empty_like(h).fill_(3.0) * k,
    "gather": lambda h, k: h.gather(1, columns(h, 3, 0, 3)),
    "grid_sampler_2d": lambda h, k: functional.grid_sample(image(h), places(2, h), align_corners=False),
    "grid_sampler_3d": lambda h, k: functional.grid_sample(volume(h), places(3, h), align_corners=True),
    "im2col": lambda h, k: functional.unfold(image(h), (2, 2)),
    "index": lambda h, k: h[:, whole(3, 0, 3)],
    "index_add": lambda h, k: torch.index_add(h, 1, whole(3, 0, 3), k[:, :3], alpha=2.0),
    "index_copy": lambda h, k: torch.index_copy(h, 1, whole(3, 0), k[:, :2]),
    "index_fill": lambda h, k: h.index_fill(1, whole(3, 0), 2.0) * k.index_fill(1, whole(1), torch.tensor(3.0)),
    "index_select": lambda h, k: h.index_select(1, whole(3, 0, 3)),
    "masked_scatter": lambda h, k: h.masked_scatter(torch.arange(6) > 2, k[:, 3:].clone()),
    "masked_select": lambda h, k: h.masked_select(torch.arange(6) > 2).view(len(h), 3),
    "max_unpool2d": lambda h, k: functional.max_unpool2d(
        image(h), torch.arange(6).view(1, 1, 2, 3).repeat(len(h), 1, 1, 1), [2, 2]
    ),
    "nansum": lambda h, k: h.nansum(1),
    "new_empty": lambda h, k: h.new_empty(h.shape).fill_(3.0) * k,
    "new_empty_strided": lambda h, k: h.new_empty_strided(h.shape, h.stride()).fill_(3.0) * k,
    "pixel_shuffle": lambda h, k: functional.pixel_shuffle(torch.cat([h, k[:, :2]], 1).view(len(h), 4, 1, 2), 2),
    "pixel_unshuffle": lambda h, k: functional.pixel_unshuffle(torch.cat([h, k[:, :2]], 1).view(len(h), 1, 4, 2), 2),
    "rad2deg": lambda h, k: torch.rad2deg(h),
    "reflection_pad1d": partial(bordered, dims=1, mode="reflect"),
    "reflection_pad2d": partial(bordered, dims=2, mode="reflect"),
    "reflection_pad3d": partial(bordered, dims=3, mode="reflect"),
    "replication_pad1d": partial(bordered, dims=1, mode="replicate"),
    "replication_pad2d": partial(bordered, dims=2, mode="replicate"),
    "replication_pad3d": partial(bordered, dims=3, mode="replicate"),
    "reshape": lambda h, k: functional.rms_norm(h, (6,)),
    "rot90": lambda h, k: torch.rot90(square(h), 1, (1, 2)),
    "scatter": lambda h, k: h.scatter(1, columns(h, 3, 0), k[:, :2]) * h.scatter(1, columns(h, 2), 3.0),
    "scatter_add": lambda h, k: h.scatter_add(1, columns(h, 3, 0, 3), k[:, :3]),
    "scatter_reduce": lambda h, k: torch.cat(
        [h.scatter_reduce(1, columns(h, 3, 0, 3), k[:, :3], how) for how in ("sum", "mean")], 1
    ),
    "split": lambda h, k: torch.mul(*torch.split(h, 3, 1)),
    "split_with_sizes": lambda h, k: torch.mul(*torch.split(h, [5, 1], 1)),
    "take": lambda h, k: torch.take(h, torch.arange(h.numel()).view(h.shape).flip(1)),
    "trace": lambda h, k: torch.stack([torch.trace(part) for part in square(h)]),
    "unbind": lambda h, k: torch.mul(*square(h).unbind(1)),
    "unfold": lambda h, k: h.unfold(1, 3, 2),
    "unfold_backward": lambda h, k: torch.ops.aten.unfold_backward(square(h), [len(h), 5], 1, 3, 2),
    "unsafe_split": lambda h, k: torch.mul(*torch.unsafe_split(h, 3, 1)),
    "unsafe_split_with_sizes": lambda h, k: torch.mul(*torch.unsafe_split_with_sizes(h, [5, 1], 1)),
    "upsample_bicubic2d": partial(resized, dims=2, mode="bicubic"),
    "upsample_bilinear2d": partial(resized, dims=2, mode="bilinear"),
    "upsample_linear1d": partial(resized, dims=1, mode="linear"),
    "upsample_nearest1d": partial(resized, dims=1, mode="nearest"),
    "upsample_nearest2d": partial(resized, dims=2, mode="nearest"),
    "upsample_nearest3d": partial(resized, dims=3, mode="nearest"),
    "upsample_trilinear3d": partial(resized, dims=3, mode="trilinear"),
}
