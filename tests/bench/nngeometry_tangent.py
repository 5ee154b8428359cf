"""Run by an interpreter that has nngeometry: median seconds of the Gram matrix of one network, as JSON."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from statistics import median


def main(kind: str, width: int, outputs: int, examples: int, times: int, threads: int) -> dict[str, float]:
    """All examples in one batch, its best setting."""
    import torch  # noqa: PLC0415  of another environment
    from nngeometry.gram import GramMatrix  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    torch.set_num_threads(threads)
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
    found = []
    for _ in range(times + 1):
        start = time.perf_counter()
        GramMatrix(model=network, loader=loader, function=lambda *batch: network(batch[0]))
        found.append(time.perf_counter() - start)
    return {"jacobian": median(found[1:])}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(json.loads, sys.argv[1:]))) + "\n")
