"""What holds of concatenations: means over all channels, in networks of finite and of infinite width."""

from __future__ import annotations

import pytest
import torch

import ntkexp
from ntkexp.layer.affine import Conv, Dense, Parametrisation
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual, build
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import Abs, Erf, ReLU
from ntkexp.layer.spec import affine, at_width
from ntkexp.limit.infinite_kernel import Engine
from tests.limit import oracle
from tests.limit.test_torch_engine import agree, points

Layers = tuple[AbstractLayer, ...]
FIRST = Conv(features=4, W_std=1.4, b_std=0.2)
ROUNDING = 1e-14  # of some ten operations


def branch(features: int) -> Layers:
    return ReLU(), Conv(features=features, W_std=1.3, b_std=0.3), Erf()


@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_a_branch_beside_its_like_is_the_branch(engine: Engine) -> None:
    """Fresh weights of one distribution are as good as more of the same."""
    end, x = (Conv(features=2, b_std=0.1), Abs(), GlobalAvgPool(), Dense(features=1)), points(3, (2, 4, 5))
    twice = ntkexp.infinite_kernel((FIRST, Concatenation(branches=(branch(3), branch(3))), *end), x, engine=engine)
    agree(twice, ntkexp.infinite_kernel((FIRST, *branch(6), *end), x, engine=engine), ROUNDING)


@pytest.mark.parametrize("param", ["ntk", "standard"])
def test_kernels_are_weighed_by_shares_of_channels(param: Parametrisation) -> None:
    """1 : 3, whatever is linear in kernels afterwards: 8 channels, of which each branch alone would have all."""
    weights = Conv(features=5, W_std=1.2, b_std=0.1, param=param)
    end: Layers = (weights, AvgPool(window=2), weights, Flatten(), Dense(features=1, b_std=0.3, param=param))

    def other(features: int) -> Layers:
        return Abs(), Conv(features=features, window=1, W_std=0.8, param=param)

    x, y = points(3, (2, 4, 5)), points(2, (2, 4, 5), 1)
    both = ntkexp.infinite_kernel((FIRST, Concatenation(branches=(branch(2), other(6))), *end), x, y)
    alone = [ntkexp.infinite_kernel((FIRST, *side, *end), x, y) for side in (branch(8), other(8))]
    nngp, ntk = (0.25 * one + 0.75 * two for one, two in zip(*alone, strict=True))
    agree(both, (nngp, ntk), ROUNDING)


@pytest.mark.parametrize("same", [False, True])
def test_branches_of_vectors_and_the_sum_of_concatenations(same: bool) -> None:
    """One branch asks for equal pixels, the other for all of them; one of the two that are added has fresh weights."""
    inner = Concatenation(branches=((Flatten(),), (GlobalAvgPool(), Dense(features=5), ReLU())))
    features = inner.shape((4, 2, 3))[0]
    beside = Concatenation(branches=((Dense(features=1),), (Dense(features=features - 1, W_std=2.0),)))
    layers = (FIRST, inner, Residual(branch=(beside,)), Dense(features=2, b_std=0.2), Erf(), Dense(features=1))
    x = points(2, (2, 2, 3))
    y = None if same else points(1, (2, 2, 3), 1)
    agree(ntkexp.infinite_kernel(layers, x, y), oracle.kernels(layers, x, x if y is None else y, same))


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
    assert [layer.features for layer in affine(at_width(layers, 12))] == [8, 4, 12, 1]
