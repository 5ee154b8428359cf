"""The cost of following small loops: CPU time of recording and attribution, as multiples of the bare loop's.

In small loops, Python's overhead at each parameter and layer matters more than the arithmetic. Bare and followed loops
alternate, and the table shows medians of the ratios. Recording includes the checks before the first step, whose cost
does not depend on the number of steps. The column "its steps" leaves them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.follow import follow
from tests.bench.cell import Table, milliseconds
from tests.bench.follow import Words

QUERIES = 5
ROUNDS = 5


class UNet(nn.Module):
    """A U-Net of two scales, from images to images."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.fine = nn.Sequential(double_convolution(1, channels), nn.ReLU())
        self.coarse = nn.Sequential(nn.MaxPool2d(2), double_convolution(channels, 2 * channels), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.readout = nn.Sequential(double_convolution(2 * channels, channels), nn.ReLU(), nn.Conv2d(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        result: Tensor = self.readout(torch.cat([fine, self.up(self.coarse(fine))], 1))
        return result


def double_convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1))


class NormedResidual(nn.Module):
    """Two convolutions with BatchNorm, and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *normed_convolution(inputs, outputs, 3, stride), nn.ReLU(), *normed_convolution(outputs, outputs, 3, 1)
        )
        self.skip = nn.Sequential(*normed_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.branch(x) + self.skip(x))


def normed_convolution(inputs: int, outputs: int, width: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, width, stride, padding=width // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet10() -> nn.Module:
    """Return a ResNet of ten layers with BatchNorm."""
    blocks = [NormedResidual(*shape) for shape in ((16, 16, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2))]
    stem = (*normed_convolution(3, 16, 3, 1), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    """Return an MLP with 85,000 weights."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


@dataclass
class SmallLoop:
    """A training loop with its batches, and queries with their targets."""

    make: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    x: Tensor  # [step, example, ...]
    y: Tensor
    queries: Tensor
    targets: Tensor
    of_images: bool = False
    many_outputs: bool = False  # omit the attribution of all outputs

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example."""
        if self.of_images:
            each = (outputs - y).square()
        else:
            each = functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
        return each.reshape(len(y), -1).mean(1)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a step for each batch."""
        for x, y in zip(self.x, self.y, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(self.losses(model(x), y).mean())
            optimizer.step()

    def bare(self) -> float:
        """Return the CPU seconds of the bare loop."""
        model = self.make()
        optimizer = self.optimizer(model.parameters())
        begun = time.process_time()
        self.train(model, optimizer)
        return time.process_time() - begun

    def followed(self, *, measured: bool) -> tuple[float, float, float]:
        """Return the CPU seconds of recording, of its steps, and of the attribution."""
        model = self.make()
        optimizer = self.optimizer(model.parameters())
        measure = (lambda outputs, call: self.losses(outputs, self.targets)) if measured else None
        begun = time.process_time()
        with follow(model, optimizer, queries=self.queries, measure=measure) as trace:
            ready = time.process_time()
            self.train(model, optimizer)
            trained = time.process_time()
        ended = time.process_time()
        trace.attribute(quiet=True)
        return ended - begun, trained - ready, time.process_time() - ended

    def row(self, rounds: int) -> list[str]:
        """Return the medians of some rounds."""
        bares = list[float]()
        ratios = list[tuple[float, ...]]()
        for _ in range(rounds):
            before = self.bare()
            measures = self.followed(measured=True)
            outputs = (0.0, 0.0, 0.0) if self.many_outputs else self.followed(measured=False)
            bare = (before + self.bare()) / 2
            bares.append(bare / len(self.x))
            ratios.append(tuple(seconds / bare for seconds in (*measures, outputs[2])))
        cells = [f"{median(column):.2f}" for column in zip(*ratios, strict=True)]
        if self.many_outputs:
            cells[-1] = ""
        return [str(len(self.x)), milliseconds(median(bares)), *cells]


def small_loops(quick: bool) -> dict[str, SmallLoop]:
    """Return an MLP, a U-Net, a ResNet with BatchNorm, and a GPT-2 of two layers."""
    adamw = torch.optim.AdamW

    def momentum(weights: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=1e-2, momentum=0.9)  # type: ignore[arg-type]

    def classes(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape)

    steps, few = (2, 2) if quick else (128, 24)
    images, texts = torch.randn(few, 8, 1, 16, 16), classes(1000, few, 16, 33)
    image_queries, text_queries = torch.randn(QUERIES, 1, 16, 16), classes(1000, QUERIES, 33)
    return {
        "MLP, batches of 32": SmallLoop(
            mlp,
            adamw,
            torch.randn(steps, 32, 64),
            classes(10, steps, 32),
            torch.randn(QUERIES, 64),
            classes(10, QUERIES),
        ),
        "U-Net, batches of 8": SmallLoop(
            *(UNet, adamw, images, torch.randn_like(images)),
            *(image_queries, torch.randn_like(image_queries)),
            of_images=True,
            many_outputs=True,
        ),
        "ResNet-10 with BatchNorm, batches of 8": SmallLoop(
            *(resnet10, momentum, torch.randn(few, 8, 3, 32, 32), classes(10, few, 8)),
            *(torch.randn(QUERIES, 3, 32, 32), classes(10, QUERIES)),
        ),
        "GPT-2, 2 layers, batches of 16": SmallLoop(
            *(Words, adamw, texts[..., :-1], texts[..., 1:]),
            *(text_queries[:, :-1], text_queries[:, 1:]),
            many_outputs=True,
        ),
    }


def report(*, quick: bool) -> list[Table]:
    """Return a row for each loop."""
    torch.manual_seed(0)
    rows = [[name, *loop.row(1 if quick else ROUNDS)] for name, loop in small_loops(quick).items()]
    times = ("recorded / bare", "its steps / bare", f"{QUERIES} measures / bare", "all outputs / bare")
    header = ("network", "steps", "bare ms/step", *times)
    return [Table("Small loops: recording and attribution", header, rows)]
