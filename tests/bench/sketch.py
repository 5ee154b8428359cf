"""Sketched kernels: their error and that of contributions against k, and how far a step is from closing.

One secant step of gradient descent is read, at 48 points with 48 others. Medians over sketches of the relative errors
of K̂ and of −ηK̂ℓ′, plain and with the direction of the step treated apart, and of the error bar over the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.sketch import Sketch, Sketched, error_bar, random_vectors, sketched_gram
from ntkexp.library import reader_of
from ntkexp.path.points import total, unit
from ntkexp.shapes import Weights
from tests.bench.architectures import Encoder, cnn
from tests.bench.cell import Table

RATE = 0.3
HEADER = ("network", "C", "k", "K̂", "closing", "𝒮", "closing", "Σ𝒮", "closing", "bar/error")


def report(quick: bool = False) -> list[Table]:
    """A line for each network, number of outputs and size of the sketch."""
    sizes, seeds, points = ((64,), 1, 6) if quick else ((512, 2048), 3, 48)
    rows = []
    for name in ("mlp",) if quick else ("mlp", "cnn", "transformer"):
        for outputs in (1,) if quick else (1, 10):
            step = take(network(name, outputs), INPUTS[name], points, outputs)
            rows += [line(name, outputs, size, [step.errors(size, seed) for seed in range(seeds)]) for size in sizes]
    return [Table("Sketches of one step: relative errors, plain and closing", HEADER, rows)]


INPUTS = {"mlp": (20,), "cnn": (1, 8, 8), "transformer": (8, 8)}


def network(name: str, outputs: int) -> nn.Module:
    """A small network of each kind."""
    torch.manual_seed(0)
    if name == "cnn":
        return cnn(outputs)
    if name == "transformer":
        return Encoder(outputs)
    return nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, outputs))


def line(name: str, outputs: int, size: int, errors: list[list[float]]) -> list[str]:
    """The medians as cells."""
    return [name, str(outputs), str(size), *(f"{median(each):.2g}" for each in zip(*errors, strict=True))]


@dataclass(frozen=True)
class Step:
    """Both sides of a step, its gradient, and ℓ′."""

    left: Jacobian
    right: Jacobian
    gradient: Weights
    pull: Float[Tensor, "train out"]
    change: Float[Tensor, "probe out"]

    def errors(self, size: int, seed: int) -> list[float]:
        """The errors of one sketch, in the order of the table."""
        kernel, direction = gram(self.left, self.right), unit(self.gradient)
        assert direction is not None
        sketch = Sketch(size, seed, {name: part.shape for name, part in self.gradient.items()})
        along = sketch.of_weights(direction)
        sides = [Sketched(sketch.of(side.blocks)) for side in (self.left, self.right)]
        closing = [
            one.apart(side.applied(direction), along) for one, side in zip(sides, (self.left, self.right), strict=True)
        ]
        found = [sketched_gram(*pair) for pair in (sides, closing)]
        parts, exact = [self.parts(each) for each in found], self.parts(kernel)
        missed = found[1] - kernel
        vectors = random_vectors(missed.shape[2:], seed, missed)
        bar = error_bar(torch.einsum("qcnd,vnd->vqc", missed, vectors)) / float(missed.norm())
        return [
            *(relative(each, kernel) for each in found),
            *(relative(each, exact) for each in parts),
            *(relative(each.sum(2), self.change) for each in parts),
            bar,
        ]

    def parts(self, kernel: Float[Tensor, "probe out train out_"]) -> Float[Tensor, "probe out train"]:
        """−ηKℓ′."""
        return -RATE * torch.einsum("qcnd,nd->qcn", kernel, self.pull)


def take(module: nn.Module, shape: tuple[int, ...], points: int, outputs: int) -> Step:
    """One step of gradient descent under squared loss, on random inputs and targets."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * points, *shape, generator=draw, dtype=torch.float64)
    y = torch.randn(points, outputs, generator=draw, dtype=torch.float64)
    reader, start = reader_of(module.double().eval())
    tape = reader.record(start, x[:points])
    right, pull = reader.tangent(tape), (tape.outputs - y) / points
    gradient = total([right], pull, start)
    end = {name: weight - RATE * gradient[name] for name, weight in start.items()}
    before, after = (reader.record(weights, x[points:]) for weights in (start, end))
    left = reader.secant(before, after).jacobian
    return Step(left, right, gradient, pull, after.outputs - before.outputs)


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖."""
    return float((found - expected).norm() / expected.norm())
