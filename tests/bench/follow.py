"""What following costs: a step of somebody's loop beside the same step followed, in memory and on disk, in float32.

The three take turns of as many steps as lie between weights that are kept on disk; told are medians over turns, of the
time that all threads of the process computed, so that other programs matter less, and the bytes that a step keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.store.checkpoints import STEPS_PER_CHECKPOINT
from ntkexp.foreign_loop.store.memory import LoopInMemory
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from tests.bench.architectures import cnn
from tests.bench.cell import Table, milliseconds
from tests.bench.kernels import Block

Optimizer: TypeAlias = Callable[..., torch.optim.Optimizer]


class Words(nn.Module):
    """GPT-2 of two layers, with a readout of its own."""

    def __init__(self, words: int = 1000, longest: int = 64, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks, self.norm = nn.Sequential(Block(width, 2), Block(width, 2)), nn.LayerNorm(width)
        self.readout = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.words(x) + self.places.weight[: x.shape[1]])
        result: Tensor = self.readout(self.norm(hidden))
        return result


@dataclass
class Case:
    """A network, a batch of inputs, and what its outputs are to be."""

    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor


def cases(quick: bool) -> dict[str, Case]:
    """The three that are promised, one of them with batches of several sizes."""
    width, batch = (16, 8) if quick else (512, 128)
    sizes = (batch,) if quick else (batch // 4, batch, 4 * batch)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    small, texts = batch // 2, torch.randint(1000, (batch // 8, 65))
    return {
        **{f"MLP w={width}, batch {n}": Case(mlp, torch.randn(n, 64), torch.randint(10, (n,))) for n in sizes},
        "CNN": Case(lambda: cnn(10, 32, 16, 3), torch.randn(small, 1, 16, 16), torch.randint(10, (small,))),
        "GPT-2, 2 layers": Case(Words, texts[:, :-1], texts[:, 1:]),
    }


@dataclass
class Loop:
    """Training as people write it."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, case: Case, optimizer: Optimizer) -> Loop:
        """A new one."""
        model = case.make()
        return cls(case, model, optimizer(model.parameters()))

    def turn(self) -> float:
        """Take some steps; the seconds of one."""
        start = time.process_time()
        for _ in range(STEPS_PER_CHECKPOINT):
            self.optimizer.zero_grad()
            outputs = self.model(self.case.x).flatten(0, -2)
            functional.cross_entropy(outputs, self.case.y.flatten()).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return (time.process_time() - start) / STEPS_PER_CHECKPOINT


@dataclass
class Cost:
    """Seconds of a step, bare and followed, and the bytes that are kept of one in memory, for each weight."""

    bare: float
    held: float
    on_disk: float
    kept: float

    @property
    def row(self) -> list[str]:
        """The cells of a table."""
        times = [milliseconds(each) for each in (self.bare, self.held, self.on_disk)]
        return [*times, *(f"{each / self.bare:.2f}" for each in (self.held, self.on_disk)), f"{self.kept:.1f}"]


def report(quick: bool = False) -> list[Table]:
    """A row for every network and optimizer."""
    torch.manual_seed(0)
    rows = []
    optimizers: dict[str, Optimizer] = {
        "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
        "AdamW": torch.optim.AdamW,
    }
    for name, case in cases(quick).items():
        for kind, optimizer in optimizers.items():
            rows.append([name, kind, *measured(case, optimizer, 1 if quick else 10).row])
    times = ("bare ms", "in memory ms", "on disk ms", "in memory / bare", "on disk / bare")
    header = ("network", "optimizer", *times, "bytes/weight/step")
    return [Table("Following: a step, bare and followed", header, rows), measures(quick)]


def losses(outputs: Tensor, texts: Tensor) -> Tensor:
    """The mean loss of the next word of each text."""
    each = functional.cross_entropy(outputs.flatten(0, 1), texts[:, 1:].flatten(), reduction="none")
    return each.view(len(texts), -1).mean(1)


def measures(quick: bool) -> Table:
    """A loss of each of 8 queries of a language model: its loop, recorded and attributed, in seconds of processors.

    Each loop has a process of its own, as a user's has: memory that one leaves to the C library makes the next one
    faster. Three lengths show what is found out once and what every step takes.
    """
    words, batch, rows = 50 if quick else 50257, 2 if quick else 16, []
    for steps in (1, 2) if quick else (8, 24, 60):
        seconds: list[float] = []
        for trained in (bare_loop, followed_loop):
            with ThreadPoolExecutor(1) if quick else ProcessPoolExecutor(1, get_context("spawn")) as alone:
                seconds += alone.submit(trained, words, batch, steps).result()
        bare, recorded, attributed, closure = seconds
        ratios = [f"{each / bare:.2f}" for each in (recorded, attributed)]
        rows.append([str(steps), *(f"{each:.2f}" for each in (bare, recorded, attributed)), *ratios, f"{closure:.1g}"])
    header = ("steps", "bare s", "recorded s", "attributed s", "recorded / bare", "attributed / bare", "closure")
    return Table(f"Measure: a loss of 8 queries of a GPT-2 with two layers and {words:,} words", header, rows)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, texts: Tensor) -> None:
    """A step for each batch of texts."""
    for some in texts:
        optimizer.zero_grad()
        torch.autograd.backward(losses(model(some[:, :-1]), some).mean())
        optimizer.step()


def bare_loop(words: int, batch: int, steps: int) -> list[float]:
    """The seconds of processors that training takes."""
    texts, model = torch.randint(words, (steps, batch, 33)), Words(words)
    optimizer = torch.optim.AdamW(model.parameters())  # the first of a process loads much, which is no step's time
    begun = time.process_time()
    train(model, optimizer, texts)
    return [time.process_time() - begun]


def followed_loop(words: int, batch: int, steps: int) -> list[float]:
    """Those of a training that is followed, those of its attribution, and the closure."""
    texts, model, queries = torch.randint(words, (steps, batch, 33)), Words(words), torch.randint(words, (8, 33))
    optimizer, times = torch.optim.AdamW(model.parameters()), [time.process_time()]
    with follow(
        model, optimizer, queries=queries[:, :-1], measure=lambda f, call: losses(f, queries), memory_gb=16
    ) as trace:
        train(model, optimizer, texts)
    times.append(time.process_time())
    closure = float(trace.attribute(quiet=True)["closure"].max())
    times.append(time.process_time())
    return [*(end - begun for begun, end in pairwise(times)), closure]


def measured(case: Case, optimizer: Optimizer, turns: int) -> Cost:
    """What following costs this loop, from its second turn on."""
    bare, held, on_disk = loops = [Loop.of(case, optimizer) for _ in range(3)]
    seconds: list[list[float]] = [[], [], []]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) / "trace"
        trace = stack.enter_context(follow(held.model, held.optimizer, queries=case.x[:1]))
        stack.enter_context(follow(on_disk.model, on_disk.optimizer, queries=case.x[:1], to=folder))
        for _ in range(turns + 1):
            for each, found in zip(loops, seconds, strict=True):
                found.append(each.turn())
    assert isinstance(trace.steps, ReplayedSteps)
    assert isinstance(trace.steps.loop, LoopInMemory)
    kept = trace.steps.loop.nbytes / len(trace.steps)
    weights = sum(weight.numel() for weight in bare.model.parameters())
    one, two, three = (median(found[1:]) for found in seconds)
    return Cost(one, two, three, kept / weights)
