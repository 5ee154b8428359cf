"""Run by an interpreter that has nngeometry: it races with Gram matrices of networks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn


def act_of(kind: str, width: int, outputs: int, examples: int, _: str) -> Callable[[], object]:
    """A Gram matrix, of all examples in one batch, its best setting."""
    from nngeometry.gram import GramMatrix  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    layers: list[nn.Module] = []
    shape: tuple[int, ...] = (64,) if kind == "mlp" else (1, 14, 14)
    if kind == "mlp":
        for before, after in pairwise((64, width, width, width, outputs)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        layers = layers[:-1]
    else:
        for before in (1, width, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(width * 14 * 14, outputs)]
    network = nn.Sequential(*layers).double().eval()
    data = torch.utils.data.TensorDataset(torch.randn(examples, *shape, dtype=torch.float64), torch.zeros(examples))
    loader = torch.utils.data.DataLoader(data, batch_size=examples)
    return lambda: GramMatrix(model=network, loader=loader, function=lambda *batch: network(batch[0]))


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    torch.set_num_threads(asked["threads"])
    from tests.bench.racing import race

    race(asked, act_of)
