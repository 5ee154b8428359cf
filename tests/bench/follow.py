"""The cost of following: a bare training step, compared with followed steps in memory and on disk, in float32.

The three loops take turns of `STEPS_PER_CHECKPOINT` steps. The table shows medians of CPU time, and the stored bytes.
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
    """GPT-2 of two layers with an untied readout."""

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
    """A network, a batch of inputs, and its targets."""

    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor


def cases(quick: bool) -> dict[str, Case]:
    """Return an MLP with several batch sizes, a CNN and a GPT-2."""
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
    """A plain training loop."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, case: Case, optimizer: Optimizer) -> Loop:
        """Return a new loop."""
        model = case.make()
        return cls(case, model, optimizer(model.parameters()))

    def turn(self) -> float:
        """Take some steps. Return the CPU seconds of one."""
        start = time.process_time()
        for _ in range(STEPS_PER_CHECKPOINT):
            self.optimizer.zero_grad()
            outputs = self.model(self.case.x).flatten(0, -2)
            functional.cross_entropy(outputs, self.case.y.flatten()).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return (time.process_time() - start) / STEPS_PER_CHECKPOINT


@dataclass
class Cost:
    """CPU seconds of a bare and of followed steps, and the bytes stored per step and weight."""

    bare: float
    in_memory: float
    on_disk: float
    kept: float

    @property
    def row(self) -> list[str]:
        """The cells of the table."""
        times = [milliseconds(each) for each in (self.bare, self.in_memory, self.on_disk)]
        return [*times, *(f"{each / self.bare:.2f}" for each in (self.in_memory, self.on_disk)), f"{self.kept:.1f}"]


def report(*, quick: bool) -> list[Table]:
    """Return a row for each network and optimizer, and the table of attribution."""
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
    """Return the mean loss of each text."""
    each = functional.cross_entropy(outputs.flatten(0, 1), texts[:, 1:].flatten(), reduction="none")
    return each.view(len(texts), -1).mean(1)


def measures(quick: bool) -> Table:
    """Return the CPU seconds of a language model's loop, recorded and attributed to the losses of 8 queries.

    Each loop runs in a new process, because memory that a loop returns to the C library makes the next loop faster. The
    three lengths separate the cost of the start from the cost per step.
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
    """Take a step for each batch of texts."""
    for some in texts:
        optimizer.zero_grad()
        torch.autograd.backward(losses(model(some[:, :-1]), some).mean())
        optimizer.step()


def bare_loop(words: int, batch: int, steps: int) -> list[float]:
    """Return the CPU seconds of a bare loop."""
    texts, model = torch.randint(words, (steps, batch, 33)), Words(words)
    optimizer = torch.optim.AdamW(model.parameters())  # the first optimizer of a process loads modules
    begun = time.process_time()
    train(model, optimizer, texts)
    return [time.process_time() - begun]


def followed_loop(words: int, batch: int, steps: int) -> list[float]:
    """Return the CPU seconds of a followed loop, the CPU seconds of its attribution, and the closure."""
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
    """Return the cost of following a loop, without the first turn."""
    bare, in_memory, on_disk = loops = [Loop.of(case, optimizer) for _ in range(3)]
    seconds: list[list[float]] = [[], [], []]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) / "trace"
        trace = stack.enter_context(follow(in_memory.model, in_memory.optimizer, queries=case.x[:1]))
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
