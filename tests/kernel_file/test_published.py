"""The published kernels in their authors' own recursions, with loops over pixels, against the architectures here."""

from __future__ import annotations

from math import acos, pi, sqrt

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ntkexp.init import NTK
from ntkexp.limit.infinite_kernel import BlockPlace, compute
from ntkexp.model.base import LearningTask
from ntkexp.model.networks import CNTK, UCINtk

Pairs = NDArray[np.float64]  # [row, column, row′, column′] of two images
INIT = NTK(W_std=1, b_std=0)
SIDE, CHANNELS = 4, 2


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)


def window(pairs: Pairs) -> Pairs:
    """tr over the 3 × 3 windows around both pixels, those outside of the image being zero."""
    found, places = np.zeros_like(pairs), range(SIDE)
    for i, j, k, m in np.ndindex(*pairs.shape):
        for a in (-1, 0, 1):
            for b in (-1, 0, 1):
                if i + a in places and j + b in places and k + a in places and m + b in places:
                    found[i, j, k, m] += pairs[i + a, j + b, k + a, m + b]
    return found


def arcs(sigma: Pairs, left: Pairs, right: Pairs) -> tuple[Pairs, Pairs]:
    """c E σ(u)σ(v) and c E σ′(u)σ′(v) with c = 2, of ReLU."""
    value, slope = np.zeros_like(sigma), np.zeros_like(sigma)
    for i, j, k, m in np.ndindex(*sigma.shape):
        size = sqrt(left[i, j, i, j] * right[k, m, k, m])
        rho = float(np.clip(sigma[i, j, k, m] / size, -1, 1))
        slope[i, j, k, m] = (pi - acos(rho)) / pi
        value[i, j, k, m] = size * (rho * (pi - acos(rho)) + sqrt(1 - rho * rho)) / pi
    return value, slope


def published(x: torch.Tensor, y: torch.Tensor, depth: int, *, pooling: bool, fixed: bool) -> float:
    """Arora et al. 2019, section 4: K⁰ the products of pixels, Σ its windows, then with q = 3

    K ← c/q² E σσ,  K̇ ← c/q² E σ′σ′,  Θ ← tr(K̇ ∘ Θ + K),  and at the last layer the sum over pixels of K̇ ∘ Θ + K.
    """
    pairs = {
        name: np.einsum("cij,ckl->ijkl", one.numpy(), two.numpy())
        for name, one, two in (("xy", x, y), ("xx", x, x), ("yy", y, y))
    }
    sigma = {name: window(each) for name, each in pairs.items()}
    theta = np.zeros_like(sigma["xy"]) if fixed else sigma["xy"]
    for layer in range(1, depth):
        value, slope = arcs(sigma["xy"], sigma["xx"], sigma["yy"])
        own = {name: arcs(sigma[name], sigma[name], sigma[name])[0] / 9 for name in ("xx", "yy")}
        value, slope = value / 9, slope / 9
        theta = slope * theta
        if layer == depth - 1:
            theta = theta if fixed else theta + value
        else:
            theta = window(theta + value)
            sigma = {"xy": window(value), **{name: window(each) for name, each in own.items()}}
    if pooling:
        return float(theta.mean())
    return float(np.einsum("ijij->", theta))


@pytest.mark.parametrize("pooling", [False, True], ids=["flatten", "pooling"])
@pytest.mark.parametrize("fixed", [False, True], ids=["all", "fixed"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_cntk(depth: int, pooling: bool, fixed: bool) -> None:
    net = CNTK(depth=depth, pooling=pooling, fixed=fixed).limit(INIT, LearningTask((CHANNELS, SIDE, SIDE), 1))
    x, place = images(), BlockPlace(slice(0, 1), slice(1, 2), same=False)
    expected = published(x[0], x[1], depth, pooling=pooling, fixed=fixed)
    assert float(compute(net, place, x, x).ntk) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fixed", [0, 1, 3])
def test_uci_ntk(fixed: int) -> None:
    depth, (x, y) = 3, images().flatten(1).numpy()
    sigma = {"xy": x @ y, "xx": x @ x, "yy": y @ y}
    theta = 0.0 if fixed > 0 else sigma["xy"]
    for layer in range(1, depth + 1):
        size = sqrt(sigma["xx"] * sigma["yy"])
        rho = sigma["xy"] / size
        slope = (pi - acos(rho)) / (2 * pi)
        value = size * (rho * (pi - acos(rho)) + sqrt(1 - rho * rho)) / (2 * pi)
        sigma = {"xy": value, "xx": sigma["xx"] / 2, "yy": sigma["yy"] / 2}
        theta = slope * theta + (value if layer >= fixed else 0.0)
    net = UCINtk(depth=depth, fixed=fixed).limit(INIT, LearningTask((CHANNELS, SIDE, SIDE), 1))
    found = compute(net, BlockPlace(slice(0, 1), slice(1, 2), same=False), images(), images()).ntk
    assert float(found) == pytest.approx(theta, rel=1e-12)
