"""Convolutions, pooling, norms and residual layers, and architectures of these layers."""

from __future__ import annotations

from math import pi, sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ntkexp.cli.main import run
from ntkexp.init import AbstractInit
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, LayerChain, Residual, build
from ntkexp.layer.linear import AvgPool, BatchNorm, Flatten, GlobalAvgPool, GroupNorm, LayerNorm, MaxPool
from ntkexp.layer.pointwise import AbstractPointwise, LeakyReLU
from ntkexp.layer.spec import activation, activations
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.networks import MLP
from ntkexp.run.setting import prepare, survey
from ntkexp.shapes import Shape
from tests.config.components import OWN, configured
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.run.commands import TINY, only_run
from tests.run.small import small
from tests.run.test_execute import full_disk
from tests.test_init import init


class FirstChannel(AbstractPointwise):
    """An activation that drops all other numbers."""

    def apply(self, z: Tensor) -> Tensor:
        return z[:, :1]


class Halved(AbstractPointwise):
    """An activation of another precision."""

    def apply(self, z: Tensor) -> Tensor:
        return z.half()


class OneOutput(MLP):
    """A network with one output for every task."""

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        return super().layers(init, shape, 1)


UNFIT: dict[AbstractArchitecture, str] = {
    MLP(width=4, activation=FirstChannel()): r"the activation first_channel returns .* of shape \[2, 1\] for",
    MLP(width=4, activation=Halved()): r"the activation halved returns torch.float16 of shape \[2, 4\]",
    OneOutput(
        width=4
    ): r"model=one_output: the network returns outputs of shape \[2, 1\] for 2 examples, .* let it return 3",
}


def test_a_kernel_that_overflows_is_refused() -> None:
    """Its outputs are finite."""
    with pytest.raises(Mistake, match=r"the tangent kernel is not finite before training; lower init\.W_std or"):
        prepare(small("data.train=4", "data.query=2", "data.test=2", "init.alpha=1e160"))


@pytest.mark.parametrize("model", UNFIT)
def test_a_network_of_unfit_shapes_is_refused(model: AbstractArchitecture) -> None:
    experiment = small("data.classes=[0,1,2]", "data.train=9", "data.query=2", "data.test=2")
    with pytest.raises(Mistake, match=UNFIT[model]):
        survey(experiment.model_copy(update={"model": model}))


def network(model: str, shape: tuple[int, ...], outputs: int, *, vocabulary: int = 0, **changes: object) -> nn.Module:
    """A small network for examples of this shape."""
    architecture = configured("model", model, width=8, **changes)
    assert isinstance(architecture, AbstractArchitecture)
    return architecture.module(init("ntk"), shape, outputs, torch.Generator().manual_seed(0), vocabulary).eval()


def test_convolutions_with_matched_weights_are_the_same_function() -> None:
    """W_standard = W_std/√fan_in · W_ntk; the same draws give them."""
    x = normal(3, 2, 4, 5)
    one, other = (
        build((init(name, b_std=0.3).conv(4, 3, stride=2),), (2, 4, 5), torch.Generator().manual_seed(0))(x)
        for name in ("ntk", "standard")
    )
    agree(one.detach(), other.detach(), 100 * EPS)


def test_a_circular_convolution_turns_with_its_image() -> None:
    layer = build((Conv(features=3, circular=True),), (2, 4, 5), torch.Generator().manual_seed(0))
    x = normal(2, 2, 4, 5)
    agree(layer(x.roll((1, 2), (2, 3))).detach(), layer(x).roll((1, 2), (2, 3)).detach(), 100 * EPS)


PIXELS = (
    Conv(features=4, b_std=1.0),
    Conv(features=4, stride=2),
    Conv(features=4, window=5, circular=True),
    AvgPool(window=2),
    MaxPool(window=3),
    GlobalAvgPool(),
    LayerNorm(),
    GroupNorm(groups=2),
    BatchNorm(),
    Concatenation(branches=((Conv(features=6), LayerNorm()), ())),
    Residual(branch=(Conv(features=6), LayerNorm())),
    Residual(branch=(Conv(features=4, stride=2),), shortcut=(Conv(features=4, window=1, stride=2),)),
)
SHAPES = [((layer,), (6, *pixels)) for layer in PIXELS for pixels in ((7,), (6, 7), (3, 4, 5))] + [
    ((Flatten(),), (1, 8, 8)),
    ((Flatten(), Dense(features=5), activation("tanh")), (2, 3)),
    ((activation("relu"), Flatten(), Dense(features=4, b_std=1.0)), (3, 2)),
]


@pytest.mark.parametrize(("layers", "shape"), SHAPES)
def test_layers_give_the_shape_that_they_state(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> None:
    stated = shape
    for layer in layers:
        stated = layer.shape(stated)
    module = build(layers, shape, torch.Generator().manual_seed(0)).eval()
    assert module(normal(2, *shape)).shape == (2, *stated)


@pytest.mark.parametrize(("layer", "axes"), [(LayerNorm(eps=1e-12), (1,)), (GroupNorm(groups=1, eps=1e-12), (1, 2, 3))])
def test_a_norm_leaves_mean_zero_and_mean_square_one(layer: AbstractLayer, axes: tuple[int, ...]) -> None:
    """Up to ε = 1e-12, which shortens the result, divided by the variance, which is about one."""
    y = build((layer,), (6, 4, 4), torch.Generator())(normal(3, 6, 4, 4)).detach()
    assert float(y.mean(axes).abs().max()) < 1e-14
    assert float((y.square().mean(axes) - 1).abs().max()) < 1e-10


VARIANTS: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "cnn on sequences": ("cnn", (2, 8), {}),
    "cnn on volumes": ("cnn", (1, 4, 4, 4), {"pooling": "average"}),
    "cnn, circular, strided": ("cnn", (2, 6, 6), {"padding": "circular", "stride": 2, "head": "average"}),
    "cnn with max pooling": ("cnn", (1, 6, 6), {"pooling": "max"}),
    "resnet with layer norm": ("resnet", (1, 4, 4), {"norm": "layer", "stages": 2}),
    "resnet with group norm": ("resnet", (1, 4, 4), {"norm": "group", "stages": 2}),
    "resnet with batch norm": ("resnet", (1, 4, 4), {"norm": "batch", "stages": 2}),
    "transformer on features": ("transformer", (5,), {"heads": 3}),
    "causal swiglu transformer": ("transformer", (1, 4, 4), {"causal": True, "feed_forward": "swiglu", "patch": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_built_and_keeps_its_examples_apart(name: str) -> None:
    """A kernel of a part of the inputs is that part of the kernel."""
    model, shape, changes = VARIANTS[name]
    made, x = network(model, shape, 2, vocabulary=0, **changes), normal(3, *shape)
    kernel = tangent_kernel(made, x)
    assert kernel.shape == (3, 2, 3, 2)
    agree(tangent_kernel(made, x[1:]), kernel[1:, :, 1:], 100 * EPS, kernel.abs().max())


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer_of_tokens(tied: bool) -> None:
    made = network("transformer", (4,), 7, vocabulary=7, causal=True, tied=tied)
    x = torch.tensor([[0, 3, 3, 6], [1, 2, 5, 4]], dtype=torch.float64)
    assert made(x).shape == (2, 7)
    assert tangent_kernel(made, x).shape == (2, 7, 2, 7)
    assert sum(weight.shape == (7, 8) for weight in made.parameters()) == (1 if tied else 2)


@pytest.mark.parametrize(
    ("model", "shape", "vocabulary", "changes", "words"),
    [
        ("cnn", (5,), 0, {}, r"model=cnn takes images.*\[5\]; choose model=mlp"),
        ("resnet", (5,), 0, {}, r"model=resnet takes images.*\[5\]; choose model=mlp"),
        ("cnn", (1, 1, 8), 0, {"pooling": "max"}, r"pooling window of 2 does not fit into .*1, 8\]"),
        ("cnn", (1, 1, 8), 0, {"pooling": "average"}, r"pooling window of 2 does not fit into .*1, 8\]"),
        ("cnn", (1, 4, 4), 0, {"kernel": 2}, r"must have one odd number"),
        ("cnn", (1, 4, 4), 0, {"kernel": 11, "padding": "circular"}, r"circular window \[11, 11\] does not fit"),
        ("cnn", (1, 2, 2, 2, 2), 0, {}, r"1 to 3 axes of pixels"),
        ("transformer", (4,), 0, {"tied": True}, r"model\.tied=true.*0 of them, and the data has 2"),
        ("transformer", (4,), 7, {"tied": True}, r"model\.tied=true.*7 of them, and the data has 2"),
        ("layers", (4,), 0, {"spec": [{"layer": "ReLU"}]}, r"model\.spec ends without a readout"),
        ("mlp", (4,), 7, {}, r"model=mlp takes numbers.*model=transformer, or data\.encoding=one_hot"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    model: str, shape: tuple[int, ...], vocabulary: int, changes: dict[str, object], words: str
) -> None:
    with refused(words):
        network(model, shape, 2, vocabulary=vocabulary, **changes)


# Activations are the functions that they are named after.


ACTIVATIONS = {  # without the activations that other tests define
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


def test_every_activation_has_a_formula() -> None:
    assert set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_function_of_its_name(name: str) -> None:
    z = 3 * normal(5, 7)
    module = build((ACTIVATIONS[name],), (7,), torch.Generator())
    agree(module(z), FORMULAS[name](z), 10 * EPS)
    assert not list(module.parameters())
    assert activation(name) == ACTIVATIONS[name]


def test_the_slope_of_a_leaky_relu_is_a_field() -> None:
    assert torch.equal(LeakyReLU(slope=0.5).apply(torch.tensor([-2.0, 2.0])), torch.tensor([-1.0, 2.0]))


def test_a_dense_layer_of_images_and_an_unknown_activation_are_refused() -> None:
    with refused("put a Flatten before it"):
        build((Dense(features=3),), (1, 8, 8), torch.Generator())
    with refused(r"there is no activation 'rleu'; choose from .* did you mean 'relu'"):
        activation("rleu")
    with refused(r"there is no activation 'softsign'; choose from .*; your own class MyLayer .* needs trust=FILE.py$"):
        activation("softsign")


# The commands, with a module of the user's: resuming needs the trust again, a report needs none.


TRUST = ("--trust", str(OWN))


@pytest.mark.slow
def test_a_run_is_begun_resumed_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = ("train", *TINY, "steps=3", "model=module", f"model.path={OWN}", f"--out={tmp_path}", "--quiet")
    with full_disk("results.csv"):
        assert run([*train, *TRUST]) == 1
    folder = str(only_run(tmp_path))
    capfd.readouterr()
    assert run(["resume", folder]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"runs only if you trust it; add `--trust {OWN}`" in said
    assert run(["resume", folder, *TRUST]) == 0
    assert run(["report", folder]) == 0
    assert "secant" in capfd.readouterr().out
