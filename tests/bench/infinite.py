"""Networks whose kernels of infinite width are measured, and of how many examples."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeAlias

import torch

import ntkexp
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.layer.affine import AbstractAffine, Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import GELU, Abs, Erf, ReLU, Sin
from ntkexp.layer.smooth import Tanh
from ntkexp.limit.infinite_kernel import Engine
from tests.bench.cell import Cell, Machine
from tests.bench.peers import Race, Waiting

KINDS: dict[str, tuple[AbstractLayer, ...]] = {
    "relu": (ReLU(),),
    "circular": (ReLU(),),
    "stride": (ReLU(),),
    "pool": (ReLU(),),
    "residual": (ReLU(),),
    "concat": (ReLU(),),
    "norm": (LayerNorm(), ReLU()),
    "erf": (Erf(),),
    "gelu": (GELU(),),
    "sin": (Sin(),),
    "tanh": (Tanh(),),
}
"""What follows the layers with weights, which are circular, beside others, or in the middle strided or pooled, if they
say so.
"""
OF_IMAGES = tuple(kind for kind in KINDS if kind != "relu")
OF_VECTORS = ("norm", "concat", "erf", "gelu", "sin", "tanh")


@dataclass(frozen=True)
class Case:
    """A network of so many layers with weights; the fused engine gets many examples on each side, others few."""

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
            body = (Dense(features=8, W_std=1.4, b_std=0.1), *KINDS[self.kind])
            return beside(body, Dense(features=4)) if self.kind == "concat" else body
        middle = k == self.depth // 2
        stride = 2 if middle and self.kind == "stride" else 1
        conv = Conv(features=8, W_std=1.4, circular=self.kind == "circular", stride=stride)
        if self.kind == "residual":
            return (Residual(branch=(*KINDS[self.kind], conv)),) if k else (conv,)
        if self.kind == "concat":
            return beside((conv, *KINDS[self.kind]), Conv(features=4, window=1))
        return *((AvgPool(),) if middle and self.kind == "pool" else ()), conv, *KINDS[self.kind]

    @property
    def pixel_pairs(self) -> int:
        """Of one pair of examples, in all layers with weights but the last."""
        shapes, end = base.shapes(self.layers, self.shape), Pairs((), ())
        hidden = [
            k
            for k, layer in enumerate(self.layers[:-1])
            if isinstance(layer, AbstractAffine | Residual | Concatenation)
        ]
        return sum(base.need(self.layers[k:], end, shapes[k]).count for k in hidden)

    @property
    def name(self) -> str:
        """For the table."""
        shape = "×".join(map(str, self.shape))
        return f"{self.kind}, {self.head}, depth {self.depth}, {shape}, n={self.many} ({self.few})"


def beside(body: tuple[AbstractLayer, ...], thin: AbstractLayer) -> tuple[AbstractLayer, ...]:
    """Layers, and half as many channels of others."""
    return (Concatenation(branches=(body, (thin, Abs()))),)


CASES = (
    Case("gap", 5, (3, 32, 32), 2, 6),
    Case("gap", 11, (3, 32, 32), 1, 4),
    *(Case("gap", 5, (3, 16, 16), 3, 12, kind) for kind in OF_IMAGES if kind != "tanh"),
    Case("gap", 5, (3, 8, 8), 2, 12, "tanh"),
    Case("gap", 5, (1, 6, 6, 6), 3, 12),
    Case("gap", 5, (3, 128), 6, 24),
    Case("flatten", 11, (3, 32, 32), 50, 100),
    *(Case("flatten", 5, (3, 16, 16), 40, 80, kind) for kind in OF_IMAGES if kind not in {"pool", "tanh"}),
    Case("flatten", 5, (3, 16, 16), 8, 80, "pool"),
    Case("flatten", 5, (3, 16, 16), 10, 40, "tanh"),
    Case("dense", 4, (784,), 2000, 5000),
    *(Case("dense", 4, (784,), 500, 2000, kind) for kind in OF_VECTORS if kind != "tanh"),
    Case("dense", 4, (784,), 100, 2000, "tanh"),
)
QUICK = (
    *(Case("gap", 3, (1, 6, 6), 2, 4, kind) for kind in ("circular", "stride", "pool", "residual", "concat")),
    Case("gap", 3, (1, 3, 3, 3), 2, 4),
    Case("flatten", 3, (1, 6, 6), 4, 8),
    *(Case("dense", 3, (5,), 50, 50, kind) for kind in ("relu", "tanh")),
)


# Kernels of infinite width: milliseconds of CPU per pair of examples, by the fused engine, in both precisions.
#
# The floor is that of a fused loop in float32, 1.14 ns of CPU per pair of pixels and layer: what its additions,
# multiplications and one square root take when nothing waits for memory. The engine of torch and neural_tangents take
# turns with it. They get fewer examples, in brackets, where theirs take seconds: what a pair takes is extrapolated.


TITLE = "Kernels of infinite width, CPU time per pair of n examples; of the torch engine and others, of n in brackets"
FLOOR = 1.14e-9
TYPES = {64: torch.float64, 32: torch.float32}
COMPILING = 50.0  # seconds, more than `--seconds`, that another program has if a network is new to it
ROUNDS, ENOUGH = 3, 5.0  # at most so many count, and none begins after so many seconds, but for the first

Told: TypeAlias = float | str
"""Seconds, or why there are none."""


@dataclass(frozen=True)
class Turn:
    """Somebody's turn: with numbers of so many bits, for the kernel of so many pairs."""

    who: str
    bits: int
    pairs: int
    act: Callable[[], Told]


def cells(_: Machine, *, quick: bool, peers: Race | None, only: str = "") -> list[Cell]:
    """Two for every network whose name has these words, one in each precision."""
    threads = torch.get_num_threads()
    cases = [case for case in (QUICK if quick else CASES) if only in case.name]
    theirs = Waiting(peers, "neural_tangents", "infinite", COMPILING + peers.seconds, threads) if peers else None
    found = []
    with theirs or nullcontext():
        for place, case in enumerate(cases):
            start = time.perf_counter()
            taken = medians(turns_of(case, threads, theirs), 1 if quick else ROUNDS)
            found += [cell(case, bits, taken) for bits in TYPES]
            spent = time.perf_counter() - start
            sys.stderr.write(f"  {place + 1} of {len(cases)}: {case.name}: {spent:.3g} s for all turns\n")
    return found


def cell(case: Case, bits: int, taken: Mapping[tuple[str, int], Told]) -> Cell:
    """One precision; a symmetric kernel counts all its pairs."""
    seconds = {who: found for (who, size), found in taken.items() if size == bits and isinstance(found, float)}
    failed = {who: found for (who, size), found in taken.items() if size == bits and isinstance(found, str)}
    ours, torchs = seconds.pop("fused"), seconds.pop("torch")
    floor = FLOOR * case.pixel_pairs if bits == 32 else None
    return Cell(f"{case.name}, float{bits}", ours, seconds, floor, failed, {"torch engine": torchs})


def turns_of(case: Case, threads: int, theirs: Waiting | None) -> list[Turn]:
    """What takes turns, neural_tangents among them where it is asked for."""
    counts: dict[Engine, int] = {"fused": case.many, "torch": case.few}
    turns = [
        Turn(engine, bits, count**2, partial(seconds, kernel(case, engine, count, bits, threads)))
        for engine, count in counts.items()
        for bits in TYPES
    ]
    words = (case.head, case.depth, case.shape, case.few, case.kind)
    if theirs:
        asked = {bits: partial(theirs.ask, json.dumps((*words, bits))) for bits in TYPES}
        turns += [Turn("neural_tangents", bits, case.few**2, asked[bits]) for bits in TYPES]
    return turns


def medians(turns: Sequence[Turn], rounds: int) -> dict[tuple[str, int], Told]:
    """Of everybody the median for a pair, after a round that does not count; who fails once has no other turn."""
    told: dict[tuple[str, int], list[float]] = {(turn.who, turn.bits): [] for turn in turns}
    failed: dict[tuple[str, int], str] = {}
    end = time.perf_counter() + ENOUGH
    for number in range(1 + rounds):
        if number > 1 and time.perf_counter() > end:
            break
        for turn in turns:
            key = turn.who, turn.bits
            answer = failed.get(key) or turn.act()
            if isinstance(answer, str):
                failed[key] = answer
            elif number:
                told[key].append(answer / turn.pairs)
    return {key: failed.get(key) or median(found) for key, found in told.items()}


def seconds(act: Callable[[], object]) -> float:
    """The CPU's seconds, once: other programs may be at work."""
    start = time.process_time()
    act()
    return time.process_time() - start


def kernel(case: Case, engine: Engine, count: int, bits: int, threads: int) -> Callable[[], object]:
    """That of so many examples, or with as many others."""
    x1, x2 = (
        torch.randn(count, *case.shape, generator=torch.Generator().manual_seed(k), dtype=TYPES[bits]) for k in (0, 1)
    )
    second = None if case.head == "dense" else x2
    return lambda: ntkexp.infinite_kernel(case.layers, x1, second, engine=engine, threads=threads)
