"""Runs in float32 close to the rounding of float32, however many steps are summed."""

from __future__ import annotations

import pytest

from tests.run.small import ran

LADDER = "ladder.machine=[secant]"
TINY = ("data.train=8", "data.probe=4", "data.test=4", "model.width=8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "words",
    [
        ("model=cnn",),
        pytest.param(("model=transformer", "optimizer=momentum"), marks=pytest.mark.slow),
        ("optimizer=adam", "model.activation=tanh"),
        ("optimizer=sgd", "optimizer.batch=8", "optimizer.weight_decay=0.01", "loss=cross_entropy"),
    ],
)
def test_the_secant_closes_to_the_floor_of_float32(words: tuple[str, ...]) -> None:
    for row in ran(*words, *TINY, "steps=20", "dtype=float32", LADDER).rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= row.floor  # 100 eps(float32) of the outputs, relative to their change


@pytest.mark.slow
def test_the_error_of_a_long_sum_is_that_of_its_steps() -> None:
    """Steps err by eps of the outputs each, at random: as the root of their number. Sums in float32 err by more."""
    steps = 400
    for row in ran(f"steps={steps}", "dtype=float32", LADDER).rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= row.floor / 100 * steps**0.5


def test_every_machine_of_the_ladder_speaks_of_a_run_in_float32_whose_optimizer_remembers() -> None:
    """Contributions are summed in float64 there, kernels are not: machines made of both have to bring them together."""
    run = ran("optimizer=momentum", *TINY, "steps=4", "dtype=float32")
    double = ran("optimizer=momentum", *TINY, "steps=4")
    for machine in ("fixed_coefficients", "kernel_regression", "frozen_start", "linearised", "rbf_identity"):
        for row, other in zip(run.rows(machine), double.rows(machine), strict=True):
            assert row.relative_error is not None
            assert other.relative_error is not None
            assert abs(row.relative_error - other.relative_error) < 1e-2, (machine, row.split)
