"""The limit of an `nn.Sequential`, compared with networks that are drawn, and against the layers written down."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import ntkexp
from ntkexp import infinite_kernel
from tests.kernel.networks import Formula
from tests.kernel.oracle import normal, refused
from tests.limit.oracle import close


def draw(*shape: int) -> Tensor:
    return normal(*shape, seed=3)


def vectors(width: int) -> nn.Sequential:
    body = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width, elementwise_affine=False), nn.ReLU())
    return nn.Sequential(body, nn.Linear(width, width, bias=False), nn.Identity(), nn.SiLU(), nn.Linear(width, 2))


def images(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, width, (3, 1), padding=(1, 0), stride=2, padding_mode="circular"),
        nn.LeakyReLU(0.3),
        nn.Conv2d(width, width, 3),
        nn.GELU(),
        nn.AvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(width, width),
        nn.Softplus(),
        nn.Dropout(0.5),
        nn.Linear(width, 1),
    ).eval()


def series(width: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv1d(2, width, 3, padding="same"), nn.Sigmoid(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 1)
    )
    net[0].requires_grad_(False)
    return net


def larger(width: int) -> nn.Sequential:
    """The first layer's outputs are as small as torch makes them: of variance 1/width."""
    return nn.Sequential(
        nn.ConvTranspose1d(2, width, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose1d(width, width // 2, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width // 2 * 7, 1),
    )


NETS = {
    "vectors": (vectors, (5,)),
    "images": (images, (2, 6, 8)),
    "series": (series, (2, 6)),
    "larger": (larger, (2, 3)),
}


@pytest.mark.parametrize("name", ["vectors", "series", "larger", pytest.param("images", marks=pytest.mark.slow)])
def test_tangent_kernels_of_the_module_have_this_mean(name: str) -> None:
    """Over draws of torch, up to the error bar and the effect of finite width, O(1/width)."""
    make, shape = NETS[name]
    x, width = draw(2, *shape), 64
    net = make(width).double()
    limit, mean = infinite_kernel(net, x), infinite_kernel(net, x, method="monte_carlo", samples=24)
    assert isinstance(mean, ntkexp.library.infinite.EstimatedKernels)
    for found, expected, bar in zip(mean, limit, mean.error, strict=True):
        off = (found - expected).abs()
        assert bool((off < 5 * bar + 4 / width * expected.abs().max()).all())
    assert float((mean.error.ntk / limit.ntk.abs().max()).max()) < 0.1  # so that a wrong scale is seen


@pytest.mark.slow
def test_an_estimate_is_of_its_seed_alone_and_its_error_falls() -> None:
    net, x = vectors(16).double(), draw(2, 5)
    before, held = torch.random.get_rng_state(), [weight.clone() for weight in net.parameters()]
    few, again, many = (
        infinite_kernel(net, x, x[:1], method="monte_carlo", samples=samples, seed=samples // 50)
        for samples in (8, 8, 72)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    close(list(net.parameters()), held, 0.0)
    close(few, again, 0.0)
    ratio = float((few.error.ntk / many.error.ntk).mean())  # type: ignore[attr-defined]
    assert 1.5 < ratio < 6  # √9; of 8 draws it is known to a factor of 1.5


def test_an_estimate_of_layers_that_are_written_down() -> None:
    layers: list[dict[str, Any]] = [
        {"layer": "Dense", "features": 256, "W_std": 1.5, "b_std": 0.3},
        {"layer": "Erf"},
        {"layer": "Dense", "features": 8},
    ]
    x = draw(3, 5)
    limit, mean = infinite_kernel(layers, x), infinite_kernel(layers, x, method="monte_carlo", samples=20)
    for found, expected, bar in zip(mean, limit, mean.error, strict=True):  # type: ignore[attr-defined]
        assert bool(((found - expected).abs() < 5 * bar + 2 / 256 * expected.abs().max()).all())


def attends() -> nn.Module:
    layers = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "readout": nn.Linear(8, 1)}
    made = Formula(lambda x, attention, readout: readout(attention(x, x, x, need_weights=False)[0].mean(1)), **layers)
    return made.double()


@pytest.mark.slow
def test_attention_is_estimated_as_torch_draws_it() -> None:
    """The module's constructor could make each draw."""
    x, module = draw(2, 3, 8), attends()
    found = infinite_kernel(module, x, method="monte_carlo", samples=20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kernels = [ntkexp.tangent_kernel(attends(), x)[:, 0, :, 0] for _ in range(30)]
    made = torch.stack(kernels)
    bars = (found.error.ntk.square() + made.var(0) / len(made)).sqrt()  # type: ignore[attr-defined]
    assert bool(((found.ntk - made.mean(0)).abs() < 4 * bars).all())
    with refused(r"the module is a Formula.*method='monte_carlo'"):
        infinite_kernel(module, x)


def test_scales_may_be_given_for_all_layers() -> None:
    net, x = images(16), draw(3, 2, 6, 8)
    scales: dict[str, Any] = {"W_std": 1.5, "b_std": 0.2, "param": "ntk"}
    layers = [
        {"layer": "Conv", "features": 16, "window": [3, 1], "stride": 2, "circular": True, **scales},
        {"layer": "LeakyReLU", "slope": 0.3},
        {"layer": "Conv", "features": 16, "valid": True, **scales},
        {"layer": "GELU"},
        {"layer": "AvgPool", "window": [1, 2]},
        {"layer": "Flatten"},
        {"layer": "Dense", "features": 16, **scales},
        {"layer": "Generic", "fn": "softplus"},
        {"layer": "Dense", "features": 1, **scales},
    ]
    close(infinite_kernel(net, x, **scales), infinite_kernel(layers, x), 0.0)
    layers.insert(-1, {"layer": "Dropout", "rate": 0.5})
    close(infinite_kernel(net.train(), x, **scales), infinite_kernel(layers, x), 0.0)  # dropout counts in training


def tied() -> nn.Sequential:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 5))
    net[0].register_forward_hook(lambda module, given, out: 2 * out)
    return net


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


IMAGE = (2, 6, 6)


@pytest.mark.parametrize(
    ("net", "shape", "words"),
    [
        (nn.Sequential(nn.Linear(4, 1)), (5,), r"module\[0\]: it takes vectors of 4.*\[5\]"),
        (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), (5,), r"module\[1\] is a BatchNorm1d.*monte_carlo"),
        (nn.Sequential(Doubled(5, 1)), (5,), r"module\[0\] is a Doubled"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 1))), (5,), "ParametrizedLinear"),
        (tied(), (5,), r"module\[2\] is module\[0\] again"),
        (hooked(), (5,), r"module\[0\] has a hook"),
        (nn.Sequential(nn.Sequential(nn.Linear(5, 3)), nn.ReLU(), nn.LayerNorm(3)), (5,), r"module\[2\]: LayerNorm"),
        (nn.Sequential(nn.Conv2d(2, 3, 2, padding="same")), IMAGE, "two unequal ends"),
        (nn.Sequential(nn.Conv2d(2, 3, 5, padding=1, padding_mode="circular")), IMAGE, "circular by half a window"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), IMAGE, "groups"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")), IMAGE, "padding other than"),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), IMAGE, "it takes 3 channels"),
        (nn.Sequential(nn.ConvTranspose2d(2, 4, 3, groups=2)), IMAGE, "groups"),
        (nn.Sequential(nn.ConvTranspose1d(2, 4, 3)), IMAGE, "1 axes of pixels"),
        (nn.Sequential(nn.ConvTranspose2d(2, 4, 3, padding=9)), IMAGE, r"padding=.* leave no pixel of \[6, 6\]"),
        (nn.Sequential(nn.ConvTranspose2d(2, 4, 3, output_padding=1)), IMAGE, "output_padding=.* must be less than"),
        (nn.Sequential(nn.Conv2d(2, 3, 7)), IMAGE, r"a valid window \[7, 7\] must fit into \[6, 6\] pixels"),
        (nn.Sequential(nn.AvgPool2d(3, 2)), IMAGE, "windows that overlap"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2)), IMAGE, r"Flatten\(2, -1\)"),
        (nn.Sequential(nn.Conv2d(2, 3, 3)), IMAGE, "end them with Flatten"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.ReLU(), nn.Linear(48, 1)), IMAGE, "only after weights"),
        (nn.Sequential(nn.Dropout(0.1), nn.Linear(5, 1)), (5,), "Dropout of the inputs"),
        (nn.Sequential(nn.Linear(5, 5), nn.GELU("tanh")), (5,), "approximate='tanh'"),
        (nn.Sequential(), (5,), "without layers"),
    ],
)
def test_layers_that_cannot_be_read_are_refused(net: nn.Sequential, shape: tuple[int, ...], words: str) -> None:
    with refused(words):
        infinite_kernel(net, draw(2, *shape))


def test_questions_that_are_refused() -> None:
    x, layers = draw(2, 5), [{"layer": "Dense", "features": 1}]
    with refused("they apply to an nn.Sequential only"):
        infinite_kernel(layers, x, W_std=1.0)
    with refused("draws, 2 at least"):
        infinite_kernel(layers, x, method="monte_carlo", samples=1)
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1))
    with refused("parameter 'weight' belongs to a module without reset_parameters"):
        infinite_kernel(module, x, method="monte_carlo")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        old = nn.Sequential(nn.Linear(5, 4), nn.utils.weight_norm(nn.Linear(4, 1)))
    pruned = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    prune.l1_unstructured(pruned[1], "weight", 0.5)  # type: ignore[no-untyped-call]  # torch's own
    for net, name in ((old, "1.weight_g"), (pruned, "1.weight_orig")):
        with refused(f"parameter '{name}' is not drawn by its layer's reset_parameters"):
            infinite_kernel(net, x, method="monte_carlo", samples=2)
