"""Kernels of infinite width: milliseconds of CPU per pair of examples, by engine and precision.

The floor is that of a fused loop in float32, 1.14 ns of CPU per pair of pixels and layer: what its additions,
multiplications and one square root take when nothing waits for memory. neural_tangents runs beside us and takes turns;
the first of them, in which it compiles, is told apart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

import ntkexp
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import chain
from ntkexp.layer.affine import AbstractAffine, Conv, Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.entire import GELU, Erf, Sin
from ntkexp.layer.linear import Flatten, GlobalAvgPool
from ntkexp.layer.norm import LayerNorm
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.pooling import AvgPool
from ntkexp.layer.residual import Residual
from ntkexp.layer.smooth import Tanh
from ntkexp.limit.engine import Engine
from tests.bench.peers import in_turns
from tests.bench.stopwatch import milliseconds, table

HEADER = ("network", "torch 64", "torch 32", "fused 64", "fused 32", "floor 32", "torch/fused 64", "torch/fused 32")
FLOOR = 1.14e-9
ENGINES: dict[str, tuple[Engine, torch.dtype]] = {
    "torch 64": ("torch", torch.float64),
    "torch 32": ("torch", torch.float32),
    "fused 64": ("fused", torch.float64),
    "fused 32": ("fused", torch.float32),
}
KINDS: dict[str, tuple[AbstractLayer, ...]] = {
    "relu": (ReLU(),),
    "circular": (ReLU(),),
    "stride": (ReLU(),),
    "pool": (ReLU(),),
    "residual": (ReLU(),),
    "norm": (LayerNorm(), ReLU()),
    "erf": (Erf(),),
    "gelu": (GELU(),),
    "sin": (Sin(),),
    "tanh": (Tanh(),),
}
"""What follows the layers with weights, which are circular, or in the middle strided or pooled, if they say so."""
OF_IMAGES = tuple(kind for kind in KINDS if kind != "relu")
OF_VECTORS = ("norm", "erf", "gelu", "sin", "tanh")


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
        ends: dict[str, tuple[AbstractLayer, ...]] = {"gap": (GlobalAvgPool(),), "flatten": (Flatten(),), "dense": ()}
        body = tuple(layer for k in range(self.depth - 1) for layer in self.block(k))
        return (*body, *ends[self.head], Dense(features=1))

    def block(self, k: int) -> tuple[AbstractLayer, ...]:
        """One layer with weights, and what belongs to it."""
        if self.head == "dense":
            return Dense(features=8, W_std=1.4, b_std=0.1), *KINDS[self.kind]
        middle = k == self.depth // 2
        stride = 2 if middle and self.kind == "stride" else 1
        conv = Conv(features=8, W_std=1.4, circular=self.kind == "circular", stride=stride)
        if self.kind == "residual":
            return (Residual(branch=(*KINDS[self.kind], conv)),) if k else (conv,)
        return *((AvgPool(),) if middle and self.kind == "pool" else ()), conv, *KINDS[self.kind]

    @property
    def pixel_pairs(self) -> int:
        """Of one pair of examples, in all layers with weights but the last."""
        shapes, end = chain.shapes(self.layers, self.shape), Pairs((), ())
        hidden = [k for k, layer in enumerate(self.layers[:-1]) if isinstance(layer, AbstractAffine | Residual)]
        return sum(chain.need(self.layers[k:], end, shapes[k]).count for k in hidden)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.kind}, {self.head}, depth {self.depth}, {'×'.join(map(str, self.shape))}, n={self.many}"


CASES = (
    Case("gap", 5, (3, 32, 32), 2, 8),
    Case("gap", 11, (3, 32, 32), 1, 6),
    *(Case("gap", 5, (3, 16, 16), 3, 12, kind) for kind in OF_IMAGES if kind != "tanh"),
    Case("gap", 5, (3, 8, 8), 4, 24, "tanh"),
    Case("gap", 5, (1, 6, 6, 6), 3, 12),
    Case("gap", 5, (3, 128), 6, 24),
    Case("flatten", 11, (3, 32, 32), 50, 100),
    *(Case("flatten", 5, (3, 16, 16), 40, 80, kind) for kind in OF_IMAGES),
    Case("dense", 4, (784,), 2000, 5000),
    *(Case("dense", 4, (784,), 500, 2000, kind) for kind in OF_VECTORS),
)
QUICK = (
    *(Case("gap", 3, (1, 6, 6), 2, 4, kind) for kind in KINDS),
    Case("gap", 3, (1, 3, 3, 3), 2, 4),
    Case("flatten", 3, (1, 6, 6), 4, 8),
    *(Case("dense", 3, (5,), 50, 50, kind) for kind in ("relu", "erf", "tanh")),
)


def report(*, quick: bool, peers: Path | None = None, only: str = "") -> str:
    """A row for every network whose name has these words, and more of neural_tangents where it is asked for."""
    threads = torch.get_num_threads()
    cases = [case for case in (QUICK if quick else CASES) if only in case.name]
    with in_turns(peers, "neural_tangents", "infinite", threads) if peers else nullcontext() as theirs:
        rows = [row(case, threads, 1 if quick else 3, theirs) for case in cases]
    header = (*HEADER, *(("neural_tangents 64", "32", "×, 64", "×, 32", "compiling, s") if peers else ()))
    return table("Kernels of infinite width, ms of CPU per pair of examples", header, rows)


def row(case: Case, threads: int, times: int, theirs: Callable[[object], float] | None) -> list[str]:
    """One network; a symmetric kernel counts all its pairs."""
    turns = {name: partial(seconds, act(case, name, threads), pairs(case, name)) for name in ENGINES}
    if theirs:
        words = (case.head, case.depth, case.shape, case.few, case.kind)
        turns |= {f"neural_tangents {bits}": partial(theirs, json.dumps((*words, bits))) for bits in (64, 32)}
    first, *rounds = [{name: turn() for name, turn in turns.items()} for _ in range(times + 1)]
    found = {name: median(each[name] for each in rounds) for name in turns}
    ratios = [f"{found[f'torch {bits}'] / found[f'fused {bits}']:.1f}×" for bits in (64, 32)]
    floor = milliseconds(FLOOR * case.pixel_pairs)
    shown = [case.name, *(milliseconds(found[name]) for name in ENGINES), floor, *ratios]
    if not theirs:
        return shown
    names = [f"neural_tangents {bits}" for bits in (64, 32)]
    gains = [f"{found[f'neural_tangents {bits}'] / found[f'fused {bits}']:.1f}×" for bits in (64, 32)]
    compiling = sum(first[name] - found[name] for name in names) * case.few**2
    return [*shown, *(milliseconds(found[name]) for name in names), *gains, f"{compiling:.1f}"]


def pairs(case: Case, name: str) -> int:
    """How many pairs an engine gets."""
    return (case.few if name.startswith("torch") else case.many) ** 2


def seconds(act: Callable[[], object], pairs: int) -> float:
    """The CPU's seconds for a pair, once: other programs may be at work."""
    start = time.process_time()
    act()
    return (time.process_time() - start) / pairs


def act(case: Case, name: str, threads: int) -> Callable[[], object]:
    """By one engine."""
    engine, dtype = ENGINES[name]
    count = case.few if engine == "torch" else case.many
    x1, x2 = (torch.randn(count, *case.shape, generator=torch.Generator().manual_seed(k), dtype=dtype) for k in (0, 1))
    second = None if case.head == "dense" else x2
    return lambda: ntkexp.infinite_kernel(case.layers, x1, second, engine=engine, threads=threads)
