"""The type of a sample, and the shapes and ranges that samples share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Sample: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of two variable tensors [example, 6]."""


def square(h: Tensor) -> Tensor:
    """Return a matrix for each example."""
    return h.reshape(len(h), 2, 3)


def image(h: Tensor) -> Tensor:
    """Return a picture of one channel for each example."""
    return h.reshape(len(h), 1, 2, 3)


def volume(h: Tensor) -> Tensor:
    """Return a picture in three dimensions for each example."""
    return h.reshape(len(h), 1, 1, 2, 3)


def positive(h: Tensor) -> Tensor:
    """Return numbers of at least ½."""
    return 0.5 + h * h


def inside(h: Tensor) -> Tensor:
    """Return numbers between −0.9 and 0.9."""
    return 0.9 * h.tanh()


def ranked(h: Tensor) -> Tensor:
    """Return numbers whose order does not change during a step."""
    return h.tanh() + 3 * torch.tensor([2.0, 5.0, 0.0, 4.0, 1.0, 3.0], dtype=h.dtype)


def whole(*numbers: int) -> Tensor:
    """Return indices."""
    return torch.tensor(numbers)


def each(h: Tensor) -> list[list[int]]:
    """Return the index of each example, in a column."""
    return [[n] for n in range(len(h))]


# Sums, products, views, writes, and the functions of one number that have closed forms.


def part_replaced(h: Tensor, k: Tensor) -> Tensor:
    """Write into slices and columns."""
    h = h.clone()
    h[:, 1:3] = k[:, 2:4]
    h[:, 5] = k[:, 0]
    h[:, 0] = 2.0
    h[:, 4:].fill_(0.5)
    return h


PLAIN: dict[str, Sample] = {
    "_unsafe_view": lambda h, k: square(h) @ torch.arange(6, dtype=h.dtype).view(3, 2),
    "abs": lambda h, k: h.abs(),
    "add": lambda h, k: torch.add(h, k, alpha=0.3) + 1 + k[:, :1],
    "addmm": lambda h, k: torch.addmm(k, h, torch.ones(6, 6, dtype=h.dtype), beta=0.5, alpha=2.0),
    "alias": lambda h, k: torch.ops.aten.alias(h),
    "bmm": lambda h, k: torch.bmm(square(h), square(k).transpose(1, 2)),
    "cat": lambda h, k: torch.cat([h, k], 1),
    "clone": lambda h, k: h.clone(),
    "constant_pad_nd": lambda h, k: functional.pad(h, (1, 2), value=2.0),
    "copy": part_replaced,
    "cos": lambda h, k: h.cos(),
    "cumsum": lambda h, k: h.cumsum(1),
    "detach": lambda h, k: h.clone().relu_(),  # how a rewritten in-place operation looks on a tape
    "diagonal": lambda h, k: square(h).diagonal(0, 1, 2),
    "div": lambda h, k: h / positive(k) + 2 / positive(h) + k / 3,
    "erf": lambda h, k: h.erf(),
    "exp": lambda h, k: h.exp(),
    "expand": lambda h, k: h[:, None].expand(-1, 3, -1),
    "fill": part_replaced,
    "flip": lambda h, k: h.flip(1),
    "full_like": lambda h, k: h * torch.full_like(k, 3.0),
    "gelu": lambda h, k: functional.gelu(h) + functional.gelu(k, approximate="tanh"),
    "leaky_relu": lambda h, k: functional.leaky_relu(h, 0.2) + functional.leaky_relu(k),
    "log": lambda h, k: positive(h).log(),
    "mean": lambda h, k: square(h).mean(2),
    "mm": lambda h, k: h @ torch.ones(6, 2, dtype=h.dtype),
    "mul": lambda h, k: h * k * 3.0 * k[:, :1],
    "mv": lambda h, k: h @ torch.ones(6, dtype=h.dtype),
    "neg": lambda h, k: -h,
    "new_full": lambda h, k: torch.cat([h, h.new_full((len(h), 2), 3.0)], 1),
    "new_ones": lambda h, k: torch.cat([h.new_ones(len(h), 1), h], 1),
    "new_zeros": lambda h, k: torch.cat([h.new_zeros(len(h), 1), h], 1),
    "ones_like": lambda h, k: torch.ones_like(h) + k,
    "permute": lambda h, k: square(h).permute(0, 2, 1),
    "reciprocal": lambda h, k: positive(h).reciprocal(),
    "relu": lambda h, k: h.relu(),
    "repeat": lambda h, k: h.repeat(1, 2),
    "roll": lambda h, k: h.roll(2, 1),
    "rsqrt": lambda h, k: positive(h).rsqrt(),
    "rsub": lambda h, k: torch.rsub(h, k, alpha=2.0) + (1 - h),
    "select": lambda h, k: h.select(1, 2) * k.select(1, 0),
    "select_scatter": part_replaced,
    "sigmoid": lambda h, k: h.sigmoid(),
    "silu": lambda h, k: functional.silu(h),
    "sin": lambda h, k: h.sin(),
    "slice": lambda h, k: h[:, 1:5:2],
    "slice_scatter": part_replaced,
    "sqrt": lambda h, k: positive(h).sqrt(),
    "squeeze": lambda h, k: h[:, :, None].squeeze(2),
    "stack": lambda h, k: torch.stack([h, k], 1),
    "sub": lambda h, k: torch.sub(h, k, alpha=2.0) - 1,
    "sum": lambda h, k: square(h).sum(2),
    "t": lambda h, k: (h.t() * k.t()).t(),
    "tanh": lambda h, k: h.tanh(),
    "transpose": lambda h, k: square(h).transpose(1, 2),
    "tril": lambda h, k: square(h).tril(),
    "triu": lambda h, k: square(h).triu(),
    "unsqueeze": lambda h, k: h.unsqueeze(1) * square(k).repeat(1, 1, 2),
    "view": lambda h, k: h.view(len(h), 3, 2),
    "zero": lambda h, k: torch.cat([(h * 1.0).zero_(), k], 1),
    "zeros_like": lambda h, k: torch.cat([torch.zeros_like(h), k], 1),
}


# Functions of one number without a closed form for their slope, on their domains.


def on(domain: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Sample:
    """Return a sample of a function on its domain."""
    return lambda h, k: function(domain(h))


def anywhere(h: Tensor) -> Tensor:
    return h


def above_one(h: Tensor) -> Tensor:
    return 1 + positive(h)


CURVED: dict[str, Sample] = {
    "_prelu_kernel": on(anywhere, lambda z: functional.prelu(z, torch.linspace(-1, 2, 6, dtype=z.dtype))),
    "acos": on(inside, torch.acos),
    "acosh": on(above_one, torch.acosh),
    "asin": on(inside, torch.asin),
    "asinh": on(anywhere, torch.asinh),
    "atan": on(anywhere, torch.atan),
    "atanh": on(inside, torch.atanh),
    "ceil": lambda h, k: h.ceil() * k,
    "celu": on(anywhere, lambda z: functional.celu(z, 0.5)),
    "clamp": lambda h, k: h.clamp(-0.5, 0.7) + h.clamp(-k.abs(), k.abs()) + k.clamp(max=h[:, :1]),
    "clamp_max": lambda h, k: h.clamp_max(0.5) + h.clamp_max(k),
    "clamp_min": lambda h, k: h.clamp_min(0.5) + h.clamp_min(k) + k.clamp_min(torch.zeros(6, dtype=h.dtype)),
    "cosh": on(anywhere, torch.cosh),
    "digamma": on(positive, torch.digamma),
    "elu": on(anywhere, lambda z: functional.elu(z) + functional.selu(z)),
    "erfc": on(anywhere, torch.erfc),
    "erfinv": on(inside, torch.erfinv),
    "exp2": on(anywhere, torch.exp2),
    "expm1": on(anywhere, torch.expm1),
    "floor": lambda h, k: h.floor() * k,
    "frac": on(anywhere, torch.frac),
    "hardshrink": on(anywhere, functional.hardshrink),
    "hardsigmoid": on(anywhere, functional.hardsigmoid),
    "hardswish": on(anywhere, functional.hardswish),
    "hardtanh": on(anywhere, functional.hardtanh),
    "i0": on(anywhere, torch.i0),
    "lgamma": on(positive, torch.lgamma),
    "log10": on(positive, torch.log10),
    "log1p": on(positive, torch.log1p),
    "log2": on(positive, torch.log2),
    "log_sigmoid_forward": on(anywhere, functional.logsigmoid),
    "logit": on(lambda h: 0.5 + inside(h) / 2, lambda z: torch.logit(z) + torch.logit(2 * z - 0.5, eps=0.1)),
    "mish": on(anywhere, functional.mish),
    "nan_to_num": on(anywhere, torch.nan_to_num),
    "polygamma": on(positive, lambda z: torch.polygamma(0, z) + torch.polygamma(1, z) + torch.polygamma(3, 1 + z)),
    "round": lambda h, k: h.round() * k,
    "sgn": lambda h, k: h.sgn() * k,
    "sign": lambda h, k: h.sign() * k,
    "sinc": on(anywhere, torch.sinc),
    "sinh": on(anywhere, torch.sinh),
    "softplus": on(anywhere, lambda z: functional.softplus(z, 1.5) + functional.softplus(z, 3.0, threshold=1.0)),
    "softshrink": on(anywhere, lambda z: functional.softshrink(z, 0.3)),
    "special_erfcx": on(anywhere, torch.special.erfcx),
    "special_i0e": on(anywhere, torch.special.i0e),
    "special_i1": on(anywhere, torch.special.i1),
    "special_i1e": on(anywhere, torch.special.i1e),
    "special_log_ndtr": on(anywhere, torch.special.log_ndtr),
    "special_ndtri": on(lambda h: 0.5 + inside(h) / 2, torch.special.ndtri),
    "tan": on(inside, torch.tan),
    "threshold": on(anywhere, lambda z: functional.threshold(z, 0.1, 2.0)),
    "trunc": lambda h, k: h.trunc() * k,
}


# Choices. Many choices change during a long step.


def overwritten(h: Tensor, k: Tensor) -> Tensor:
    """Write numbers and tensors by masks of elements, of a column, of examples and of columns, and by indices."""
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
    "amax": lambda h, k: square(h).amax(1) + k.amax((1,), keepdim=True),
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


# Products, convolutions, softmax and norms of variable values.


def own_kernels(h: Tensor, k: Tensor) -> Tensor:
    """Convolve each example with its own kernel."""
    return functional.conv2d(image(h).transpose(0, 1), image(k), padding=1, groups=len(h)).transpose(0, 1)


def fixed_kernels(h: Tensor, k: Tensor) -> Tensor:
    """Apply a convolution and a transposed convolution with constant kernels."""
    kernel = torch.arange(8, dtype=h.dtype).view(2, 1, 2, 2) - 3
    wide = functional.conv2d(image(h), kernel, torch.ones(2, dtype=h.dtype), stride=1, padding=1, dilation=1)
    return functional.conv_transpose2d(wide, kernel, stride=2, output_padding=1)


def channels(h: Tensor) -> Tensor:
    """Return two channels of three pixels."""
    return h.reshape(len(h), 2, 3)


def pair(*numbers: float) -> Tensor:
    """Return a number for each of two channels."""
    return torch.tensor(numbers, dtype=torch.float64)


def batch_normalised(h: Tensor) -> Tensor:
    """Normalise by a running mean and variance, with a gain and a bias."""
    return functional.batch_norm(channels(h), pair(0.5, -1.0), pair(2.0, 0.3), pair(1.5, -0.5), pair(0.1, 0.2))


def group_normalised(h: Tensor, k: Tensor) -> Tensor:
    """Normalise each channel, with a gain and a bias."""
    return functional.group_norm(channels(h), 2, pair(1.5, -0.5), pair(0.1, 0.2)) * channels(k)


def masked_attention(h: Tensor, k: Tensor) -> Tensor:
    """Attend to this and earlier positions, or only to earlier ones, so that the first position attends to none."""
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
