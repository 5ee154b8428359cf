"""Layers: what shape they give, and that activations are the functions they are named after."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from ntkexp.layer.affine import Dense
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import LeakyReLU
from ntkexp.layer.spec import activation, activations
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps
ACTIVATIONS = {  # and none of those that other tests define, whichever are read first
    name: layer for name, layer in activations().items() if type(layer).__module__.startswith("ntkexp.")
}
FORMULAS = {
    "abs": lambda z: torch.maximum(z, -z),
    "cos": lambda z: torch.sin(z + pi / 2),
    "erf": torch.special.erf,
    "gelu": lambda z: z * torch.special.ndtr(z),
    "hermite": lambda z: (z * z - 1) / sqrt(2),
    "leaky_relu": lambda z: z.clamp(min=0) + 0.1 * z.clamp(max=0),
    "linear": lambda z: z,
    "relu": lambda z: z.clamp(min=0),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "sin": torch.sin,
    "tanh": lambda z: torch.special.expit(2 * z) * 2 - 1,
}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_every_activation_has_a_formula() -> None:
    assert set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_what_its_name_says(name: str) -> None:
    z = 3 * normal(5, 7)
    module = build((ACTIVATIONS[name],), (7,), torch.Generator())
    agree(module(z), FORMULAS[name](z), 10 * EPS)
    assert not list(module.parameters())
    assert activation(name) == ACTIVATIONS[name]


def test_the_slope_of_a_leaky_relu_is_a_field() -> None:
    assert torch.equal(LeakyReLU(slope=0.5).apply(torch.tensor([-2.0, 2.0])), torch.tensor([-1.0, 2.0]))


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((Flatten(),), (1, 8, 8)),
        ((Flatten(), Dense(features=5), ACTIVATIONS["tanh"]), (2, 3)),
        ((ACTIVATIONS["relu"], Flatten(), Dense(features=4, b_std=1.0)), (3, 2)),
    ],
)
def test_a_layer_gives_the_shape_that_it_says(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> None:
    stated = shape
    for layer in layers:
        stated = layer.shape(stated)
    assert build(layers, shape, torch.Generator().manual_seed(0))(normal(3, *shape)).shape == (3, *stated)


def test_a_dense_layer_refuses_examples_with_several_axes() -> None:
    with pytest.raises(Mistake, match="put a Flatten before it"):
        build((Dense(features=3),), (1, 8, 8), torch.Generator())


def test_an_unknown_activation_is_refused_with_the_nearest() -> None:
    with pytest.raises(Mistake, match=r"'rleu' is no activation; choose from .* did you mean 'relu'"):
        activation("rleu")
