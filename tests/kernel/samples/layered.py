"""Products, convolutions, softmax and norms of values that change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, image, positive, square


def own_kernels(h: Tensor, k: Tensor) -> Tensor:
    """Every example convolved with a kernel of its own."""
    return functional.conv2d(image(h).transpose(0, 1), image(k), padding=1, groups=len(h)).transpose(0, 1)


def fixed_kernels(h: Tensor, k: Tensor) -> Tensor:
    """Constant kernels, forward and transposed."""
    kernel = torch.arange(8, dtype=h.dtype).view(2, 1, 2, 2) - 3
    wide = functional.conv2d(image(h), kernel, torch.ones(2, dtype=h.dtype), stride=1, padding=1, dilation=1)
    return functional.conv_transpose2d(wide, kernel, stride=2, output_padding=1)


def channels(h: Tensor) -> Tensor:
    """Two channels of three pixels."""
    return h.reshape(len(h), 2, 3)


def pair(*numbers: float) -> Tensor:
    """A number for each of two channels."""
    return torch.tensor(numbers, dtype=torch.float64)


def batch_normalised(h: Tensor) -> Tensor:
    """By a running mean and variance, with a gain and a bias."""
    return functional.batch_norm(channels(h), pair(0.5, -1.0), pair(2.0, 0.3), pair(1.5, -0.5), pair(0.1, 0.2))


def group_normalised(h: Tensor, k: Tensor) -> Tensor:
    """Each channel by itself, with a gain and a bias."""
    return functional.group_norm(channels(h), 2, pair(1.5, -0.5), pair(0.1, 0.2)) * channels(k)


def masked_attention(h: Tensor, k: Tensor) -> Tensor:
    """Each position sees itself and the earlier ones; or the first sees nothing."""
    q, keys = (square(v)[:, None] for v in (h, k))
    seen = torch.ones(2, 2, dtype=torch.bool).tril()
    return torch.cat(
        [functional.scaled_dot_product_attention(q, keys, q, attn_mask=m) for m in (seen, seen.tril(-1))], 1
    )


LAYERED: dict[str, Sample] = {
    "_log_softmax": lambda h, k: torch.log_softmax(square(h), 2),
    "_safe_softmax": masked_attention,
    "_softmax": lambda h, k: torch.softmax(square(h), 2) * square(k),
    "_trilinear": lambda h, k: functional.bilinear(h[:, :2], k[:, :3], torch.arange(24.0, dtype=h.dtype).view(4, 2, 3)),
    "_weight_norm_interface": lambda h, k: torch._weight_norm(h, positive(k)[:, :1], 0),
    "addcmul": lambda h, k: (
        torch.addcmul(h, h, k[:, :1], value=0.3) + torch.addcmul(torch.ones(6, dtype=h.dtype), k, k)
    ),
    "baddbmm": lambda h, k: torch.baddbmm(
        square(h)[:, :, :2], square(h), square(k).transpose(1, 2), beta=0.3, alpha=2.0
    ),
    "convolution": lambda h, k: own_kernels(h, k).flatten(1).sum(1) + fixed_kernels(h, k).flatten(1).sum(1),
    "dot": lambda h, k: torch.stack([torch.dot(a, b) for a, b in zip(h, k, strict=True)]),
    "logcumsumexp": lambda h, k: torch.cat(
        [torch.logcumsumexp(square(h), 2), torch.logcumsumexp(30 * square(k), -2)], 1
    ),
    "logsumexp": lambda h, k: torch.logsumexp(square(h), 2) + torch.logsumexp(k, 1, keepdim=True),
    "native_batch_norm": lambda h, k: (
        batch_normalised(h) * functional.instance_norm(channels(k), weight=pair(1.5, -0.5))
    ),
    "native_group_norm": group_normalised,
    "native_layer_norm": lambda h, k: functional.layer_norm(h, (6,), torch.arange(6, dtype=h.dtype) - 2) * k,
    "norm": lambda h, k: torch.norm_except_dim(h, 2, 0) * k,
    "var": lambda h, k: h.var(1, keepdim=True) * k + square(k).var(2, correction=0).sum(1, keepdim=True),
    "var_mean": lambda h, k: torch.cat(torch.var_mean(square(h), 2), 1),
}
