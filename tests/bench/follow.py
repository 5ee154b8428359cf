"""What following costs: a step of somebody's loop beside the same step followed, in float32, and the bytes it keeps.

The two take turns of a few steps each; told are medians over single steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.keeper import bytes_of
from tests.bench.architectures import cnn
from tests.bench.language import Block
from tests.bench.stopwatch import milliseconds, table

TURN = 5  # steps
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
    """The three that are promised."""
    width, batch = (16, 8) if quick else (512, 128)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    small, texts = batch // 2, torch.randint(1000, (batch // 8, 65))
    return {
        f"MLP w={width}": Case(mlp, torch.randn(batch, 64), torch.randint(10, (batch,))),
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

    def step(self) -> float:
        """Take a step; the seconds that it took."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        outputs = self.model(self.case.x).flatten(0, -2)
        functional.cross_entropy(outputs, self.case.y.flatten()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.perf_counter() - start


def report(quick: bool = False) -> str:
    """A row for every network and optimizer."""
    torch.manual_seed(0)
    rows = []
    optimizers: dict[str, Optimizer] = {
        "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
        "AdamW": torch.optim.AdamW,
    }
    for name, case in cases(quick).items():
        for kind, optimizer in optimizers.items():
            bare, followed, kept = measured(case, optimizer, 1 if quick else 12)
            cells = [milliseconds(bare), milliseconds(followed), f"{followed / bare:.2f}", f"{kept:.1f}"]
            rows.append([name, kind, *cells])
    header = ("network", "optimizer", "bare ms", "followed ms", "ratio", "bytes/weight/step")
    return table("Following: a step, bare and followed", header, rows)


def measured(case: Case, optimizer: Optimizer, turns: int) -> tuple[float, float, float]:
    """Median seconds of a step, bare and followed, and the bytes that are kept of one, by weight."""
    bare, followed = Loop.of(case, optimizer), Loop.of(case, optimizer)
    seconds: tuple[list[float], list[float]] = ([], [])
    with follow(followed.model, followed.optimizer, queries=case.x[:1]) as trace:
        for _ in range(turns + 1):
            for each, found in zip((bare, followed), seconds, strict=True):
                found += [each.step() for _ in range(TURN)]
    kept = [bytes_of(step) for step, _ in trace.steps.forwards()]
    weights = sum(weight.numel() for weight in followed.model.parameters())
    one, other = (median(found[TURN:]) for found in seconds)
    return one, other, median(kept) / weights
