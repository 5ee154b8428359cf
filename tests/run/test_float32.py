"""Machines in float32: what is summed in float64 and what is not is brought together."""

from __future__ import annotations

from tests.run.small import ran

TINY = ("data.train=8", "data.probe=4", "data.test=4", "model.width=8")


def test_every_machine_of_the_ladder_speaks_of_a_run_in_float32_whose_optimizer_remembers() -> None:
    """Contributions are summed in float64 there, kernels are not: machines made of both have to bring them together."""
    run = ran("optimizer=momentum", *TINY, "steps=4", "dtype=float32")
    double = ran("optimizer=momentum", *TINY, "steps=4")
    for machine in ("fixed_coefficients", "kernel_regression", "frozen_start", "linearised", "rbf_identity"):
        for row, other in zip(run.rows(machine), double.rows(machine), strict=True):
            assert row.relative_error is not None
            assert other.relative_error is not None
            assert abs(row.relative_error - other.relative_error) < 1e-2, (machine, row.split)
