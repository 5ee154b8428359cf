"""An exact machine cannot beat rounding: its error follows the floor, whatever makes the network's change small."""

from __future__ import annotations

import pytest

from ntkexp.records.results import Result
from tests.run.small import Ran, ran

LADDER = "ladder.machine=[secant]"
ACTIVATIONS = ("relu", "tanh")
EXACT = 1e-12
SLACK = 1e4  # the floor is 100 eps times norms; twenty errors of about eps, many of them cancelling, lie well below


def follows_the_floor(row: Result) -> bool:
    """No larger than the floor, and the floor no larger than it must be."""
    assert row.relative_error is not None
    assert row.floor is not None
    fits = row.relative_error <= max(EXACT, row.floor)
    return fits and (row.floor <= EXACT or row.relative_error >= row.floor / SLACK)


def all_follow(run: Ran) -> bool:
    return all(follows_the_floor(row) for row in run.rows("secant"))


def largest_floor(run: Ran) -> float:
    return max(row.floor or 0.0 for row in run.rows("secant"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("step_size", "activation"),
    [("1e-9", "relu"), ("1e-7", "tanh"), ("1e-5", "relu"), ("1e-3", "tanh"), ("1e-1", "relu")],
)
def test_the_error_follows_the_floor_at_every_step_size(step_size: str, activation: str) -> None:
    run = ran(f"optimizer.step_size={step_size}", f"model.activation={activation}", LADDER)
    assert all_follow(run)
    # the network moves in proportion to so small a step size; 1e-13 is what the floor is where it moves by its own size
    assert largest_floor(run) > 1e-15 / float(step_size)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_error_follows_the_floor_at_the_largest_stable_step(activation: str) -> None:
    assert all_follow(ran("optimizer.stable_fraction=1", f"model.activation={activation}", LADDER))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reading", "alpha", "activation"),
    [
        ("init.alpha=1", "1", "relu"),
        ("init.alpha=1", "1e6", "tanh"),
        ("init.centred=true", "1", "tanh"),
        ("init.centred=true", "1e2", "relu"),
        ("init.centred=true", "1e6", "tanh"),
        ("init.antisymmetric=true", "1", "relu"),
        ("init.antisymmetric=true", "1e4", "tanh"),
    ],
)
def test_the_error_follows_the_floor_at_every_output_scale(reading: str, alpha: str, activation: str) -> None:
    run = ran(reading, f"init.alpha={alpha}", f"model.activation={activation}", LADDER)
    assert all_follow(run)
    # a difference of large terms knows itself worse as they grow; a plain output grows with its rounding
    lazy = reading != "init.alpha=1"
    assert (largest_floor(run) > EXACT) == (lazy and float(alpha) >= 100)
