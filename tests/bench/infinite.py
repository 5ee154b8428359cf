"""Kernels of infinite width: milliseconds of CPU per pair of examples, by the fused engine, in both precisions.

The floor is that of a fused loop in float32, 1.14 ns of CPU per pair of pixels and layer: what its additions,
multiplications and one square root take when nothing waits for memory. The engine of torch and neural_tangents take
turns with it. They get fewer examples, in brackets, where theirs take seconds: what a pair takes is extrapolated.
"""

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
from ntkexp.limit.infinite_kernel import Engine
from tests.bench.cell import Cell
from tests.bench.infinite_cases import CASES, QUICK, Case
from tests.bench.machine import Machine
from tests.bench.race import Race
from tests.bench.waiting import Waiting

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
