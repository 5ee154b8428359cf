"""The recursion over pairs of pixels, against plain loops."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ntkexp
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import ReLU
from tests.limit import oracle
from tests.limit.drawn import image_networks

RTOL = 1e-11  # of the largest entry: ten layers, each of which may lose a digit where a sum of pixels cancels


def points(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rtol: float = RTOL) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=rtol * float(two.abs().max()))


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=8)
def test_networks_of_images_are_what_plain_loops_make_of_them(seed: int) -> None:
    layers, shape = image_networks(Random(seed))
    x1, x2 = points(2, shape, seed), points(1, shape, seed + 1)
    agree(ntkexp.infinite_kernel(layers, x1, x2, engine="torch"), oracle.kernels(layers, x1, x2))


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=6)
def test_where_an_example_meets_itself_so_they_are(seed: int) -> None:
    layers, shape = image_networks(Random(seed), most=4)
    x = points(2, shape, seed)
    agree(ntkexp.infinite_kernel(layers, x, engine="torch"), oracle.kernels(layers, x, x, same=True))


@pytest.mark.sample(6)
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("shape", [(2, 7), (2, 5, 4), (2, 3, 2, 2)])
@pytest.mark.parametrize("head", [Flatten(), GlobalAvgPool()])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows_strides_and_borders(stride: int, head: AbstractLayer, shape: tuple[int, ...], circular: bool) -> None:
    first, second = (Conv(features=3, window=w, stride=stride, circular=circular, b_std=0.2) for w in (3, 1))
    layers = (first, ReLU(), second, ReLU(), head, Dense(features=1))
    x1, x2 = points(2, shape), points(1, shape, 1)
    agree(ntkexp.infinite_kernel(layers, x1, x2, engine="torch"), oracle.kernels(layers, x1, x2))


def test_pooling_leaves_out_what_fills_no_window() -> None:
    layers = (Conv(features=3), ReLU(), AvgPool(window=(2, 3)), Conv(features=3), ReLU(), Flatten(), Dense(features=1))
    x1, x2 = points(1, (1, 4, 7)), points(1, (1, 4, 7), 1)
    agree(ntkexp.infinite_kernel(layers, x1, x2, engine="torch"), oracle.kernels(layers, x1, x2))
