"""Expectations over two Gaussians: every activation against a quadrature, κ̇ against the derivative of κ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi, sin, sqrt
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from torch import Tensor, nn

import ntkexp
from ntkexp.capacity import MemoryBudget
from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import Coarse, Operations, Pairs, coarsen
from ntkexp.layer.affine import AbstractTapped, Conv, ConvTranspose, Dense, PaddedConv
from ntkexp.layer.attention import SelfAttention
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual, build
from ntkexp.layer.linear import AvgPool, Dropout, Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import Abs, AbstractBent, AbstractPointwise, LeakyReLU, ReLU
from ntkexp.layer.smooth import FUNCTIONS, Generic, Hermite, Polynomial, Tanh
from ntkexp.layer.spec import layer_classes
from ntkexp.limit.fused.program import program
from ntkexp.limit.infinite_kernel import Engine, choose_engine
from ntkexp.limit.network import network
from ntkexp.mistake import Mistake
from tests.kernel.oracle import EPS, refused
from tests.limit import oracle
from tests.limit.drawn import POINTWISE, image_networks
from tests.limit.oracle import close, points

ONE_GB = MemoryBudget.of_gb(1.0)
SMOOTH = [layer for layer in POINTWISE if not isinstance(layer, AbstractBent)]
SMOOTH += [Generic(fn=name) for name in FUNCTIONS]
VARIANCES = [(1.0, 1.0), (0.3, 2.0), (1.7, 0.05)]
CORRELATIONS = [-0.95, -0.4, 0.0, 0.3, 0.9, 0.999]


def named(layer: AbstractPointwise) -> str:
    return str(layer.fields())


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.sample(20)
@pytest.mark.parametrize("layer", SMOOTH, ids=named)
@pytest.mark.parametrize(("q1", "q2"), VARIANCES)
def test_smooth_activations_agree_with_a_quadrature(layer: AbstractPointwise, q1: float, q2: float) -> None:
    """Trapezoid sums in both variables: exponentially exact for functions that are analytic near the real line."""
    z = torch.linspace(-10, 10, 201, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) * (0.1 / sqrt(2 * pi))
    for rho in CORRELATIONS:
        u = (sqrt(q1) * z)[:, None].expand(201, 201).clone().requires_grad_()
        v = (sqrt(q2) * (rho * z[:, None] + sqrt(1 - rho * rho) * z)).requires_grad_()
        values = [layer.apply(side) for side in (u, v)]
        slopes = [torch.autograd.grad(value.sum(), side)[0] for value, side in zip(values, (u, v), strict=True)]
        found = layer.dual(*numbers(q1, rho * sqrt(q1 * q2), q2))
        for one, pair in zip(found, (values, slopes), strict=True):
            expected = float((pair[0].detach() * pair[1].detach() * weight[:, None] * weight).sum())
            assert abs(float(one) - expected) < 1e-10 * (1 + abs(expected))


@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), LeakyReLU(slope=-2.0)], ids=named)
def test_bent_lines_of_equal_and_of_opposite_variables_are_moments(layer: AbstractBent) -> None:
    """E f(u)² = (a² + b²)/2 E u² and E f(u) f(−u) = −ab E u², which leave no integral."""
    (a, b), q = layer.slopes, 0.7
    for rho, value, slope in ((1, (a * a + b * b) / 2, (a * a + b * b) / 2), (-1, -a * b, a * b)):
        found = layer.dual(*numbers(q, rho * q, q))
        known = 8 * EPS * max(a * a, b * b)  # a few products, and sums; ab may cancel
        assert [float(one) for one in found] == pytest.approx([q * value, slope], rel=0, abs=known)


@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), LeakyReLU(slope=-2.0)], ids=named)
@pytest.mark.parametrize("rho", [*CORRELATIONS, 1 - 1e-9])
def test_bent_lines_agree_with_an_integral_over_the_angle(layer: AbstractBent, rho: float) -> None:
    """E f(u) f(v) = 2√(q₁q₂) · mean over the angle of f(cos θ) f(cos(θ − ϑ)), and E f′(u) f′(v) its like."""
    q1, q2, a, b = 0.7, 1.9, *layer.slopes
    angle = float(np.arccos(rho))

    def line(x: float) -> float:
        return a * min(x, 0) + b * max(x, 0)

    def slope(x: float) -> float:
        return b if x > 0 else a

    corners = sorted((corner % (2 * pi)) for corner in (pi / 2, 3 * pi / 2, pi / 2 + angle, 3 * pi / 2 + angle))
    pieces = list(zip([0.0, *corners], [*corners, 2 * pi], strict=True))

    def mean(function: Callable[[float], float]) -> float:
        product = (quad(lambda t: function(cos(t)) * function(cos(t - angle)), *piece)[0] for piece in pieces)
        return float(sum(product)) / (2 * pi)

    value, derivative = layer.dual(*numbers(q1, rho * sqrt(q1 * q2), q2))
    # The angle itself is known to ε/sin ϑ, and the integral is a sum of 5 · 21 products.
    known = 2 * sqrt(q1 * q2) * max(a * a, b * b) * EPS * (5 * 21 + 4 / sin(angle))
    assert abs(float(value) - 2 * sqrt(q1 * q2) * mean(line)) < known
    assert abs(float(derivative) - mean(slope)) < known


@pytest.mark.parametrize("layer", [*SMOOTH, ReLU(), LeakyReLU(slope=0.3), Abs()], ids=named)
def test_the_slope_is_the_derivative_by_the_covariance(layer: AbstractPointwise) -> None:
    q1, q2 = (torch.tensor([q], dtype=torch.float64).expand(6) for q in (0.8, 1.5))
    c = torch.tensor([-1.0, -0.3, 0.01, 0.4, 0.8, 1.0], dtype=torch.float64, requires_grad=True)
    value, slope = layer.dual(q1, c, q2)
    (derivative,) = torch.autograd.grad(value.sum(), c)
    torch.testing.assert_close(derivative, slope.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [*SMOOTH, ReLU(), LeakyReLU(slope=0.3), Abs()], ids=named)
def test_two_equal_variables_are_the_limit_of_two_alike(layer: AbstractPointwise) -> None:
    for q in (0.2, 1.0, 3.0):
        value, slope = layer.alone(torch.tensor([q], dtype=torch.float64))
        near, near_slope = layer.dual(*numbers(q, q, q))
        torch.testing.assert_close(near, value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(near_slope, slope, rtol=1e-11, atol=1e-12)


@pytest.mark.sample(10)
@pytest.mark.parametrize("layer", [ReLU(), LeakyReLU(slope=0.3), Abs(), *SMOOTH], ids=named)
def test_derivatives_by_all_arguments(layer: AbstractPointwise) -> None:
    arguments = [value.requires_grad_() for value in numbers(0.8, 0.5, 1.5)]
    assert torch.autograd.gradcheck(layer.dual, arguments, atol=1e-6)


def test_a_step_is_too_steep_for_a_series() -> None:
    with pytest.raises(Mistake, match=r"Tanh: at variance 1e\+04 it is too steep.*lower W_std"):
        Tanh().dual(*numbers(1e4, 0.0, 1e4))


# The recursion over pairs of pixels, against plain loops.


RTOL = 1e-11  # of the largest entry: each of ten layers may lose a digit if a sum of pixels cancels


def assert_plain(layers: Sequence[AbstractLayer], x1: Tensor, x2: Tensor | None = None) -> None:
    """The recursion in torch agrees with plain loops."""
    found = ntkexp.infinite_kernel(layers, x1, x2, engine="torch")
    close(found, oracle.kernels(layers, x1, x1 if x2 is None else x2, same=x2 is None), RTOL, scaled=True)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=14)
def test_networks_of_images_agree_with_plain_loops(seed: int, same: bool) -> None:
    """Two sets of examples, or one with itself, where an example meets itself."""
    layers, shape = image_networks(Random(seed), most=4 if same else 5)
    assert_plain(layers, points(2, shape, seed), None if same else points(1, shape, seed + 1))


@pytest.mark.sample(6)
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("shape", [(2, 7), (2, 5, 4), (2, 3, 2, 2)])
@pytest.mark.parametrize("head", [Flatten(), GlobalAvgPool()])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows_strides_and_borders(stride: int, head: AbstractLayer, shape: tuple[int, ...], circular: bool) -> None:
    first, second = (Conv(features=3, window=w, stride=stride, circular=circular, b_std=0.2) for w in (3, 1))
    assert_plain((first, ReLU(), second, ReLU(), head, Dense(features=1)), points(2, shape), points(1, shape, 1))


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (ConvTranspose, (2, 4), {"window": 2, "stride": 3, "output_padding": 2}),
        (ConvTranspose, (2, 3, 4), {"window": (3, 4), "stride": (1, 2), "padding": (1, 0)}),
        (ConvTranspose, (2, 2, 3), {"window": (5, 2), "stride": 2, "padding": (3, 0), "dilation": (1, 3)}),
        (ConvTranspose, (1, 2, 1, 2), {"window": (2, 3, 1), "stride": (2, 1, 2), "padding": (0, 1, 0)}),
        (PaddedConv, (2, 7), {"window": 4, "stride": 3, "padding": 5}),
        (PaddedConv, (2, 5, 4), {"window": (2, 3), "stride": (1, 2), "padding": (0, 2), "dilation": (3, 1)}),
        (PaddedConv, (1, 3, 2, 4), {"window": 2, "padding": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_convolutions_by_any_window_are_those_of_torch(
    kind: type[AbstractTapped], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Outputs are linear in weights drawn from N(0, 1), so that their covariance is the tangent kernel of any draw."""
    layer, x = kind(features=1, W_std=1.3, b_std=0.4, **options), points(3, shape)
    drawn = build((layer,), shape, torch.Generator().manual_seed(0))
    kernel = ntkexp.tangent_kernel(drawn.append(nn.Flatten()), x)  # [example, pixel, example, pixel]
    assert tuple(drawn[0](x).shape[1:]) == layer.shape(shape)
    pooled, flat = (ntkexp.infinite_kernel((layer, end), x).nngp for end in (GlobalAvgPool(), Flatten()))
    torch.testing.assert_close(pooled, kernel.mean((1, 3)), rtol=1e-12, atol=0)
    torch.testing.assert_close(flat, kernel.diagonal(dim1=1, dim2=3).mean(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("stride", "head"), [(1, Flatten()), (2, GlobalAvgPool())])
def test_padding_by_half_a_window_is_the_usual_convolution(stride: int, head: AbstractLayer) -> None:
    scales, x = {"features": 3, "W_std": 1.3, "b_std": 0.2, "param": "standard"}, points(3, (2, 5, 6))
    usual = Conv(window=(3, 5), stride=stride, **scales)
    padded = PaddedConv(window=(3, 5), stride=stride, padding=(1, 2), **scales)
    nets = ((layer, ReLU(), layer, ReLU(), head, Dense(features=1)) for layer in (usual, padded))
    expected, found = (ntkexp.infinite_kernel(net, x) for net in nets)
    close(expected, found, RTOL, scaled=True)


def test_all_pairs_of_pixels_are_a_matrix() -> None:
    x = points(2, (3, 2, 3, 4))
    pairs = Pairs.all(x.shape[2:])
    stored, rows = Covariance.alone(x, pairs).nngp, x.flatten(2)
    torch.testing.assert_close(pairs.as_matrix(stored), torch.einsum("ncp,ncq->npq", rows, rows) / 3)
    assert torch.equal(pairs.from_matrix(pairs.as_matrix(stored)), stored)


def test_pooling_leaves_out_pixels_that_fill_no_window() -> None:
    layers = (Conv(features=3), ReLU(), AvgPool(window=(2, 3)), Conv(features=3), ReLU(), Flatten(), Dense(features=1))
    assert_plain(layers, points(1, (1, 4, 7)), points(1, (1, 4, 7), 1))


# The fused engine leaves to torch exactly the layers that docs/how-to-kernels.md lists.


HOW_TO = Path(__file__).parents[2] / "docs" / "how-to-kernels.md"
TITLE, HEADER = ("## Choose the engine for kernels of infinite width\n", "| engine=fused says | because |\n|---|---|\n")
GIVEN: dict[str, AbstractLayer] = {
    "Generic": Generic(fn="softplus"),
    "Polynomial": Polynomial(powers=(0.1, 0.5)),
    "Hermite": Hermite(degree=2),
    "Residual": Residual(branch=(ReLU(), Conv(features=2))),
    "Concatenation": Concatenation(branches=((ReLU(),), (Conv(features=3),))),
    "Dense": Dense(features=2),
    "Conv": Conv(features=2),
}
"""Layers that need arguments."""
END = (Flatten(), Dense(features=1))
LAYERS = [kind for name, kind in layer_classes().items() if kind.__module__.startswith("ntkexp.")]
FUSED = [
    kind for kind in LAYERS if kind not in {Dropout, PaddedConv, ConvTranspose, SelfAttention}
]  # only the torch engine computes these


class MyLayer(ReLU):
    """A layer that replaces the formula of its parent."""

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q, q


class Overlapping(AvgPool):
    """A pool whose windows overlap."""

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (coarsen(register, [Coarse(((0, 1), (1, 2))) for _ in shape[1:]]),)


def said(layers: tuple[AbstractLayer, ...], x: Tensor) -> str:
    """Return the refusal of engine=fused."""
    with pytest.raises(Mistake, match=r"engine=fused: .*; choose torch") as caught:
        choose_engine("fused", network(layers, tuple(x.shape[1:])), x, 4, ONE_GB, 1)
    return str(caught.value).removeprefix("engine=fused: ").removesuffix("; choose torch")


def test_refusals_are_those_of_the_page() -> None:
    vectors = (Dense(features=2), ReLU(), Dense(features=1))
    found = [
        said((Dense(features=2), Dense(features=1)), torch.ones(2, 3)),
        said((Conv(features=2), MyLayer(), *END), torch.ones(2, 1, 8, 8)),
        said(vectors, torch.ones(2, 3, dtype=torch.float16)),
        said(vectors, torch.ones(2, 3, requires_grad=True)),
    ]
    rows = HOW_TO.read_text().split(TITLE)[1].split(HEADER)[1].split("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == found


UNEQUAL = Residual(branch=(ReLU(), *(Conv(features=2, stride=2),) * 2), shortcut=(Conv(features=2, stride=4),))


@pytest.mark.parametrize("layer", [UNEQUAL, Overlapping(window=4)], ids=["steps", "overlap"])
def test_from_a_smaller_image_on_torch_takes_over(layer: AbstractLayer) -> None:
    layers = (Conv(features=2), ReLU(), Conv(features=2), layer, *END)
    known = program(layers, (1, 8, 8))
    assert known.rest == layers[3:]
    assert len(known.levels[0].operations) > 1


@pytest.mark.parametrize("shape", [(2, 8), (2, 9, 8), (2, 8, 9, 8)], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_every_layer_that_has_a_limit_is_known(kind: Any, shape: tuple[int, ...]) -> None:
    """Up to the readout, on images of every kind, before and after a stride and a pool."""
    layer: AbstractLayer = GIVEN.get(kind.__name__) or kind()
    try:
        layer.carry(Signal().after_weights())
    except Mistake:
        return  # it has no limit
    conv = Conv(features=2, circular=True)
    if isinstance(layer, Dense | Flatten | GlobalAvgPool):
        middle: tuple[AbstractLayer, ...] = ()
    else:
        middle = (conv, layer, Conv(features=2, stride=2), layer, AvgPool(window=1), conv)
    ends = (layer,) if isinstance(layer, Flatten | GlobalAvgPool) else (Flatten(),)
    layers = (*middle, ReLU()) if middle else (conv, ReLU())
    net = network((*layers, *ends, Dense(features=1)), shape)
    assert program(net.layers, net.shape).rest == net.layers[-1:]


def test_dropout_on_a_smaller_image_is_left_to_torch() -> None:
    """Bands do not know which examples meet themselves."""
    layers = (Conv(features=2, stride=2), ReLU(), Dropout(rate=0.3), Conv(features=2), ReLU(), *END)
    x = points(3, (1, 8, 8))
    assert program(layers, (1, 8, 8)).rest == layers[2:]
    fused, plain = (ntkexp.infinite_kernel(layers, x, engine=engine) for engine in ("fused", "torch"))
    close(fused, plain, 1e-13)


# Networks and inputs without a kernel are refused in one line with advice.


DENSE = {"layer": "Dense", "features": 4}
CONV = {"layer": "Conv", "features": 4}
RELU = {"layer": "ReLU"}
FLATTEN = {"layer": "Flatten"}
GAP = {"layer": "GlobalAvgPool"}


def beside(*branches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"layer": "Concatenation", "branches": list(branches)}


BESIDE = beside([], [])
VECTORS, IMAGES = torch.ones(2, 3), torch.ones(2, 1, 4, 4)


class Cubed(AbstractPointwise):
    """An activation of a user, without a known kernel."""

    def apply(self, z: Tensor) -> Tensor:
        return z**3


@pytest.mark.parametrize(
    ("spec", "x", "words"),
    [
        ((Dense(features=4), Cubed(), Dense(features=1)), VECTORS, "Cubed has no known limit of infinite width"),
        ([{"layer": "SelfAttention", "features": 2}], VECTORS, r"SelfAttention takes \[channels, \*pixels\]"),
        (
            [{"layer": "SelfAttention", "features": 2, "linear_scaling": False}, GAP, DENSE],
            IMAGES,
            "linear_scaling=true",
        ),
        ([{"layer": "Dence"}], VECTORS, r"layers\[0\]: there is no layer 'Dence'; did you mean 'Dense'\?"),
        ([{"layer": 3}], VECTORS, r"layers\[0\]: there is no layer '3'; there are Abs, AvgPool, "),
        ([{"features": 3}], VECTORS, r"layers\[0\] is not a layer; write"),
        ("[", VECTORS, "layers is not JSON"),
        ("{}", VECTORS, "layers is not a list of layers"),
        ([], VECTORS, "a network without layers"),
        ([{"layer": "Dense"}], VECTORS, r"layers\[0\] \(Dense\): features is missing; its keys are features, W_std"),
        ([DENSE | {"W_sdt": 1}], VECTORS, r"layers\[0\]: Dense has no key 'W_sdt'; .* did you mean 'W_std'\?"),
        ([DENSE | {"W_std": -1.0}], VECTORS, r"W_std=-1\.0: it takes a number > 0"),
        ([DENSE | {"W_std": torch.ones(2)}], VECTORS, "a scale is one number"),
        ([DENSE | {"param": "nkt"}], VECTORS, r"param='nkt': Input should be 'ntk', 'standard' or 'mean_field'"),
        ([DENSE | {"param": "mean_field"}], VECTORS, "mean-field parametrisation has no kernel"),
        ([CONV, FLATTEN, {"layer": "GlobalAvgPool"}, DENSE], IMAGES, r"was given \[64\]; leave it out"),
        ([CONV, RELU, DENSE], IMAGES, "put a Flatten before it"),
        ([CONV, RELU], IMAGES, r"the layers end in \[4, 4, 4\], an image; end them with Flatten or GlobalAvgPool"),
        ([CONV | {"window": 2}, FLATTEN], IMAGES, "must have one odd number"),
        ([CONV, {"layer": "AvgPool", "window": 5}, FLATTEN], IMAGES, "pooling window of 5 does not fit into"),
        ([CONV, {"layer": "MaxPool"}, FLATTEN], IMAGES, "MaxPool has no known limit"),
        ([DENSE, {"layer": "LayerNorm", "affine": True}], VECTORS, "a layer norm whose gain is trained"),
        ([DENSE, RELU, RELU], VECTORS, "ReLU has a limit of infinite width only after weights"),
        ([{"layer": "LayerNorm"}, DENSE], VECTORS, "LayerNorm has a limit of infinite width only after weights"),
        (
            [{"layer": "Residual", "branch": [DENSE]}],
            VECTORS,
            r"branches of a residual layer disagree: \[4\] and \[3\]",
        ),
        ([DENSE, {"layer": "Residual", "branch": [RELU]}], VECTORS, "one of its branches ends in weights"),
        (
            [DENSE, {"layer": "Residual", "branch": [{"layer": "RLU"}]}],
            VECTORS,
            r"layers\[1\]\.branch\[0\]: there is no",
        ),
        ([DENSE, BESIDE, RELU], VECTORS, "ReLU has no known limit .* right after a concatenation.*into the branches"),
        ([CONV, BESIDE, {"layer": "AvgPool"}, RELU, FLATTEN], IMAGES, "right after a concatenation"),
        ([DENSE, BESIDE, {"layer": "LayerNorm"}, DENSE], VECTORS, "LayerNorm has no known limit"),
        ([beside([DENSE], []), DENSE], VECTORS, "channels of the inputs do not grow with width"),
        ([beside([CONV], [{"layer": "AvgPool", "window": 1}]), FLATTEN], IMAGES, "do not grow with width"),
        ([beside([CONV], [CONV | {"stride": 2}]), FLATTEN], IMAGES, r"differ in pixels: \[4, 4, 4\], \[4, 2, 2\]"),
        ([DENSE, beside([RELU]), DENSE], VECTORS, r"layers\[1\] \(Concatenation\): branches=.* at least 2"),
        (
            [DENSE, {"layer": "Concatenation", "branches": 2}],
            VECTORS,
            r"layers\[1\]\.branches is not a list of branches",
        ),
        ([DENSE, {"layer": "Generic", "fn": "relu"}], VECTORS, "fn=relu has a kink.*choose the layer ReLU"),
        ([DENSE, {"layer": "Generic", "fn": "tahn"}], VECTORS, "fn=tahn is none of .*did you mean 'tanh'"),
        (
            [DENSE],
            torch.ones(2, 3, dtype=torch.long),
            r"x1 is torch.int64 of shape \[2, 3\]; it takes floating numbers",
        ),
        ([DENSE], torch.ones(3), r"x1 is torch.float32 of shape \[3\]"),
        ([DENSE], torch.ones(2, 3).to_sparse(), "x1 is nested, sparse, quantized"),
        (
            [CONV | {"valid": True, "circular": True}, FLATTEN],
            IMAGES,
            "a valid window .*one of circular and valid",
        ),
        ([DENSE], torch.tensor([[1.0], [1e-17]]), "x1 is so small that its squares lose digits, in example 1; scale"),
        ([DENSE], 1e20 * VECTORS, "the NNGP kernel has entries beyond float32; lower W_std, or scale the inputs down"),
        ([DENSE], torch.tensor([[1.0], [torch.nan]]), "x1 has entries that are not finite, the first in example 1"),
    ],
)
def test_a_mistake_is_one_line(spec: Any, x: torch.Tensor, words: str) -> None:
    with refused(words):
        ntkexp.infinite_kernel(spec, x)


@pytest.mark.parametrize("engine", ["torch", "fused"])
@pytest.mark.parametrize("name", ["Erf", "GELU", "Sin", "Cos"])
def test_variances_at_which_near_neighbours_are_one_are_refused(name: str, engine: Engine) -> None:
    """Kernels of pixels that are equal without being known as equal would be off by 2 to 100 %, or infinite."""
    x = 1e8 * torch.ones(2, 3, 4, dtype=torch.float64)
    spec: list[dict[str, object]] = [CONV, {"layer": name}, {"layer": "GlobalAvgPool"}, DENSE]
    words = rf"{name}: variance 1e\+16 is too large for float64 to tell near neighbours apart: 0 digits .*; lower W_std"
    with refused(words):
        ntkexp.infinite_kernel(spec, x, x.clone(), engine=engine)
    with refused(rf"{name}: .* float32 .*; or compute in float64"):
        ntkexp.infinite_kernel(spec, 1e-6 * x.float(), engine=engine)


def test_sides_are_of_one_kind() -> None:
    with refused(r"x1 has examples of shape \[3\] and torch.float32, x2 of \[4\]"):
        ntkexp.infinite_kernel([DENSE], VECTORS, torch.ones(2, 4))
    with refused(r"torch.float32, x2 of \[3\] and torch.float64"):
        ntkexp.infinite_kernel([DENSE], VECTORS, VECTORS.double())


def test_memory_and_engine_are_checked() -> None:
    with refused(r"memory_gb=0: it takes a number > 0"):
        ntkexp.infinite_kernel([DENSE], VECTORS, memory_gb=0)
    with refused(r"memory_gb=1e-06 is less than the .* GB of one pair of these examples; raise it"):
        ntkexp.infinite_kernel([CONV, RELU, {"layer": "GlobalAvgPool"}], IMAGES, memory_gb=1e-6)
    net = network((Dense(features=1),), (3,))
    with refused(r"engine=fussed is none of auto, torch, fused; did you mean 'fused'\?"):
        choose_engine(cast("Engine", "fussed"), net, VECTORS, 1, ONE_GB, None)
