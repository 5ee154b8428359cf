"""Networks as they come from a library, unmodified, each with the shape of an example."""

from __future__ import annotations

from collections.abc import Callable
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

Maker = Callable[[], nn.Module]
"""Makes a network."""


class LastState(nn.Module):
    """A recurrent network, read after the last of some positions."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x)[0]
        return states[:, -1]


class TimeFirst(nn.Module):
    """A recurrent network whose examples lie along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x.transpose(0, 1))[0]
        return states[-1, :, :2]


class Attention(nn.Module):
    """One layer of attention, its mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mixed: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return mixed.mean(1)


class Encoder(nn.Module):
    """A layer of a transformer, with or without a view of later positions."""

    def __init__(self, norm_first: bool, causal: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.mask = nn.Transformer.generate_square_subsequent_mask(3).double() if causal else None

    def forward(self, x: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask.to(x.dtype)
        hidden: Tensor = self.layer(x, src_mask=mask)
        return hidden[:, -1]


class TiedEmbedding(nn.Module):
    """A table of tokens, which is the readout too; the tokens are the ranks of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.table(x.argsort(1)))[:, :2].sum(1))
        return hidden @ self.table.weight.t()


class Gated(nn.Module):
    """SwiGLU after RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.gate = nn.RMSNorm(4), nn.Linear(4, 5), nn.Linear(4, 5)
        self.outer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        outputs: Tensor = self.outer(functional.silu(self.inner(h)) * self.gate(h))
        return outputs


class Rotary(nn.Module):
    """Attention by hand, queries and keys turned by their position."""

    def __init__(self) -> None:
        super().__init__()
        self.pack, self.outer = nn.Linear(4, 12, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin()
        q, k, v = self.pack(x).chunk(3, dim=-1)
        q, k = (u * cos + torch.cat([-u[..., 2:], u[..., :2]], -1) * sin for u in (q, k))
        outputs: Tensor = self.outer(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1])
        return outputs


class Adapter(nn.Module):
    """A weight with one of low rank beside it: W + ½ B A."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 5), nn.Linear(4, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.base(x) + 0.5 * self.up(self.down(x))))
        return outputs


class LowRank(nn.Module):
    """The same as a parametrisation of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(5, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.5 * self.up @ self.down


class Products(nn.Module):
    """A bilinear layer of two readings of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.pairs = nn.Linear(4, 3), nn.Linear(4, 2), nn.Bilinear(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.pairs(torch.tanh(self.left(x)), self.right(x))
        return outputs


class Standardised(nn.Conv2d):
    """A convolution whose kernels have mean zero and variance one, by batch norm of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        kernels = functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-3)
        return functional.conv2d(x, kernels.view_as(self.weight), self.bias)


class Squared(nn.Module):
    """A layer of two inputs, given one twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x, x)
        return outputs


def old_weight_norm(layer: nn.Module) -> nn.Module:
    """The function that torch would rather not have used."""
    with catch_warnings():
        simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Branching(nn.Module):
    """Masks, maxima and clipped values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        z = torch.where(z > 0.1, z * z, z - 1)
        z = torch.maximum(z, torch.tanh(z) + 0.1).clamp(-1, 2)
        outputs: Tensor = self.outer(z.masked_fill(z < -0.5, 0.3)) * z.amax(1, keepdim=True)
        return outputs


def batch_norm() -> nn.Module:
    """With statistics that it did not start with."""
    norm = nn.BatchNorm2d(2)
    norm.running_mean, norm.running_var = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.3])
    return norm


def stack(*layers: nn.Module) -> nn.Module:
    """Layers, and what they give in one row."""
    return nn.Sequential(*layers, nn.Flatten())


NETWORKS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "lstm": (lambda: LastState(nn.LSTM(3, 2, batch_first=True)), (3, 3)),
    "gru": (lambda: LastState(nn.GRU(3, 2, batch_first=True)), (3, 3)),
    "rnn": (lambda: LastState(nn.RNN(3, 2, batch_first=True)), (3, 3)),
    "time first": (TimeFirst, (3, 3)),
    "attention": (Attention, (3, 4)),
    "encoder, norm after": (lambda: Encoder(norm_first=False, causal=False), (3, 4)),
    "encoder, norm before": (lambda: Encoder(norm_first=True, causal=True), (3, 4)),
    "tied embedding": (TiedEmbedding, (4,)),
    "swiglu": (Gated, (4,)),
    "convolution in one dimension": (lambda: stack(nn.Conv1d(2, 2, 3, stride=2), nn.Tanh()), (2, 7)),
    "convolution in two": (
        lambda: stack(
            nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.SiLU(), nn.Conv2d(4, 1, 2, dilation=2, stride=2, bias=False)
        ),
        (2, 4, 4),
    ),
    "convolution in three": (lambda: stack(nn.Conv3d(1, 2, 2, stride=2), nn.Tanh()), (1, 2, 4, 2)),
    "circular": (lambda: stack(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.GELU()), (1, 2, 3)),
    "transposed": (
        lambda: stack(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(), nn.AvgPool2d(4)
        ),
        (2, 2, 2),
    ),
    "transposed in one dimension": (lambda: stack(nn.ConvTranspose1d(2, 2, 3, stride=2, dilation=2)), (2, 3)),
    "batch norm of pixels": (lambda: stack(nn.Conv2d(1, 2, 2), batch_norm(), nn.ReLU()), (1, 2, 3)),
    "group norm": (lambda: stack(nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool1d(2)), (1, 3)),
    "max pooling": (lambda: stack(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, stride=1), nn.Tanh()), (1, 4, 4)),
    "branching": (Branching, (4,)),
    "rotary positions": (Rotary, (3, 4)),
    "adapter beside a weight": (Adapter, (4,)),
    "adapter inside a weight": (
        lambda: nn.Sequential(parametrize.register_parametrization(nn.Linear(4, 5), "weight", LowRank()), nn.Tanh()),
        (4,),
    ),
    "bilinear": (Products, (4,)),
    "bilinear in the inputs": (lambda: Squared(nn.Bilinear(3, 3, 2)), (3,)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 2))), (4,)),
    "weight norm of a convolution": (lambda: stack(weight_norm(nn.Conv1d(2, 2, 2)), nn.Tanh()), (2, 3)),
    "weight norm along another axis": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=1), nn.Tanh()), (4,)),
    "weight norm of everything": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=-1), nn.Tanh()), (4,)),
    "standardised convolution": (lambda: stack(Standardised(2, 3, 2), nn.Tanh()), (2, 3, 3)),
    "weight norm of old": (lambda: nn.Sequential(old_weight_norm(nn.Linear(4, 3)), nn.Tanh()), (4,)),
    "learned slopes": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2), nn.PReLU()), (3,)),
}
