"""Kernels of infinite width by plain loops over pairs of examples, pairs of pixels, and pixels of windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from ntkexp.layer.affine import AbstractAffine, Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import AbstractPointwise

Pixel = tuple[int, ...]
Values = dict[tuple[Pixel, Pixel], float]


@dataclass
class State:
    """K(x, x′), Θ(x, x′), K(x, x) and K(x′, x′) by pairs of pixels, and the shape of an example."""

    cross: Values
    tangent: Values
    own: tuple[Values, Values]
    shape: tuple[int, ...]
    same: bool


def kernels(layers: Sequence[AbstractLayer], x1: Tensor, x2: Tensor, same: bool = False) -> tuple[Tensor, Tensor]:
    """Return the NNGP and the tangent kernel. With `same`, row k and column k are the same example."""
    nngp, ntk = torch.zeros(len(x1), len(x2), dtype=torch.float64), torch.zeros(len(x1), len(x2), dtype=torch.float64)
    for i, j in product(range(len(x1)), range(len(x2))):
        state = pushed(layers, start(x1[i].numpy(), x2[j].numpy(), same and i == j))
        nngp[i, j], ntk[i, j] = state.cross[(), ()], state.tangent[(), ()]
    return nngp, ntk


def pixels(shape: Sequence[int]) -> list[Pixel]:
    return list(product(*(range(n) for n in shape[1:])))


def start(x: np.ndarray, y: np.ndarray, same: bool) -> State:
    def mean(a: np.ndarray, b: np.ndarray) -> Values:
        places = pixels(a.shape)
        by_pixel, channels = [np.moveaxis(side, 0, -1) for side in (a, b)], len(a)
        return {(p, q): float(np.dot(by_pixel[0][p], by_pixel[1][q])) / channels for p in places for q in places}

    cross = mean(x, y)
    return State(cross, dict.fromkeys(cross, 0.0), (mean(x, x), mean(y, y)), x.shape, same)


def pushed(layers: Iterable[AbstractLayer], state: State) -> State:
    for layer in layers:
        state = step(layer, state)
    return state


def step(layer: AbstractLayer, state: State) -> State:
    match layer:
        case Dense() | Conv():
            return affine(layer, state)
        case AbstractPointwise():
            return pointwise(layer, state)
        case LayerNorm():
            return normalised(layer, state)
        case Residual():
            branch, shortcut = pushed(layer.branch, state), pushed(layer.shortcut, state)
            own = (added(branch.own[0], shortcut.own[0]), added(branch.own[1], shortcut.own[1]))
            tangent = added(branch.tangent, shortcut.tangent)
            return State(added(branch.cross, shortcut.cross), tangent, own, branch.shape, state.same)
        case Concatenation():
            return concatenated([pushed(branch, state) for branch in layer.branches])
        case AvgPool() | GlobalAvgPool() | Flatten():
            return pooled(layer, state)
    raise AssertionError(layer)


def added(one: Values, two: Values) -> Values:
    assert one.keys() == two.keys()
    return {pair: one[pair] + two[pair] for pair in one}


def concatenated(ends: Sequence[State]) -> State:
    """Return the mean over all channels of all branches."""

    def mean(each: Sequence[Values]) -> Values:
        assert all(values.keys() == each[0].keys() for values in each)
        sums = {pair: sum(end.shape[0] * v[pair] for end, v in zip(ends, each, strict=True)) for pair in each[0]}
        return {pair: total / channels for pair, total in sums.items()}

    channels = sum(end.shape[0] for end in ends)
    own = (mean([end.own[0] for end in ends]), mean([end.own[1] for end in ends]))
    shape = (channels, *ends[0].shape[1:])
    return State(mean([end.cross for end in ends]), mean([end.tangent for end in ends]), own, shape, ends[0].same)


def affine(layer: AbstractAffine, state: State) -> State:
    W, b, fan = float(layer.W_std), float(layer.b_std), state.shape[0]

    def mix(values: Values) -> Values:
        return window_mean(layer, values, state.shape) if isinstance(layer, Conv) else values

    def forward(values: Values) -> Values:
        return {pair: W**2 * value + b**2 for pair, value in mix(values).items()}

    window = np.prod(layer.windows(state.shape)) if isinstance(layer, Conv) else 1
    seen, cross = mix(state.cross), forward(state.cross)
    if layer.frozen:
        source = dict.fromkeys(cross, 0.0)
    elif layer.param == "ntk":
        source = cross
    else:
        source = {pair: fan * window * value + (1.0 if b > 0 else 0.0) for pair, value in seen.items()}
    tangent = {pair: W**2 * value + source[pair] for pair, value in mix(state.tangent).items()}
    return State(cross, tangent, (forward(state.own[0]), forward(state.own[1])), layer.shape(state.shape), state.same)


def window_mean(layer: Conv, values: Values, shape: tuple[int, ...]) -> Values:
    windows, sizes = layer.windows(shape), shape[1:]
    # the window around a pixel, with zeros outside the image; with `valid`, the window begins at the pixel
    moves = list(product(*(range(w) if layer.valid else range(-(w // 2), w // 2 + 1) for w in windows)))
    found: Values = {}
    for p, q in product(pixels(layer.shape(shape)), repeat=2):
        total = 0.0
        for move in moves:
            ends = [tuple(layer.stride * a + m for a, m in zip(end, move, strict=True)) for end in (p, q)]
            if layer.circular:
                ends = [tuple(a % n for a, n in zip(end, sizes, strict=True)) for end in ends]
            total += values.get((ends[0], ends[1]), 0.0)
        found[p, q] = total / len(moves)
    return found


def pointwise(layer: AbstractPointwise, state: State) -> State:
    def dual(q1: float, c: float, q2: float) -> tuple[float, float]:
        value, slope = layer.dual(*torch.tensor([[q1], [c], [q2]], dtype=torch.float64))
        return float(value), float(slope)

    def alone(q: float) -> tuple[float, float]:
        value, slope = layer.alone(torch.tensor([q], dtype=torch.float64))
        return float(value), float(slope)

    one, two = state.own
    both = {
        (p, q): alone(c) if state.same and p == q else dual(one[p, p], c, two[q, q])
        for (p, q), c in state.cross.items()
    }
    own = tuple(
        {(p, q): alone(c)[0] if p == q else dual(side[p, p], c, side[q, q])[0] for (p, q), c in side.items()}
        for side in state.own
    )
    cross = {pair: value for pair, (value, _) in both.items()}
    tangent = {pair: value * both[pair][1] for pair, value in state.tangent.items()}
    return State(cross, tangent, (own[0], own[1]), state.shape, state.same)


def normalised(layer: LayerNorm, state: State) -> State:
    def divided(values: Values, one: Values, two: Values) -> Values:
        return {
            (p, q): value / sqrt((one[p, p] + layer.eps) * (two[q, q] + layer.eps)) for (p, q), value in values.items()
        }

    one, two = state.own
    own = (divided(one, one, one), divided(two, two, two))
    return State(divided(state.cross, one, two), divided(state.tangent, one, two), own, state.shape, state.same)


def pooled(layer: AvgPool | GlobalAvgPool | Flatten, state: State) -> State:
    sizes = state.shape[1:]

    def members(p: Pixel) -> list[Pixel]:
        if not isinstance(layer, AvgPool):
            return pixels(state.shape)
        windows = layer.windows(state.shape)
        return list(product(*(range(a * w, (a + 1) * w) for a, w in zip(p, windows, strict=True))))

    def mean(values: Values) -> Values:
        after = pixels(layer.shape(state.shape))
        if isinstance(layer, Flatten):
            return {((), ()): sum(values[p, p] for p in members(())) / np.prod(sizes, dtype=int)}
        return {
            (p, q): sum(values[a, b] for a in members(p) for b in members(q)) / (len(members(p)) * len(members(q)))
            for p, q in product(after, repeat=2)
        }

    own = (mean(state.own[0]), mean(state.own[1]))
    return State(mean(state.cross), mean(state.tangent), own, layer.shape(state.shape), state.same)


def points(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return random inputs."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, scaled: bool = False) -> None:
    """Assert that two kernels agree entry by entry, or relative to the largest entry if `scaled`."""
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=rtol * float(two.abs().max()) if scaled else 0.0)
