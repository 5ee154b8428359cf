"""Pieces and extrapolations: the sum of contributions is exact for all of them, and the parts tend to the integral's.

Along a step the parts should be those of ∫₀¹ J(θ₀ + uΔθ; x) du. A piece replaces a mean of products by a product of
means, which errs in proportion to what both factors change by inside it: like n⁻² for a smooth network, and for one
with kinks too, piece by piece. (Kinks of two layers inside one piece err like n⁻¹ together, and share one with a
probability like n⁻¹; they are resolved once pieces are short against the distance between kinks.)
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from math import log

import numpy as np
import pytest
from jaxtyping import Float
from torch import Tensor

from ntkexp.path.rule.base import Gauss, Piece, Secant
from tests.path.parts import contributions, distance
from tests.run.small import ran

ADMISSIBLE = [(n, k) for n in range(1, 9) for k in range(4) if n % 2**k == 0]
ACTIVATIONS = ("relu", "tanh")
PIECES = (1, 2, 4, 8)
KINKED = (4, 8, 16, 32)
VERY_MANY = 128  # 16 times better than the best that is held against it
EXACT = 1e-13  # six steps, each with tens of eps

STEPS = ("steps=6", "ladder.machine=[]", "optimizer.stable_fraction=0.5")
SMOOTH = ("model.activation=tanh", *STEPS)
RELU = ("model.activation=relu", "data.probe=200", "model.width=64", "ladder.machine=[]")


def secant(pieces: int, romberg: int = 0) -> tuple[Piece, ...]:
    return Secant().quadrature(nodes=1, pieces=pieces, romberg=romberg)


def slope(pieces: tuple[int, ...], errors: list[float]) -> float:
    """The fitted power of 1/n."""
    return -float(np.polyfit(list(map(log, pieces)), list(map(log, errors)), 1)[0])


@cache
def smooth() -> dict[str, Float[Tensor, "probe out train"]]:
    """Contributions along a smooth walk, by secants and by so many nodes that they are the integral's."""
    ways = {f"{n} {k}": secant(n, k) for n in (*PIECES, 16) for k in (0, 1) if n % 2**k == 0}
    return contributions({**ways, "integral": Gauss().quadrature(nodes=16, pieces=1, romberg=0)}, *SMOOTH)


def smooth_errors(pieces: tuple[int, ...], romberg: int) -> list[float]:
    """How far the parts are from the integral's."""
    return [distance(smooth()[f"{n} {romberg}"], smooth()["integral"]) for n in pieces]


@cache
def kinked(depth: int, seed: int, *overrides: str) -> tuple[float, ...]:
    """How far the parts of a ReLU network are from those by very many pieces."""
    chosen = (*RELU, f"model.depth={depth}", f"seed={seed}", *overrides)
    found = contributions({str(n): secant(n) for n in (*KINKED, VERY_MANY)}, *chosen)
    return tuple(distance(found[str(n)], found[str(VERY_MANY)]) for n in KINKED)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("activation", "pieces", "romberg"), [(activation, *cut) for activation, cut in zip(cycle(ACTIVATIONS), ADMISSIBLE)]
)
def test_the_sum_closes_however_the_step_is_cut(activation: str, pieces: int, romberg: int) -> None:
    cuts = (f"path.pieces={pieces}", f"path.romberg={romberg}", "path.rule=[secant]", "path.probes=[probe]")
    assert ran(f"model.activation={activation}", *STEPS, "steps=3", *cuts).error("secant") < EXACT


@pytest.mark.parametrize(("pieces", "romberg"), ADMISSIBLE)
def test_pieces_cover_the_step_with_weights_that_sum_to_one(pieces: int, romberg: int) -> None:
    cut = secant(pieces, romberg)
    assert abs(sum(piece.weight for piece in cut) - 1) < 1e-14
    # the secant of u² has the slope u₀ + u₁, and the slopes' mean is its change over the whole step
    assert abs(sum(piece.weight * (piece.start + piece.end) for piece in cut) - 1) < 1e-14


def test_parts_of_a_smooth_network_converge_at_order_two() -> None:
    assert abs(slope(PIECES, smooth_errors(PIECES, 0)) - 2) < 0.1  # the next order, n⁻⁴, is seen at one piece


def test_one_extrapolation_makes_that_order_four() -> None:
    pieces = (2, 4, 8, 16)
    assert abs(slope(pieces, smooth_errors(pieces, 1)) - 4) < 0.2  # the next order, n⁻⁶, is seen at two pieces


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_of_a_relu_network_converge_at_order_two(seed: int) -> None:
    assert 1.6 <= slope(KINKED, list(kinked(1, seed, "steps=4"))) <= 2.3


@pytest.mark.slow
def test_parts_of_a_deep_relu_network_converge_at_order_two() -> None:
    # steps so short that the kinks of two layers seldom share a piece; four seeds, as single events still show in one
    runs = [kinked(2, seed, "steps=30", "optimizer.stable_fraction=0.1", "data.probe=48") for seed in range(4)]
    together = np.sqrt(np.square(runs).mean(0)).tolist()
    assert 1.6 <= slope(KINKED, together) <= 2.3


@pytest.mark.parametrize("cut", [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1)])
def test_the_error_bar_of_a_smooth_network_is_right(cut: tuple[int, int]) -> None:
    (pieces, romberg), integral = cut, smooth()["integral"]
    every = ("path.error_samples=6", "path.rule=[secant]", "path.probes=[probe]")
    run = ran(*SMOOTH, *every, f"path.pieces={pieces}", f"path.romberg={romberg}")
    true = distance(run.contributions("secant"), integral)
    assert true / 2 < run.error_bar < 2 * true


@pytest.mark.parametrize("seed", range(2))
def test_the_error_bar_of_a_relu_network_is_right(seed: int) -> None:
    every = ("steps=4", "path.error_samples=4", "path.rule=[secant]", "path.probes=[probe]", "path.pieces=4")
    run = ran(*RELU, *every, "model.depth=1", f"seed={seed}")
    true = kinked(1, seed, "steps=4")[0]
    assert true / 2 < run.error_bar < 2 * true
