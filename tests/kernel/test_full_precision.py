"""Whatever precision torch was told to multiply in, kernels are made of full numbers, and it is told the same after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import ntkexp

PRECISIONS: tuple[Literal["high", "medium"], ...] = ("high", "medium")


@pytest.fixture(params=PRECISIONS)
def short(request: pytest.FixtureRequest) -> Iterator[str]:
    """A precision below that of float32: some processors multiply in bfloat16 then, many GPUs in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def kernels(module: nn.Module, x: Tensor) -> list[Tensor]:
    """A kernel by each function of the library."""
    spec: list[dict[str, Any]] = [
        {"layer": "Dense", "features": 1},
        {"layer": "ReLU"},
        {"layer": "Dense", "features": 1},
    ]
    weights = dict(module.named_parameters())
    end = {name: 1.1 * weight for name, weight in weights.items()}
    return [
        ntkexp.tangent_kernel(module, x),
        ntkexp.secant_kernel(module, weights, end, x, x),
        *ntkexp.infinite_kernel(spec, x, engine="torch"),
    ]


def test_a_lower_precision_of_products_moves_no_bit(short: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 64)
    found = kernels(module, x)
    assert torch.get_float32_matmul_precision() == short
    torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(one, other) for one, other in zip(found, kernels(module, x), strict=True))
