"""Laws of kernels of infinite width, for all networks."""

from __future__ import annotations

from math import log
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import ntkexp
from ntkexp.init import AbstractInit
from ntkexp.layer.affine import AbstractAffine, Conv, Dense, Parametrisation
from ntkexp.layer.attention import SelfAttention
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual, build
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import GELU, Abs, Erf, ReLU, Sin
from ntkexp.layer.smooth import Tanh
from ntkexp.layer.spec import affine_layers, at_width
from ntkexp.limit.infinite_kernel import Engine
from ntkexp.model.base import AbstractLayered
from tests.config.components import choices, configured
from tests.kernel.oracle import EPS
from tests.limit import oracle
from tests.limit.drawn import image_networks
from tests.limit.oracle import close, points

Layers = tuple[AbstractLayer, ...]
ON_IMAGES: Layers = (
    Conv(features=4, W_std=1.4, b_std=0.2),
    Residual(branch=(ReLU(), Conv(features=4))),
    Abs(),
    AvgPool(window=2),
    Conv(features=4, window=(3, 1)),
    ReLU(),
    GlobalAvgPool(),
    Dense(features=4, b_std=0.1),
    Erf(),
    Dense(features=1),
)
seeds = st.integers(0, 10**6)


def relative(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


@given(seeds)
@settings(max_examples=4)
def test_kernels_are_symmetric_and_not_negative(seed: int) -> None:
    layers, shape = image_networks(Random(seed), most=4)
    x = points(6, shape, seed)
    for kernel in ntkexp.infinite_kernel(layers, x):
        assert torch.equal(kernel, kernel.t())
        spectrum = torch.linalg.eigvalsh(kernel)
        assert float(spectrum[0]) >= -1e-10 * float(spectrum[-1])  # of kernels that are known to 1e-11


@given(seeds)
@settings(max_examples=4)
def test_an_example_met_as_itself_is_that_met_as_another(seed: int) -> None:
    """Except for the arc cosine at one, which loses half of the digits: 1e-7 on the diagonal, and less elsewhere."""
    layers, shape = image_networks(Random(seed), most=4)
    x = points(3, shape, seed)
    for alone, apart in zip(ntkexp.infinite_kernel(layers, x), ntkexp.infinite_kernel(layers, x, x), strict=True):
        scale = float(alone.abs().max())
        off = ~torch.eye(3, dtype=torch.bool)
        torch.testing.assert_close(alone[off], apart[off], rtol=1e-11, atol=1e-11 * scale)
        torch.testing.assert_close(alone, apart, rtol=1e-6, atol=1e-7 * scale)


def changed(layers: Layers, **changes: object) -> Layers:
    """Return the layers with other fields of all affine layers."""

    def other(layer: AbstractLayer) -> AbstractLayer:
        if isinstance(layer, Residual):
            sides = {"branch": changed(layer.branch, **changes), "shortcut": changed(layer.shortcut, **changes)}
            return layer.model_copy(update=sides)
        if isinstance(layer, Concatenation):
            return layer.model_copy(update={"branches": tuple(changed(side, **changes) for side in layer.branches)})
        return layer.model_copy(update=changes) if isinstance(layer, AbstractAffine) else layer

    return tuple(other(layer) for layer in layers)


def test_training_the_readout_alone_makes_the_tangent_kernel_that_of_the_process() -> None:
    nngp, ntk = ntkexp.infinite_kernel(
        (*changed(ON_IMAGES[:-1], frozen=True), Dense(features=1, W_std=1.3)), points(4, (2, 4, 5))
    )
    assert torch.equal(nngp, ntk)


def test_copies_are_recognised_however_they_are_written() -> None:
    """One example on both sides, also scaled: ϑ = 0 exactly. The arc cosine of rounding would give 1e-8."""
    layers = (Dense(features=2), ReLU(), Dense(features=2), ReLU(), Dense(features=1))
    x = points(4, (50,))
    _, apart = ntkexp.infinite_kernel(layers, x, 3.0 * x)
    _, alone = ntkexp.infinite_kernel(layers, x)
    torch.testing.assert_close(apart.diagonal(), 3.0 * alone.diagonal(), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("engine", ["torch", pytest.param("fused", marks=pytest.mark.slow)])  # compiled for float32
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**50])
def test_bent_lines_scale_with_their_inputs(scale: float, engine: Engine) -> None:
    """K(sx) = s²K(x), to the bit for a power of two, also where q₁q₂ is not a number of single precision."""
    layers = (Dense(features=2), ReLU(), Dense(features=2), Abs(), Dense(features=1))
    x = points(4, (5,)).float()
    for one, two in zip(*(ntkexp.infinite_kernel(layers, s * x, engine=engine) for s in (scale, 1.0)), strict=True):
        assert torch.equal(one, scale**2 * two)


@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_a_wave_met_as_itself_loses_no_phase(engine: Engine) -> None:
    """E sin²(u) = (1 − exp(−2q))/2, a half at a large variance, which the exponent of rounding misses by 1e-9."""
    x = 3e3 * points(4, (3,))
    nngp, _ = ntkexp.infinite_kernel((Dense(features=2), Sin(), Dense(features=1)), x, engine=engine)
    torch.testing.assert_close(nngp.diagonal(), torch.full((4,), 0.5, dtype=torch.float64), rtol=0.0, atol=4 * EPS)


def test_constant_images_that_go_around_are_vectors() -> None:
    """All their pixels are copies of one another, at every offset, and windows see equal pixels only."""
    x, ends = points(3, (5,)), {"W_std": 1.4, "b_std": 0.1}
    images = x[:, :, None, None].expand(-1, -1, 3, 4)
    for activation in (ReLU(), GELU()):
        dense, conv = Dense(features=2, **ends), Conv(features=2, circular=True, **ends)
        deep = (*(layer for _ in range(6) for layer in (conv, activation)), GlobalAvgPool(), dense)
        flat = (*(layer for _ in range(6) for layer in (dense, activation)), dense)
        # the arc cosine of rounding gives 1e-8
        close(ntkexp.infinite_kernel(deep, images, images.clone()), ntkexp.infinite_kernel(flat, x), 1e-13)


def test_kernels_have_derivatives_by_inputs_and_scales() -> None:
    W, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.3, 0.4))
    x, y = points(2, (1, 3, 3)).requires_grad_(), points(2, (1, 3, 3), 1).requires_grad_()

    def kernels(W: Tensor, b: Tensor, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        body = (Conv(features=2, W_std=W, b_std=b), LayerNorm(eps=0.1), ReLU(), Conv(features=2, W_std=W), GELU())
        return ntkexp.infinite_kernel((*body, AvgPool(window=2), Flatten(), Dense(features=1, b_std=b)), x, y)

    assert torch.autograd.gradcheck(kernels, (W, b, x, y))
    assert torch.autograd.gradcheck(kernels, (W, b, x))


def test_precision_is_that_of_the_inputs() -> None:
    x = points(3, (2, 4, 5))
    for double, single in zip(
        ntkexp.infinite_kernel(ON_IMAGES, x), ntkexp.infinite_kernel(ON_IMAGES, x.float()), strict=True
    ):
        assert single.dtype == torch.float32
        assert relative(single.double(), double) < 1e-6  # ten layers


def test_memory_is_bounded_and_changes_nothing() -> None:
    x = points(7, (2, 4, 5))
    whole = ntkexp.infinite_kernel(ON_IMAGES, x, engine="torch")
    cut = ntkexp.infinite_kernel(ON_IMAGES, x, engine="torch", memory_gb=4e-4)
    close(whole, cut, 1e-14)


@pytest.mark.parametrize("name", choices("init"))
@pytest.mark.parametrize("model", choices("model"))
def test_every_layered_model_has_a_limit_or_says_why_not(model: str, name: str) -> None:
    architecture, init = configured("model", model, width=8), configured("init", name)
    if not isinstance(architecture, AbstractLayered):
        return
    assert isinstance(init, AbstractInit)
    layers = architecture.layers(init, (1, 8, 8), 1)
    if any(layer.param == "mean_field" for layer in affine_layers(layers)):
        with pytest.raises(ntkexp.mistake.Mistake, match="mean-field parametrisation has no kernel"):
            ntkexp.infinite_kernel(layers, points(2, (1, 8, 8)))
    else:
        nngp, ntk = ntkexp.infinite_kernel(layers, points(2, (1, 8, 8)))
        assert nngp.shape == ntk.shape == (2, 2)


TWINS: dict[str, tuple[Layers, tuple[int, ...]]] = {
    "dense": ((Dense(features=8, b_std=0.3), Tanh(), Dense(features=8, W_std=1.4), ReLU(), Dense(features=1)), (5,)),
    "standard": (
        (
            Dense(features=8, b_std=0.3, param="standard"),
            ReLU(),
            Dense(features=8, W_std=1.4, b_std=0.1, param="standard"),
            ReLU(),
            Dense(features=1, param="standard", b_std=0.2),
        ),
        (5,),
    ),
    "frozen, norm, residual": (
        (
            Dense(features=8, frozen=True),
            LayerNorm(eps=0.01),
            Residual(branch=(GELU(), Dense(features=8, b_std=0.2))),
            ReLU(),
            Dense(features=1, W_std=1.2),
        ),
        (5,),
    ),
    "concatenation": (
        (
            Dense(features=8, b_std=0.3),
            Concatenation(branches=((), (ReLU(),), (Tanh(), Dense(features=2, W_std=3.0, b_std=0.2)))),
            Dense(features=8, W_std=1.3, param="standard"),
            ReLU(),
            Concatenation(branches=((), (Dense(features=8), Erf()))),
            Dense(features=1, b_std=0.1),
        ),
        (5,),
    ),
    "images": (
        (
            Conv(features=8, b_std=0.2, stride=2),
            ReLU(),
            AvgPool(window=2),
            Conv(features=8, W_std=1.4, circular=True, param="standard"),
            ReLU(),
            GlobalAvgPool(),
            Dense(features=1),
        ),
        (2, 6, 5),
    ),
    "flattened": ((Conv(features=8, b_std=0.2), ReLU(), Flatten(), Dense(features=1, param="standard")), (1, 3, 4)),
}


@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_a_second_flatten_changes_nothing(engine: Engine) -> None:
    front, back = (Conv(features=8, b_std=0.2), ReLU()), (Dense(features=8), ReLU(), Dense(features=1))
    nets = ((*front, *[Flatten()] * times, *back) for times in (1, 2))
    once, twice = (ntkexp.infinite_kernel(net, points(3, (1, 3, 4)), engine=engine) for net in nets)
    close(once, twice, 0.0)


WIDTHS, DRAWS = (16, 64, 256), 12


@pytest.mark.parametrize("name", ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in list(TWINS)[1:])])
def test_networks_of_finite_width_tend_to_their_kernel(name: str) -> None:
    """Root mean square error over draws falls as width^(−1/2); 12 draws give it to a factor of about 1.3."""
    layers, shape = TWINS[name]
    x = points(3, shape)
    errors = []
    for width in WIDTHS:
        wide = at_width(layers, width)
        _, limit = ntkexp.infinite_kernel(wide, x)
        draws = [finite(wide, shape, x, seed) for seed in range(DRAWS)]
        errors.append(float(np.sqrt(np.mean([relative(kernel, limit) ** 2 for kernel in draws]))))
    slope = log(errors[-1] / errors[0]) / log(WIDTHS[-1] / WIDTHS[0])
    assert -0.7 < slope < -0.3
    assert errors[-1] < 0.3


def finite(layers: Layers, shape: tuple[int, ...], x: Tensor, seed: int) -> Tensor:
    """The tangent kernel of a network that was drawn."""
    module = build(layers, shape, torch.Generator().manual_seed(seed))
    return ntkexp.tangent_kernel(module, x)[:, 0, :, 0]


@pytest.mark.parametrize(
    ("attention", "bias"),
    [
        (SelfAttention(features=16, heads=16, b_std=0.3, QK_std=1.2, attention="identity", linear_scaling=False), 0.0),
        (SelfAttention(features=128, heads=2, b_std=0.3, QK_std=1.5, OV_std=1.2), 2 / 64),
    ],
    ids=["usual scaling", "softmax"],
)
def test_attention_that_is_drawn_has_this_mean(attention: SelfAttention, bias: float) -> None:
    """By the usual scaling, the identity has it at every width; softmax up to O(1/d), of 64 channels of a head."""
    layers, shape = (attention, GlobalAvgPool(), Dense(features=1, b_std=0.2)), (2, 3)
    x, both = points(2, shape), list[Tensor]()
    for seed in range(200):
        module = build(layers, shape, torch.Generator().manual_seed(seed))
        outputs, weights = module(x)[:, 0], list(module.parameters())
        gradients = [torch.autograd.grad(output, weights, retain_graph=True) for output in outputs]
        rows = torch.stack([torch.cat([one.flatten() for one in each]) for each in gradients])
        both.append(torch.stack([torch.outer(outputs, outputs).detach(), rows @ rows.t()]))
    drawn, limit = torch.stack(both), torch.stack(ntkexp.infinite_kernel(layers, x))
    bars = drawn.std(0) / len(drawn) ** 0.5
    assert bool(((drawn.mean(0) - limit).abs() < 4 * bars + bias * limit.abs().max()).all())
    assert float((bars[1] / limit[1].abs().max()).max()) < 0.1  # so that a wrong scale is seen


# Laws of concatenations: means over all channels, in networks of finite and of infinite width.


FIRST = Conv(features=4, W_std=1.4, b_std=0.2)
ROUNDING = 1e-14  # of some ten operations


def branch(features: int) -> Layers:
    return ReLU(), Conv(features=features, W_std=1.3, b_std=0.3), Erf()


@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_a_branch_beside_its_like_is_the_branch(engine: Engine) -> None:
    """Fresh weights of one distribution are as good as more of the same."""
    end, x = (Conv(features=2, b_std=0.1), Abs(), GlobalAvgPool(), Dense(features=1)), points(3, (2, 4, 5))
    twice = ntkexp.infinite_kernel((FIRST, Concatenation(branches=(branch(3), branch(3))), *end), x, engine=engine)
    close(twice, ntkexp.infinite_kernel((FIRST, *branch(6), *end), x, engine=engine), ROUNDING, scaled=True)


@pytest.mark.parametrize("param", ["ntk", "standard"])
def test_kernels_are_weighed_by_shares_of_channels(param: Parametrisation) -> None:
    """Shares of 1 : 3, through layers that are linear in kernels. Alone, each branch has all 8 channels."""
    weights = Conv(features=5, W_std=1.2, b_std=0.1, param=param)
    end: Layers = (weights, AvgPool(window=2), weights, Flatten(), Dense(features=1, b_std=0.3, param=param))

    def other(features: int) -> Layers:
        return Abs(), Conv(features=features, window=1, W_std=0.8, param=param)

    x, y = points(3, (2, 4, 5)), points(2, (2, 4, 5), 1)
    both = ntkexp.infinite_kernel((FIRST, Concatenation(branches=(branch(2), other(6))), *end), x, y)
    alone = [ntkexp.infinite_kernel((FIRST, *side, *end), x, y) for side in (branch(8), other(8))]
    nngp, ntk = (0.25 * one + 0.75 * two for one, two in zip(*alone, strict=True))
    close(both, (nngp, ntk), ROUNDING, scaled=True)


@pytest.mark.parametrize("same", [False, True])
def test_branches_of_vectors_and_the_sum_of_concatenations(same: bool) -> None:
    """One branch needs equal pixels, the other all pixels; one of the two that are added has fresh weights."""
    inner = Concatenation(branches=((Flatten(),), (GlobalAvgPool(), Dense(features=5), ReLU())))
    features = inner.shape((4, 2, 3))[0]
    beside = Concatenation(branches=((Dense(features=1),), (Dense(features=features - 1, W_std=2.0),)))
    layers = (FIRST, inner, Residual(branch=(beside,)), Dense(features=2, b_std=0.2), Erf(), Dense(features=1))
    x = points(2, (2, 2, 3))
    y = None if same else points(1, (2, 2, 3), 1)
    expected = oracle.kernels(layers, x, x if y is None else y, same)
    close(ntkexp.infinite_kernel(layers, x, y), expected, 1e-11, scaled=True)


def test_channels_come_in_the_order_of_branches() -> None:
    x = points(3, (2, 4))
    module = build((Concatenation(branches=((), (ReLU(),))),), (2, 4), torch.Generator())
    assert torch.equal(module(x), torch.cat([x, x.clamp(min=0)], dim=1))


def test_shares_stay_at_another_width() -> None:
    layers = (
        Dense(features=4),
        Concatenation(branches=((Dense(features=2),), (Dense(features=6),))),
        Dense(features=1),
    )
    assert [layer.features for layer in affine_layers(at_width(layers, 12))] == [8, 4, 12, 1]


# Kernels that neural_tangents computed, in float64.
#
# Its tolerances: 1e-12 for closed forms; where an example meets itself its arc cosine is off by up to 3e-8; its
# generic
# activations are Gauss-Hermite sums of 120 nodes.


CASES = sorted(Path(__file__).with_name("golden").glob("*.npz"))
OFF, ON = {True: 1e-7, False: 1e-12}, {True: 1e-6, False: 1e-7}
"""Relative tolerances off and on the diagonal, of generic activations and of closed forms."""

UNFUSED = ("Dropout", "SelfAttention")


def test_the_cases_are_there() -> None:
    assert len(CASES) == 41


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_kernels_are_those_of_the_reference(case: Path, engine: Engine) -> None:
    with np.load(case) as held:
        spec = str(held["spec"])
        arrays = {name: torch.tensor(held[name]) for name in held.files if held[name].dtype == np.float64}
    if engine == "fused" and (plain := next((layer for layer in UNFUSED if layer in spec), None)):
        with pytest.raises(ntkexp.Mistake, match=f"{plain} has no fused form"):
            ntkexp.infinite_kernel(spec, arrays["x1"], engine=engine)
        return
    generic = "Generic" in spec
    sides = {"12": ("x1", "x2"), "11": ("x1", None), "22": ("x2", None)}
    for pair in sorted({name[-2:] for name in arrays if name.startswith("nngp")}):
        one, two = sides[pair]
        found = ntkexp.infinite_kernel(spec, arrays[one], None if two is None else arrays[two], engine=engine)
        for name, kernel in zip(("nngp", "ntk"), found, strict=True):
            compare(kernel, arrays[f"{name}_{pair}"], OFF[generic], ON[generic] if two is None else None)


def compare(kernel: Tensor, expected: Tensor, off: float, on: float | None) -> None:
    """Relative errors, entry by entry."""
    error = (kernel - expected).abs() / expected.abs()
    if on is not None:
        assert float(error.diagonal().max()) <= on
        error = error - torch.diag(error.diagonal())
    assert float(error.max()) <= off
