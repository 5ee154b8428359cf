"""Random networks that have a limit, and inputs for them."""

from __future__ import annotations

from random import Random
from typing import Any

from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import GELU, Abs, AbstractPointwise, Cos, Erf, LeakyReLU, Linear, ReLU, Sin
from ntkexp.layer.smooth import Generic, Hermite, Polynomial, SiLU, Tanh

POINTWISE: list[AbstractPointwise] = [
    ReLU(),
    LeakyReLU(slope=0.3),
    Abs(),
    Erf(),
    GELU(),
    Sin(a=1.2, b=0.7, c=0.4),
    Cos(a=0.8, b=1.1, c=-0.3),
    Linear(),
    Tanh(),
    SiLU(),
    Generic(fn="softplus"),
    Polynomial(powers=(0.1, 0.5, 0.2)),
    Hermite(degree=2),
]


def weights(random: Random) -> dict[str, Any]:
    """Return arguments that all affine layers take."""
    frozen = random.randint(0, 5) == 0
    return {
        "W_std": random.choice([0.7, 1.0, 1.3]),
        "b_std": random.choice([0.0, 0.3]),
        "param": random.choice(["ntk", "standard"]),
        "frozen": frozen,
    }


def random_convolution(random: Random, sizes: tuple[int, ...], features: int, stride: int = 0) -> Conv:
    """Draw a convolution. Circular images limit the windows."""
    circular = random.random() < 0.5
    windows = tuple(random.choice([w for w in (1, 3, 5) if not circular or w <= 2 * n + 1]) for n in sizes)
    stride = stride or random.choice([1, 1, 1, 2, 3])
    return Conv(features=features, window=windows, stride=stride, circular=circular, **weights(random))


def random_body(
    random: Random, shape: tuple[int, ...], activations: list[AbstractPointwise]
) -> tuple[AbstractLayer, ...]:
    """Draw the layers of images. The last layer has weights."""
    layers: list[AbstractLayer] = [random_convolution(random, shape[1:], random.randint(1, 4))]
    shape = layers[0].shape(shape)
    for _ in range(random.randint(0, 3)):
        for layer in random_block(random, shape, random.choice(activations)):
            layers.append(layer)
            shape = layer.shape(shape)
        if not isinstance(layers[-1], Residual):
            layers.append(random_convolution(random, shape[1:], random.randint(1, 4)))
            shape = layers[-1].shape(shape)
    return tuple(layers)


def random_block(  # noqa: PLR0911  a table
    random: Random, shape: tuple[int, ...], activation: AbstractPointwise
) -> tuple[AbstractLayer, ...]:
    """Draw layers after a layer with weights: an activation with a norm or pooling, or branches."""

    def convolution(features: int, stride: int = 0) -> Conv:
        return random_convolution(random, shape[1:], features, stride)

    match random.choice(
        ["plain", "norm", "pool", "residual", "strided residual", "pool first", "concatenation", "valid"]
    ):
        case "norm":
            return (LayerNorm(eps=0.1),)
        case "pool" if min(shape[1:]) > 1:
            return (activation, AvgPool(window=tuple(random.randint(1, min(n, 3)) for n in shape[1:])))
        case "pool first" if min(shape[1:]) > 1:
            return (AvgPool(window=2), activation)
        case "valid" if min(shape[1:]) > 2:
            stride = random.randint(1, 2)
            return (activation, Conv(features=3, window=3, stride=stride, valid=True, **weights(random)))
        case "residual":
            return (Residual(branch=(activation, convolution(shape[0], 1))),)
        case "strided residual":
            first, second, shortcut = convolution(3, 2), Conv(features=3), convolution(3, 2)
            return (Residual(branch=(activation, first, ReLU(), second), shortcut=(shortcut,)),)
        case "concatenation":
            stride = random.randint(1, 2)
            one: tuple[AbstractLayer, ...] = (convolution(3, stride), activation)
            two = Residual(branch=(ReLU(), convolution(shape[0], 1))), convolution(random.randint(1, 4), stride)
            return (Concatenation(branches=(one, two, ()) if stride == 1 else (one, two)),)
    return (activation,)


def image_networks(
    random: Random, activations: list[AbstractPointwise] = POINTWISE, most: int = 5
) -> tuple[tuple[AbstractLayer, ...], tuple[int, ...]]:
    """Draw a network, and the shape of its inputs with one to three axes of pixels."""
    axes = random.randint(1, 3)
    largest = {1: most + 2, 2: most - 1, 3: 2}[axes]
    shape = (random.randint(1, 3), *(random.randint(1, largest) for _ in range(axes)))
    body = random_body(random, shape, activations)
    head = random.choice([(Flatten(),), (GlobalAvgPool(),)])
    last = random.choice(activations)
    rest: tuple[AbstractLayer, ...] = (last, *head, Dense(features=2, **weights(random)))
    if random.random() < 0.5:
        rest = (*rest, random.choice(activations), Dense(features=1, **weights(random)))
    return (*body, *rest), shape
