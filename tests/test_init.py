"""Initial weights: their variances and parametrisations, and the ways to read an output."""

from __future__ import annotations

from itertools import cycle
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from ntkexp.init import AbstractInit
from ntkexp.layer.affine import Affine
from ntkexp.layer.base import build
from ntkexp.library import tangent_kernel
from ntkexp.model.base import AbstractArchitecture, ScaledOutput
from ntkexp.model.functional import weights_of
from ntkexp.model.networks import MLP
from tests.config.components import choices, configured, networks
from tests.kernel.oracle import agree

EPS = torch.finfo(torch.float64).eps
INITS = choices("init")
SHAPE = (1, 8, 8)


def init(name: str, **changes: object) -> AbstractInit:
    made = configured("init", name, **changes)
    assert isinstance(made, AbstractInit)
    return made


def network(name: str, width: int = 16, outputs: int = 2, seed: int = 0, **changes: object) -> ScaledOutput:
    """A small MLP under this initialisation."""
    generator = torch.Generator().manual_seed(seed)
    return MLP(width=width, depth=2).module(init(name, **changes), (3,), outputs, generator).eval()


def inputs(count: int = 4, size: int = 3) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["hidden", "readout", "convolution"])
@pytest.mark.parametrize("name", INITS)
def test_the_variance_of_a_layer(name: str, kind: str) -> None:
    """z ~ N(0, W_std²‖x‖²/fan_in + b_std²); the weights' part of a mean-field readout is divided by the width.

    The mean square of n of them is off by √(2/n) relative; six of those happen once in 5e8. The inputs of a convolution
    are one window.
    """
    n, width = 4096, 64
    made = init(name, W_std=1.3, b_std=0.4)
    layer = {"hidden": made.dense(n), "readout": made.readout(n), "convolution": made.conv(n, 3)}[kind]
    x = inputs(2, 9).view(1, 2, 3, 3) if kind == "convolution" else inputs(1, width)
    z = build((layer,), x.shape[1:], torch.Generator().manual_seed(0))(x).detach()
    z = z[:, :, 1, 1] if kind == "convolution" else z
    share = 1 / width if (name, kind) == ("mean_field", "readout") else 1.0
    expected = share * 1.3**2 * float(x.square().mean()) + 0.4**2
    assert abs(float(z.square().mean()) / expected - 1) < 6 * sqrt(2 / n)


@pytest.mark.parametrize("name", INITS)
def test_no_bias_is_drawn_where_its_scale_is_zero(name: str) -> None:
    affine = [layer for layer in network(name, b_std=0.0).modules() if isinstance(layer, Affine)]
    assert len(affine) == 3
    assert all(layer.bias is None for layer in affine)


def test_ntk_and_standard_networks_with_matched_weights_are_the_same_function() -> None:
    """W_standard = W_std/√fan_in · W_ntk, b_standard = b_std · b_ntk; the same draws give them."""
    x = inputs()
    one, other = network("ntk", b_std=0.3)(x), network("standard", b_std=0.3)(x)
    agree(one, other, 100 * EPS)


def test_the_kernels_of_matched_networks_differ_by_the_scales_of_their_weights() -> None:
    """θ_standard = s θ_ntk gives J_ntk = s J_standard, layer by layer."""
    x = inputs()
    ntk, standard = network("ntk", b_std=0.3), network("standard", b_std=0.3)
    shares = []
    for name, weight in standard.named_parameters():
        scale = sqrt(2.0) / sqrt(weight.shape[1]) if weight.dim() == 2 else 0.3
        standard.requires_grad_(False)
        standard.get_parameter(name).requires_grad_(True)
        shares.append(scale**2 * tangent_kernel(standard, x))
    agree(torch.stack(shares).sum(0), tangent_kernel(ntk, x), 100 * EPS)


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize(("reading", "copies"), [("antisymmetric", 2), ("centred", 1)])
def test_a_network_that_starts_at_zero_has_the_kernel_of_the_plain_one(name: str, reading: str, copies: int) -> None:
    x = inputs()
    plain, made = network(name), network(name, **{reading: True})
    assert torch.equal(made(x), torch.zeros(4, 2, dtype=torch.float64))
    agree(tangent_kernel(made, x), tangent_kernel(plain, x), 100 * EPS)
    sizes = [sum(weight.numel() for weight in weights_of(module).values()) for module in (made, plain)]
    assert sizes[0] == copies * sizes[1]


@pytest.mark.parametrize("name", INITS)
def test_a_centred_network_is_the_change_of_the_plain_one(name: str) -> None:
    x = inputs()
    plain, centred = network(name), network(name, centred=True)
    with torch.no_grad():
        for weight in (*weights_of(centred).values(), *weights_of(plain).values()):
            weight.add_(0.1)
    agree(centred(x), plain(x) - network(name)(x), 100 * EPS)


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("reading", [{}, {"antisymmetric": True}, {"centred": True}])
def test_alpha_scales_the_output_and_its_square_the_kernel(name: str, reading: dict[str, bool]) -> None:
    x, alpha = inputs(), 7.0
    plain, scaled = network(name, **reading), network(name, alpha=alpha, **reading)
    with torch.no_grad():  # away from the start, where the output need not be zero
        for one, other in zip(weights_of(plain).values(), weights_of(scaled).values(), strict=True):
            change = 0.1 * torch.sin(torch.arange(one.numel(), dtype=torch.float64)).view(one.shape)
            one.add_(change)
            other.add_(change)
    agree(scaled(x), alpha * plain(x), 100 * EPS)
    agree(tangent_kernel(scaled, x), alpha**2 * tangent_kernel(plain, x), 100 * EPS)


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("reading", [{}, {"antisymmetric": True}, {"centred": True}])
def test_the_size_of_what_is_summed(name: str, reading: dict[str, bool]) -> None:
    """α Σ‖terms that are trained‖: the output may be zero where its terms are not."""
    x = inputs()
    made = network(name, alpha=3.0, **reading)
    single = float(network(name)(x).norm().detach())
    factor = {"antisymmetric": sqrt(2), "centred": 1.0}.get(next(iter(reading), ""), 1.0)
    size = float(made.term_norms(weights_of(made), x).norm(dim=1).sum())
    assert abs(size - 3.0 * factor * single) <= 100 * EPS * size


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name", "width"), [*zip(networks(), cycle(INITS), cycle([8, 24]))])
def test_every_architecture_runs_on_the_default_data(model: str, name: str, width: int) -> None:
    architecture = configured("model", model, width=width)
    assert isinstance(architecture, AbstractArchitecture)
    made = architecture.module(init(name), SHAPE, 3, torch.Generator().manual_seed(0)).eval()
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = made(x)
    assert outputs.shape == (2, 3)
    assert outputs.isfinite().all()
    assert tangent_kernel(made, x).shape == (2, 3, 2, 3)


@pytest.mark.parametrize("name", INITS)
def test_weights_come_from_the_generator_alone(name: str) -> None:
    torch.manual_seed(0)
    first = network(name, seed=3).state_dict()
    torch.manual_seed(1)
    again, other = network(name, seed=3).state_dict(), network(name, seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_the_width_of_an_mlp_is_the_width_of_its_hidden_layers() -> None:
    weights = [layer.weight.shape for layer in network("ntk", width=11).modules() if isinstance(layer, Affine)]
    assert [tuple(shape) for shape in weights] == [(11, 3), (11, 11), (2, 11)]
    assert not any(isinstance(layer, nn.Dropout) for layer in network("ntk").modules())
