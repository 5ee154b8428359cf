"""Modules of a user, which read images row by row, and do not use this package."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, with a readout of the last state."""

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(shape[-1], width, batch_first=True)
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states = self.cell(x.flatten(1, -2))[0]
        outputs: Tensor = self.readout(states[:, -1])
        return outputs


class Modern(nn.Module):
    """A block of recent language models: RMS norms, rotary positions, causal attention, SwiGLU."""

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Linear(shape[-1], width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.pack, self.mixed = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.inner, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.outer, self.readout = nn.Linear(2 * width, width, bias=False), nn.Linear(width, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows(x.flatten(1, -2))
        q, k, v = self.pack(self.norms[0](h)).chunk(3, dim=-1)
        h = h + self.mixed(functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))
        g = self.norms[1](h)
        h = h + self.outer(functional.silu(self.gate(g)) * self.inner(g))
        outputs: Tensor = self.readout(self.norms[2](h)[:, -1])
        return outputs


def turned(x: Tensor) -> Tensor:
    """Rotate each pair of channels by an angle that grows with the position."""
    half = x.shape[-1] // 2
    speed = 0.1 ** torch.arange(half, dtype=x.dtype)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speed
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Plain(nn.Module):
    """A perceptron with one hidden layer, and a function of its outputs."""

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.net(x))

    def end(self, outputs: Tensor) -> Tensor:
        raise NotImplementedError


class Shortened(Plain):
    """A perceptron whose outputs pass through single precision."""

    def end(self, outputs: Tensor) -> Tensor:
        return outputs.float().to(outputs.dtype)


class Entropy(Plain):
    """A perceptron whose outputs pass through an operation without a difference rule."""

    def end(self, outputs: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(2 + outputs.tanh())
        return entropy
