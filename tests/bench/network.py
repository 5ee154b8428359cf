"""The network of the benchmarks: 64-w-w-w-C, three hidden layers, ReLU, with biases, float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

INPUTS, HIDDEN = 64, 3


def mlp(width: int, outputs: int) -> nn.Module:
    """With PyTorch's own initialisation, from a fixed seed."""
    torch.manual_seed(0)
    sizes = [INPUTS, *[width] * HIDDEN, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def points(count: int, seed: int) -> Tensor:
    """Gaussian inputs."""
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
