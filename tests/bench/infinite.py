"""Kernels of infinite width: CPU time per pair of examples, for a table of networks, in both precisions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

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
from tests.bench.peers import Answer, Peers, Racer

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
"""The layers after each layer with weights. Some kinds also change the padding, the stride or the branches."""
OF_IMAGES = tuple(kind for kind in KINDS if kind != "relu")
OF_VECTORS = ("norm", "concat", "erf", "gelu", "sin", "tanh")


@dataclass(frozen=True)
class Case:
    """A network with `depth` layers of weights, `many` examples for the fused engine and `few` for slower programs."""

    head: str
    depth: int
    shape: tuple[int, ...]
    few: int
    many: int
    kind: str = "relu"

    @property
    def layers(self) -> tuple[AbstractLayer, ...]:
        """The convolutions with windows of 3, or the dense layers, and the readout."""
        ends: dict[str, tuple[AbstractLayer, ...]] = {"gap": (GlobalAvgPool(),), "flatten": (Flatten(),), "dense": ()}
        body = tuple(layer for k in range(self.depth - 1) for layer in self.block(k))
        return (*body, *ends[self.head], Dense(features=1))

    def block(self, k: int) -> tuple[AbstractLayer, ...]:
        """Return a layer with weights, and the layers that belong to it."""
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
        """The number of pairs of pixels for a pair of examples, in all layers with weights except the last."""
        shapes, end = base.shapes(self.layers, self.shape), Pairs((), ())
        hidden = [
            k
            for k, layer in enumerate(self.layers[:-1])
            if isinstance(layer, AbstractAffine | Residual | Concatenation)
        ]
        return sum(base.input_pairs(self.layers[k:], end, shapes[k]).count for k in hidden)

    @property
    def name(self) -> str:
        """The name in the table."""
        shape = "×".join(map(str, self.shape))
        return f"{self.kind}, {self.head}, depth {self.depth}, {shape}, n={self.many} ({self.few})"


def beside(body: tuple[AbstractLayer, ...], thin: AbstractLayer) -> tuple[AbstractLayer, ...]:
    """Concatenate layers with half as many channels of others."""
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


# The floor is a fused loop in float32: its additions, multiplications and square root take 1.14 ns of CPU per pair of
# pixels and layer, without waiting for memory. The torch engine and neural_tangents compute fewer examples, shown in
# brackets, and their time per pair is extrapolated.


TITLE = "Kernels of infinite width, CPU time per pair of n examples; of the torch engine and others, of n in brackets"
FLOOR = 1.14e-9
TYPES = {64: torch.float64, 32: torch.float32}
ROUNDS, ENOUGH = 3, 5.0  # the number of rounds, and the seconds after which no further round starts


@dataclass(frozen=True)
class Turn:
    """A call of one program: its precision in bits, and the number of pairs."""

    who: str
    bits: int
    pairs: int
    act: Callable[[], Answer]


def cells(_: Machine, *, quick: bool, peers: Peers | None, only: str = "") -> list[Cell]:
    """Return two cells for each network whose name contains some words, one for each precision."""
    threads = torch.get_num_threads()
    cases = [case for case in (QUICK if quick else CASES) if only in case.name]
    theirs = peers.racer("neural_tangents", "infinite", threads) if peers else None
    found = []
    with theirs or nullcontext():
        for place, case in enumerate(cases):
            start = time.perf_counter()
            taken = medians(turns_of(case, threads, theirs), 1 if quick else ROUNDS)
            found += [cell(case, bits, taken) for bits in TYPES]
            spent = time.perf_counter() - start
            sys.stderr.write(f"  {place + 1} of {len(cases)}: {case.name}: {spent:.3g} s for all turns\n")
    return found


def cell(case: Case, bits: int, taken: Mapping[tuple[str, int], Answer]) -> Cell:
    """Return the cell of one precision. A symmetric kernel counts all pairs."""
    seconds = {who: found for (who, size), found in taken.items() if size == bits and isinstance(found, float)}
    failed = {who: found for (who, size), found in taken.items() if size == bits and isinstance(found, str)}
    ours, torchs = seconds.pop("fused"), seconds.pop("torch")
    floor = FLOOR * case.pixel_pairs if bits == 32 else None
    return Cell(f"{case.name}, float{bits}", ours, seconds, floor, failed, {"torch engine": torchs})


def turns_of(case: Case, threads: int, theirs: Racer | None) -> list[Turn]:
    """Return the programs that take turns."""
    counts: dict[Engine, int] = {"fused": case.many, "torch": case.few}
    turns = [
        Turn(engine, bits, count**2, partial(seconds, kernel(case, engine, count, bits, threads)))
        for engine, count in counts.items()
        for bits in TYPES
    ]
    words = (case.head, case.depth, case.shape, case.few, case.kind)
    if theirs:
        turns += [Turn("neural_tangents", b, case.few**2, partial(theirs.ask, (*words, b))) for b in TYPES]
    return turns


def medians(turns: Sequence[Turn], rounds: int) -> dict[tuple[str, int], Answer]:
    """Return the median seconds per pair, without the first round. A program that fails once is not called again."""
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
    """Return the CPU seconds of one call."""
    start = time.process_time()
    act()
    return time.process_time() - start


def kernel(case: Case, engine: Engine, count: int, bits: int, threads: int) -> Callable[[], object]:
    """Return the computation of a kernel of `count` examples."""
    x1, x2 = (
        torch.randn(count, *case.shape, generator=torch.Generator().manual_seed(k), dtype=TYPES[bits]) for k in (0, 1)
    )
    second = None if case.head == "dense" else x2
    return lambda: ntkexp.infinite_kernel(case.layers, x1, second, engine=engine, threads=threads)
