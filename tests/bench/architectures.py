"""A training step with secant features over a plain step, and the tangent kernel of a CNN and of a transformer.

With features means: the step is recorded at its end, and read at a point and along its segment, by a plan that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.library import reader_of, tangent_kernel
from tests.bench.stopwatch import medians, milliseconds, table
from tests.bench.tangent import check, multiplied_out

EXAMPLES = 64


class LastState(nn.Module):
    """An LSTM, read at its last step."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.readout = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.layer(x)[0][:, -1])
        return result


class Encoder(nn.Module):
    """One block of a transformer, read at the mean of its positions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Linear(8, 32), nn.Linear(32, outputs)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.block(self.embedding(x)).mean(1))
        return result


class Residual(nn.Module):
    """Two convolutions with group norms beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = (nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.branch = nn.Sequential(*half, nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def cnn(outputs: int, channels: int = 16, side: int = 8, depth: int = 2) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (1, *[channels] * (depth - 1)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, outputs))


def resnet(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Residual(16), nn.Flatten(), nn.Linear(1024, outputs))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (1, 8, 8)),
    "resnet": (resnet, (1, 8, 8)),
    "transformer": (Encoder, (8, 8)),
    "lstm": (LastState, (8, 4)),
}


def report(*, quick: bool) -> str:
    """Two tables."""
    outputs, times = ((1,), 2) if quick else ((1, 10), 9)
    rows = [step(name, count, times) for name in NETWORKS for count in outputs]
    steps = table(f"A training step with secant features, N = {EXAMPLES}", STEP, rows)
    return f"{steps}\n{kernels(quick=quick)}"


STEP = ("network", "out", "plain ms", "features ms", "ratio")
KERNEL = ("network", "out", "ours ms", "jacrev ms", "ratio")


def step(name: str, outputs: int, times: int) -> list[str]:
    """One network."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, inputs = make(outputs).double().eval(), torch.randn(EXAMPLES, *shape, dtype=torch.float64)
    bare, start = reader_of(module)
    reader = replace(bare, programs=ProgramCache())
    end = {key: weight + 0.01 * torch.randn_like(weight) for key, weight in start.items()}
    before = reader.record(start, inputs)

    def plain() -> None:
        leaves = {key: weight.detach().requires_grad_() for key, weight in start.items()}
        loss = reader.function(leaves, inputs).square().sum()
        for weight, gradient in zip(start.values(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
            torch.sub(weight, gradient, alpha=0.01)

    def features() -> None:
        after = reader.record(end, inputs)
        reader.along(before, after)
        reader.tangent(after)

    features()  # the second round of a program is still held against the usual way
    found = medians({"plain": plain, "features": features}, times)
    ratio = found["features"] / found["plain"]
    return [name, str(outputs), milliseconds(found["plain"]), milliseconds(found["features"]), f"{ratio:.1f}×"]


def kernels(*, quick: bool) -> str:
    """Ours against Jacobians of single examples, which for ten outputs of the CNN would take too long."""
    examples, times = (8, 2) if quick else (256, 3)
    channels, side = (8, 6) if quick else (64, 14)
    shapes = {"cnn": (1, side, side), "transformer": (8, 8)}
    rows = []
    for name, outputs in (("cnn", 1), ("cnn", 10), ("transformer", 1), ("transformer", 10)):
        torch.manual_seed(0)
        module = (cnn(outputs, channels, side, 3) if name == "cnn" else Encoder(outputs)).double().eval()
        rows.append(kernel(module, name, outputs, torch.randn(examples, *shapes[name], dtype=torch.float64), times))
    return table(f"Tangent kernel, CNN of 3×{channels} channels on {side}×{side}, N = {examples}", KERNEL, rows)


def kernel(module: nn.Module, name: str, outputs: int, inputs: Tensor, times: int) -> list[str]:
    """One network."""
    acts: dict[str, Callable[[], object]] = {"ours": lambda: tangent_kernel(module, inputs)}
    with plain_kernels():  # torch cannot batch the derivative of its fused attention
        if outputs == 1:
            check(module, inputs[:4])
            acts["jacrev"] = lambda: multiplied_out(module, inputs)
        found = medians(acts, times)
    theirs = (milliseconds(found["jacrev"]), f"{found['jacrev'] / found['ours']:.1f}×") if outputs == 1 else ("", "")
    return [name, str(outputs), milliseconds(found["ours"]), *theirs]
