"""Transformer encoders, on patches of images or on tokens (Vaswani et al. 2017;
pre-norm).

    h ← h + attention(norm(h))
    h ← h + W₂ σ(W₁ norm(h))   or, gated,   h ← h + W₂ (silu(W₁ norm(h)) ⊙ W₃ norm(h))

Tokens select rows of an embedding table. The readout takes the last position; if
`tied`, its weight is the embedding table. Images are cut into square patches, and other
inputs into single features. The readout then takes the mean over positions."""

from __future__ import annotations

from math import sqrt
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.component import Count, Depth
from ntkexp.init import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, LearningTask
from ntkexp.shapes import Shape
from ntkexp.stream import normal


class Transformer(AbstractArchitecture):
    """Transformer encoders: `depth` blocks of `width` channels,
    with up to `heads` attention heads.

    The number of heads is the largest number ≤ `heads` that divides `width`.
    """

    width: Count = 32
    depth: Depth = 1
    heads: Depth = 4
    patch: Depth = 4
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    causal: bool = False
    tied: bool = False

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        heads = largest_divisor(self.heads, self.width)
        self.refuse_unfit(task)
        tokens = Tokens(task, self.width, generator) if task.vocabulary else None
        embedding = tokens or Patches(self, init, task.shape, generator)
        blocks = [EncoderBlock(self, init, heads, generator) for _ in range(self.depth)]
        readout = init.readout(task.outputs).build((self.width,), generator)
        if tokens is not None and self.tied:
            readout = Tied(tokens)
        return Encoder(embedding, blocks, self.width, readout)

    def refuse_unfit(self, task: LearningTask) -> None:
        """Raise if `tied` is set, but the network does not have one output per
        token."""
        if self.tied and task.outputs != task.vocabulary:
            raise Mistake(
                f"model.tied=true reads one output per token, {task.vocabulary} of them, and the "
                f"data has {task.outputs}; choose model.tied=false, or loss=cross_entropy and data "
                "of tokens"
            )


class Encoder(nn.Module):
    """Embedding, blocks, norm, and a readout. The readout sees the last position if the
    inputs are tokens, else the mean over positions."""

    def __init__(
        self,
        embedding: nn.Module,
        blocks: list[EncoderBlock],
        width: int,
        readout: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.readout = readout

    def forward(self, x: Tensor) -> Float[Tensor, "example out"]:
        hidden = self.blocks(self.embedding(x))
        read = hidden[:, -1] if isinstance(self.embedding, Tokens) else hidden.mean(1)
        outputs: Tensor = self.readout(self.norm(read))
        return outputs


class Tokens(nn.Module):
    """Embeddings of tokens plus embeddings of positions."""

    def __init__(
        self, task: LearningTask, width: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.table = nn.Parameter(normal(generator, task.vocabulary, width))
        self.positions = nn.Parameter(normal(generator, *task.shape, width))

    def forward(
        self, x: Float[Tensor, "example token"]
    ) -> Float[Tensor, "example position width"]:
        return nn.functional.embedding(x.long(), self.table) + self.positions


class Tied(nn.Module):
    """A readout that shares the embedding table of the tokens."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(
        self, x: Float[Tensor, "example width"]
    ) -> Float[Tensor, "example out"]:
        return torch.mm(x / sqrt(x.shape[1]), self.tokens.table.t())


class Patches(nn.Module):
    """Dense embeddings of patches of an image, or of single features,
    plus embeddings of positions."""

    def __init__(
        self,
        model: Transformer,
        init: AbstractInit,
        shape: Shape,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.side = fitting_patch(model.patch, shape)
        count, size = cut_patches(torch.zeros(1, *shape), self.side).shape[1:]
        self.dense = init.dense(model.width).build((size,), generator)
        self.positions = nn.Parameter(normal(generator, count, model.width))

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, "example position width"]:
        return at_each_position(self.dense, cut_patches(x, self.side)) + self.positions


class EncoderBlock(nn.Module):
    """Attention and a feed-forward network, each with a norm before and a shortcut."""

    def __init__(
        self,
        model: Transformer,
        init: AbstractInit,
        heads: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()

        def dense(inputs: int, features: int) -> nn.Module:
            return init.dense(features).build((inputs,), generator)

        width = model.width
        self.heads = heads
        self.causal = model.causal
        self.gated = model.feed_forward == "swiglu"
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, dtype=torch.float64) for _ in range(2)
        )
        self.query, self.key, self.value, self.mixed = (
            dense(width, width) for _ in range(4)
        )
        self.inner = dense(width, 4 * width)
        self.gate = dense(width, 4 * width) if self.gated else None
        self.outer = dense(4 * width, width)

    def forward(
        self, x: Float[Tensor, "example position width"]
    ) -> Float[Tensor, "example position width"]:
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        inner = at_each_position(self.inner, h)
        if self.gate is None:
            return x + at_each_position(self.outer, nn.functional.gelu(inner))
        return x + at_each_position(
            self.outer, nn.functional.silu(inner) * at_each_position(self.gate, h)
        )

    def attention(
        self, h: Float[Tensor, "example position width"]
    ) -> Float[Tensor, "example position width"]:
        """Return softmax(QKᵀ/√d) V of all heads, mixed by a dense layer."""

        def project(dense: nn.Module) -> Float[Tensor, "example head position size"]:
            rows = at_each_position(dense, h)
            return rows.view(*rows.shape[:2], self.heads, -1).transpose(1, 2)

        q = project(self.query)
        k = project(self.key)
        v = project(self.value)
        scores = (q / sqrt(q.shape[-1])) @ k.transpose(2, 3)
        if self.causal:
            later = torch.ones(
                scores.shape[-2:], dtype=torch.bool, device=h.device
            ).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return at_each_position(self.mixed, mixed)


def at_each_position(
    module: nn.Module, x: Float[Tensor, "example position inputs"]
) -> Float[Tensor, "example position features"]:
    """Apply a dense layer at every position."""
    rows: Tensor = module(x.flatten(0, 1))
    return rows.view(*x.shape[:2], -1)


def largest_divisor(most: int, width: int) -> int:
    """Return the largest number of heads ≤ `most` that divides the width.

    >>> largest_divisor(4, 6)
    3
    """
    return next(heads for heads in range(min(most, width), 0, -1) if width % heads == 0)


def fitting_patch(patch: int, shape: Shape) -> int:
    """Return the largest patch side ≤ `patch` that divides both sides
    of an image; 1 for other inputs."""
    if len(shape) != 3:
        return 1
    return next(
        side
        for side in range(min(patch, *shape[1:]), 0, -1)
        if shape[1] % side == shape[2] % side == 0
    )


def cut_patches(
    x: Float[Tensor, " example *shape"], side: int
) -> Float[Tensor, "example position size"]:
    """Cut images into square patches, row by row,
    and other inputs into single features.

    >>> cut_patches(torch.arange(16.0).view(1, 1, 4, 4), 2)[0, 1]
    tensor([2., 3., 6., 7.])
    """
    if x.dim() != 4:
        return x.flatten(1)[:, :, None]
    example, channel, rows, columns = x.shape
    cut = x.reshape(example, channel, rows // side, side, columns // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(example, -1, channel * side * side)
