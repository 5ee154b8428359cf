"""On a GPU kernels are those of the processor, secants close, and runs repeat bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from tests.bench.architectures import NETWORKS
from tests.run.small import ran

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"


class States(nn.Module):
    """A recurrent layer in two directions, read at its last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer, self.readout = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.readout(self.layer(x)[0][:, -1])
        return outputs


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (partial(make, 2), shape) for name, (make, shape) in NETWORKS.items()},
    "GRU": (partial(States, nn.GRU), (3, 3)),
    "RNN": (partial(States, nn.RNN), (3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_the_kernel_is_that_of_the_processor(name: str, dtype: torch.dtype) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().to(dtype).eval(), torch.randn(6, *shape, dtype=dtype)
    expected = ntkexp.tangent_kernel(module, x)
    found = ntkexp.tangent_kernel(module.to(DEVICE), x.to(DEVICE)).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * torch.finfo(dtype).eps * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODULES)
def test_secants_close(name: str) -> None:
    """`secant_kernel` warns of one that does not, and warnings are errors here."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().double().eval().to(DEVICE), torch.randn(6, *shape, dtype=torch.float64, device=DEVICE)
    start = dict(module.named_parameters())
    end = {key: weight + 0.1 * torch.randn_like(weight) for key, weight in start.items()}
    assert ntkexp.secant_kernel(module, start, end, x, x).isfinite().all()


@pytest.mark.parametrize("words", [("model=mlp",), ("model=cnn",), ("model=transformer", "optimizer=adam")])
def test_a_run_is_exact_and_repeats_its_bits(words: tuple[str, ...]) -> None:
    first, second = (ran(*words, f"device={DEVICE}", "ladder.machine=[secant]") for _ in range(2))
    for row in first.rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= max(1e-12, row.floor)
    assert torch.equal(first.contributions("secant"), second.contributions("secant"))


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
