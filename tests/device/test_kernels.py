"""Kernels on the device equal those on the processor, secants close, and infinite widths agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from tests.bench.architectures import NETWORKS
from tests.device.emulated import DEVICE
from tests.kernel.problems import KINDS, READ, problem

pytestmark = pytest.mark.slow


class States(nn.Module):
    """A recurrent layer in two directions, read at its last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer, self.readout = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.readout(self.layer(x)[0][:, -1])
        return outputs


ON_PROCESSOR = {"rotary positions", "encoder, norm before"}
"""Networks that hold a constant of the processor, which is no buffer and stays there."""

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (partial(make, 2), shape) for name, (make, shape) in NETWORKS.items()},
    "GRU": (partial(States, nn.GRU), (3, 3)),
    "LSTM": (partial(States, nn.LSTM), (3, 3)),
    "RNN": (partial(States, nn.RNN), (3, 3)),
    **{name: READ[name] for name in KINDS if name not in ON_PROCESSOR},
}


def drawn(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a module and some inputs, on the processor."""
    if name in READ:
        given = problem(name, dtype=dtype)
        return given.module, given.x
    make, shape = MODULES[name]
    torch.manual_seed(0)
    return make().to(dtype).eval(), torch.randn(6, *shape, dtype=dtype)


def on_device(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a module and inputs on the device, after a comparison of its tangent kernel with the processor's."""
    module, x = drawn(name, dtype)
    expected = ntkexp.tangent_kernel(module, x)
    module, x = module.to(DEVICE), x.to(DEVICE)
    kernel = ntkexp.tangent_kernel(module, x)
    assert kernel.device == torch.device(DEVICE)
    bound = 200 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(kernel.cpu(), expected, rtol=0, atol=bound)
    return module, x


@pytest.mark.parametrize("name", NETWORKS)
def test_the_kernel_in_single_precision_is_that_of_the_processor(name: str) -> None:
    on_device(name, torch.float32)


@pytest.mark.parametrize("name", MODULES)
def test_the_kernel_is_that_of_the_processor_and_secants_close(name: str) -> None:
    """`secant_kernel` warns of a secant that does not close, and warnings are errors here."""
    module, x = on_device(name, torch.float64)
    start = dict(module.named_parameters())
    end = {key: weight + 0.1 * torch.randn_like(weight) for key, weight in start.items()}
    assert ntkexp.secant_kernel(module, start, end, x, x).isfinite().all()


def test_the_kernel_of_infinite_width_is_that_of_the_processor() -> None:
    spec: list[dict[str, Any]] = [
        {"layer": "Conv", "features": 1},
        {"layer": "ReLU"},
        {"layer": "Flatten"},
        {"layer": "Dense", "features": 1},
    ]
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, expected in zip(ntkexp.infinite_kernel(spec, x.to(DEVICE)), ntkexp.infinite_kernel(spec, x), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-12, atol=1e-12)


def predictions(device: str) -> dict[str, Tensor]:
    """Return results of the library's other functions for a network on a device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(device)
    x, y, new = (torch.randn(count, *size).double().to(device) for count, size in ((12, (2,)), (12, (1,)), (3, (2,))))
    kernel = ntkexp.TangentKernel(net)
    wide = ntkexp.KernelMachine(lambda a, b: ntkexp.infinite_kernel(net, a, b).ntk, time=2.0)
    return {
        "traces": ntkexp.TangentKernel(net, outputs="trace")(new, x),
        "sketch": ntkexp.tangent_kernel(net, x, sketch=64).kernel,
        "ridge": ntkexp.KernelMachine(kernel, ridge=0.1).fit(x, y).predict(new),
        "time": ntkexp.KernelMachine(kernel, time=3.0).fit(x, y).predict(new),
        "infinite width": wide.fit(x, y).predict(new),
    }


def test_machines_predict_as_on_the_processor() -> None:
    expected = predictions("cpu")
    for name, ours in predictions(DEVICE).items():
        torch.testing.assert_close(ours.cpu(), expected[name], rtol=1e-10, atol=1e-10, msg=name)
