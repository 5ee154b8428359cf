"""Sums, products, views, writes, and the functions of one number that have closed forms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, positive, square


def part_replaced(h: Tensor, k: Tensor) -> Tensor:
    """Writes into slices and columns."""
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
