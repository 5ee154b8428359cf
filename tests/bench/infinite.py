"""Kernels of infinite width: milliseconds per pair of examples, by engine and precision.

The floor is that of a fused loop in float32, 0.57 ns per pair of pixels and layer on two cores: what its additions,
multiplications and one square root take when nothing waits for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

import ntkexp
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.entire import GELU, Erf, Sin
from ntkexp.layer.linear import Flatten, GlobalAvgPool
from ntkexp.layer.norm import LayerNorm
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.smooth import Tanh
from ntkexp.limit.engine import Engine
from tests.bench.peers import measured
from tests.bench.stopwatch import medians, milliseconds, table

HEADER = ("network", "torch 64", "torch 32", "fused 64", "fused 32", "floor 32", "torch/fused 64", "torch/fused 32")
FLOOR, CORES = 0.57e-9, 2
ENGINES: dict[str, tuple[Engine, torch.dtype]] = {
    "torch 64": ("torch", torch.float64),
    "torch 32": ("torch", torch.float32),
    "fused 64": ("fused", torch.float64),
    "fused 32": ("fused", torch.float32),
}
KINDS: dict[str, tuple[AbstractLayer, ...]] = {
    "relu": (ReLU(),),
    "circular": (ReLU(),),
    "norm": (LayerNorm(), ReLU()),
    "erf": (Erf(),),
    "gelu": (GELU(),),
    "sin": (Sin(),),
    "tanh": (Tanh(),),
}
"""What follows the layers with weights, which are circular if they are called so."""


@dataclass(frozen=True)
class Case:
    """A network of so many layers with weights, and how many examples each engine gets on each side."""

    head: str
    depth: int
    shape: tuple[int, ...]
    few: int
    many: int
    kind: str = "relu"

    @property
    def layers(self) -> tuple[AbstractLayer, ...]:
        """Convolutions with windows of 3 or dense layers, each with what its kind says, and the readout."""
        conv = Conv(features=8, W_std=1.4, circular=self.kind == "circular")
        hidden = Dense(features=8, W_std=1.4, b_std=0.1) if self.head == "dense" else conv
        ends: dict[str, tuple[AbstractLayer, ...]] = {"gap": (GlobalAvgPool(),), "flatten": (Flatten(),), "dense": ()}
        return (*(hidden, *KINDS[self.kind]) * (self.depth - 1), *ends[self.head], Dense(features=1))

    @property
    def pixel_pairs(self) -> int:
        """Of one pair of examples."""
        pixels = prod(self.shape[1:])
        return pixels**2 if self.head == "gap" else pixels

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.kind}, {self.head}, depth {self.depth}, {'×'.join(map(str, self.shape))}, n={self.many}"


CASES = (
    Case("gap", 5, (3, 32, 32), 2, 8),
    Case("gap", 11, (3, 32, 32), 1, 6),
    Case("flatten", 11, (3, 32, 32), 50, 100),
    Case("dense", 4, (784,), 5000, 5000),
    *(Case("gap", 5, (3, 16, 16), 3, 12, kind) for kind in ("circular", "norm", "erf", "gelu", "sin")),
    Case("gap", 5, (3, 8, 8), 4, 24, "tanh"),
    Case("gap", 5, (1, 6, 6, 6), 3, 12),
    *(Case("dense", 4, (784,), 500, 2000, kind) for kind in ("erf", "tanh")),
)
QUICK = (
    *(Case("gap", 3, (1, 6, 6), 2, 4, kind) for kind in KINDS),
    Case("gap", 3, (1, 3, 3, 3), 2, 4),
    Case("flatten", 3, (1, 6, 6), 4, 8),
    *(Case("dense", 3, (5,), 50, 50, kind) for kind in ("relu", "erf", "tanh")),
)


def report(*, quick: bool, peers: Path | None = None) -> str:
    """A row for every network, and one of neural_tangents where it is asked for."""
    threads = torch.get_num_threads()
    rows = [row(case, threads, 1 if quick else 3, peers) for case in (QUICK if quick else CASES)]
    header = (*HEADER, *(("neural_tangents 64", "32", "×, 64", "×, 32") if peers else ()))
    return table("Kernels of infinite width, ms per pair of examples", header, rows)


def row(case: Case, threads: int, times: int, peers: Path | None) -> list[str]:
    """One network; a symmetric kernel counts all its pairs."""
    found = {name: seconds / pairs(case, name) for name, seconds in medians(acts(case, threads), times).items()}
    floor = FLOOR * CORES / threads * case.pixel_pairs * (case.depth - 1)
    ratios = [f"{found[f'torch {bits}'] / found[f'fused {bits}']:.1f}×" for bits in (64, 32)]
    shown = [case.name, *(milliseconds(found[name]) for name in ENGINES), milliseconds(floor), *ratios]
    if peers is None:
        return shown
    words = (case.head, case.depth, case.shape, case.few, times, case.kind)
    theirs = measured(peers, "neural_tangents", "infinite", *words)
    gains = [f"{theirs[str(bits)] / found[f'fused {bits}']:.0f}×" for bits in (64, 32)]
    return [*shown, *(milliseconds(theirs[str(bits)]) for bits in (64, 32)), *gains]


def pairs(case: Case, name: str) -> int:
    """How many pairs an engine gets."""
    return (case.few if name.startswith("torch") else case.many) ** 2


def acts(case: Case, threads: int) -> Mapping[str, Callable[[], object]]:
    """A kernel between two sides, or, of vectors, of one side with itself, by each engine."""
    return {name: act(case, name, threads) for name in ENGINES}


def act(case: Case, name: str, threads: int) -> Callable[[], object]:
    """By one engine."""
    engine, dtype = ENGINES[name]
    count = case.few if engine == "torch" else case.many
    x1, x2 = (torch.randn(count, *case.shape, generator=torch.Generator().manual_seed(k), dtype=dtype) for k in (0, 1))
    second = None if case.head == "dense" else x2
    return lambda: ntkexp.infinite_kernel(case.layers, x1, second, engine=engine, threads=threads)
