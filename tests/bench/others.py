"""The tangent kernel beside other programs at their best, each measured by itself: `--peers` names a folder for them.

A convolutional network gets few examples, since for ten outputs one of the others needs minutes for them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ntkexp.library import tangent_kernel
from tests.bench.architectures import cnn
from tests.bench.network import INPUTS, mlp
from tests.bench.peers import measured
from tests.bench.stopwatch import medians, milliseconds, table

PROGRAMS = ("nngeometry", "neural_tangents")
HEADER = ("network", "out", "N", "ours ms", *(cell for name in PROGRAMS for cell in (f"{name} ms", "ratio")))
CASES = (("mlp", 128, 1, 256), ("mlp", 512, 1, 256), ("mlp", 1024, 1, 256), ("cnn", 64, 1, 32), ("cnn", 64, 10, 32))
QUICK = (("mlp", 16, 1, 16), ("cnn", 4, 2, 4))


def report(*, quick: bool, peers: Path | None = None) -> str:
    """A row for every network."""
    if peers is None:
        return "Beside other programs: not measured without --peers\n"
    rows = [row(*case, 2 if quick else 5, peers) for case in (QUICK if quick else CASES)]
    return table("Tangent kernel beside other programs, MLP 64-w-w-w-C, CNN of 3×w channels on 14×14", HEADER, rows)


def row(kind: str, width: int, outputs: int, examples: int, times: int, peers: Path) -> list[str]:
    """One network."""
    torch.manual_seed(0)
    module: nn.Module = mlp(width, outputs) if kind == "mlp" else cnn(outputs, width, 14, 3).double().eval()
    shape = (INPUTS,) if kind == "mlp" else (1, 14, 14)
    inputs = torch.randn(examples, *shape, dtype=torch.float64)
    ours = medians({"ours": lambda: tangent_kernel(module, inputs)}, times)["ours"]
    shown = [f"{kind} w={width}", str(outputs), str(examples), milliseconds(ours)]
    for program in PROGRAMS:
        found = measured(peers, program, "tangent", kind, width, outputs, examples, times, torch.get_num_threads())
        best = min(found.values())
        shown += [milliseconds(best), f"{best / ours:.1f}×"]
    return shown
