"""Distances and alignments of kernels obey their laws."""

from __future__ import annotations

from math import sqrt

import torch
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.diagnostics import alignment, centred, drift, label_alignment
from tests.diagnostics.test_spectrum import EPS, kernel_of, normal, seeds
from tests.kernel.compare import agree


@given(seeds)
def test_drift_is_a_distance_in_units_of_the_start(seed: int) -> None:
    start, end = kernel_of(normal(6, 4, seed=seed)), kernel_of(normal(6, 4, seed=seed + 1))
    assert drift(start, start) == 0
    assert abs(drift(3 * end, 3 * start) - drift(end, start)) <= 100 * EPS * drift(end, start)
    assert abs(drift(start + 0.25 * end, start) * float(start.norm()) - 0.25 * float(end.norm())) <= 1e-13 * (
        float(start.norm()) + float(end.norm())  # what rounds in the sum
    )


@given(seeds, st.permutations(range(6)))
def test_alignment_does_not_see_the_order_or_the_scale(seed: int, order: list[int]) -> None:
    one, other = kernel_of(normal(6, 4, seed=seed)), kernel_of(normal(6, 4, seed=seed + 1))
    expected = alignment(one, other)
    assert abs(alignment(one[order][:, :, order], other[order][:, :, order]) - expected) <= 100 * EPS
    assert abs(alignment(3 * one, other / 7) - expected) <= 100 * EPS
    assert abs(alignment(one, one) - 1) <= 100 * EPS
    assert 0 <= expected <= 1


@given(seeds, st.integers(1, 3))
def test_the_kernel_of_the_labels_is_aligned_with_them(seed: int, outputs: int) -> None:
    targets = normal(7, outputs, seed=seed)
    blocks = torch.einsum("nm,cd->ncmd", targets @ targets.t(), torch.eye(outputs, dtype=torch.float64))
    assert abs(label_alignment(blocks, targets) - 1) <= 100 * EPS
    shifted = blocks + torch.ones(7, 1, 7, 1, dtype=torch.float64)
    # centring takes a constant away again
    assert abs(label_alignment(shifted, targets) - 1) <= 1000 * EPS


def test_the_identity_is_aligned_with_balanced_labels_like_one_over_the_root() -> None:
    """⟨H, yyᵀ⟩/(‖H‖‖yyᵀ‖) = 1/√(M − 1) for y with mean zero."""
    targets = torch.tensor([[1.0], [-1.0]] * 5, dtype=torch.float64)
    identity = torch.eye(10, dtype=torch.float64)[:, None, :, None]
    assert abs(label_alignment(identity, targets) - 1 / sqrt(9)) <= 100 * EPS


@given(seeds)
def test_centring_is_multiplication_with_h_on_both_sides(seed: int) -> None:
    matrix = normal(6, 6, seed=seed)
    h = torch.eye(6, dtype=torch.float64) - 1 / 6
    agree(centred(matrix), h @ matrix @ h, 100 * EPS, matrix.abs().max())
