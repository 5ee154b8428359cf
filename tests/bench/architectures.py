"""Small networks of five kinds, and the number of operations that their kernels and training steps need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ntkexp.kernel.record.taping import plain_kernels


class LastState(nn.Module):
    """An LSTM with a readout of the last state."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.readout = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.layer(x)[0][:, -1])
        return result


class Encoder(nn.Module):
    """A transformer block with a readout of the mean over positions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Linear(8, 32), nn.Linear(32, outputs)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.block(self.embedding(x)).mean(1))
        return result


class Residual(nn.Module):
    """Two convolutions with group norms and a skip connection."""

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


# The network of the benchmarks: 64-w-w-w-C, three hidden layers, ReLU, with biases, float64.


INPUTS, HIDDEN = 64, 3


def mlp_of(width: int, outputs: int) -> nn.Module:
    """Return a network with PyTorch's initialization and a fixed seed."""
    torch.manual_seed(0)
    sizes = [INPUTS, *[width] * HIDDEN, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def points(count: int, seed: int) -> Tensor:
    """Draw Gaussian inputs."""
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The least number of operations, for N inputs and C outputs, counted from the layers of a module. A tangent kernel
# needs
#
# forward     the forward pass of the module
# backward    C backward passes, without the gradients of the inputs
# Gram        for a layer with i inputs, o outputs and u uses per example, and half of all pairs: u² (i + C² o) by
#             factors, or C² i o after C u i o per example for multiplied gradients
#
# The features of a step need a forward pass and two backward passes per output.


@dataclass(frozen=True)
class Layer:
    """A layer with weights: its uses per example, its groups, and the inputs and outputs per group."""

    uses: int
    inputs: int
    outputs: int
    groups: int

    def forward(self, examples: int) -> float:
        """Return the operations of its products."""
        return 2.0 * examples * self.uses * self.inputs * self.outputs * self.groups

    def gram(self, examples: int, outputs: int, pairs: float) -> float:
        """Return the operations of its part of the kernel, for some pairs of examples."""
        both = float(outputs) ** 2
        factored = 2 * pairs * self.uses**2 * (self.inputs + both * self.outputs)
        rows = 2 * examples * outputs * self.uses * self.inputs * self.outputs
        return self.groups * min(factored, rows + 2 * pairs * both * self.inputs * self.outputs)


def operations(module: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Return the operations of the tangent kernel, and the count of numbers that it writes."""
    layers, examples = layers_of(module, inputs), len(inputs)
    with plain_kernels(), FlopCounterMode(display=False) as counter:
        outputs = module(inputs)[0].numel()
    forward = float(counter.get_total_flops())
    passes, pairs = forward + outputs * (forward - layers[0].forward(examples)), examples * (examples + 1) / 2
    return passes + sum(layer.gram(examples, outputs, pairs) for layer in layers), float((examples * outputs) ** 2)


def forward_and_back(module: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Return the operations forward, and backward to all activations for one output."""
    with plain_kernels():
        with FlopCounterMode(display=False) as forward:
            outputs = module(inputs)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(outputs.sum(), list(module.parameters()))
    there = float(forward.get_total_flops())
    return there, backward.get_total_flops() - there - layers_of(module, inputs)[-1].forward(len(inputs))


def of_features(module: nn.Module, inputs: Tensor, outputs: int) -> float:
    """Return the operations of the features of a step."""
    forward, backward = forward_and_back(module, inputs)
    return forward + 2 * outputs * backward


def of_training(module: nn.Module, train: Tensor, others: int) -> float:
    """Return the operations of a training step with the path kernel of one output."""
    (forward, backward), layers = forward_and_back(module, train), layers_of(module, train)
    gradient, read = forward, others or len(train)
    grams = sum(layer.gram(len(train) + others, 1, read * len(train)) for layer in layers)
    return forward * (1 + others / len(train)) + backward * (1 + read / len(train)) + gradient + grams


def layers_of(module: nn.Module, inputs: Tensor) -> list[Layer]:
    """Return the layers in call order."""
    found: list[Layer] = []

    def note(layer: nn.Module, _: object, result: Tensor) -> None:
        weight = layer.get_parameter("weight")
        groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
        uses = result.numel() // len(inputs) // weight.shape[0]
        found.append(Layer(uses, weight[0].numel(), weight.shape[0] // groups, groups))

    affine = [each for each in module.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    hooks = [each.register_forward_hook(note) for each in affine]
    with torch.no_grad(), plain_kernels():
        module(inputs)
    for hook in hooks:
        hook.remove()
    return found
