"""Diagnostics of kernels whose eigenvalues are known."""

from __future__ import annotations

from math import inf, isnan, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ntkexp import diagnostics as chapter
from ntkexp.diagnostics import (
    alignment,
    centred,
    drift,
    label_alignment,
    largest_eigenvalue,
    largest_kernel_eigenvalue,
    pattern,
    spectrum,
)
from ntkexp.library import reader_of
from tests.kernel.oracle import agree
from tests.kernel.problems import problem

EPS = torch.finfo(torch.float64).eps
seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """F Fᵀ as a kernel [train, out, train, out_]."""
    rows = features.reshape(-1, outputs, features.shape[-1])
    return torch.einsum("ncp,mdp->ncmd", rows, rows)


def diagonal(values: list[float]) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))[:, None, :, None]


def test_a_diagonal_kernel() -> None:
    found = spectrum(diagonal([1.0, 4.0, 2.0]))
    assert found.values.tolist() == [4.0, 2.0, 1.0]
    assert found.condition == 4.0
    assert found.modes.abs().argmax(0).tolist() == [1, 2, 0]


@given(seeds, st.integers(1, 3))
def test_eigenvectors_are_those_of_the_matrix(seed: int, outputs: int) -> None:
    kernel = kernel_of(normal(6, 8, seed=seed), outputs)
    found = spectrum(kernel)
    matrix = kernel.reshape(6, 6)
    agree((found.modes * found.values) @ found.modes.t(), matrix, 100 * EPS)
    assert found.values.tolist() == sorted(found.values.tolist(), reverse=True)
    # the last eigenvalue of one algorithm against another: relative to the largest
    assert abs(largest_kernel_eigenvalue(kernel) - float(found.values[0])) <= 100 * EPS * float(found.values[0])


def test_the_effective_rank_of_equal_eigenvalues_counts_them() -> None:
    assert abs(spectrum(diagonal([3.0] * 5)).effective_rank - 5) < 100 * EPS
    assert abs(spectrum(diagonal([3.0, 3.0, 0.0])).effective_rank - 2) < 100 * EPS


@given(seeds)
def test_a_kernel_of_rank_one(seed: int) -> None:
    vector = normal(5, 1, seed=seed)
    found = spectrum(kernel_of(vector))
    size = float(vector.square().sum())
    assert abs(float(found.values[0]) - size) <= 100 * EPS * size
    # eigenvalues of rounding size add −p log p with p of about eps, whose logarithm is −36
    assert abs(found.effective_rank - 1) <= 5 * 100 * EPS * 40
    assert found.condition == inf or found.condition > 0.1 / EPS / 100
    assert abs(found.share(vector[:, 0], 1) - 1) <= 100 * EPS


def test_shares_of_a_vector() -> None:
    found = spectrum(diagonal([1.0, 4.0, 2.0]))
    vector = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    assert [round(found.share(vector, top), 12) for top in (0, 1, 2, 3, 9)] == [0.0, 0.8, 0.8, 1.0, 1.0]
    assert isnan(found.share(torch.zeros(3, dtype=torch.float64), 1))


def test_products_with_vectors_stand_in_for_a_large_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = diagonal([1.0, 4.0, 2.0]) + 0.1 * kernel_of(normal(3, 3))
    exact = largest_kernel_eigenvalue(kernel)
    monkeypatch.setattr(chapter, "MAX_DENSE_ENTRIES", 2)
    assert abs(largest_kernel_eigenvalue(kernel) - exact) <= 100 * EPS * exact  # three vectors span the space


def test_close_eigenvalues_take_few_products() -> None:
    """Powers of the matrix tell 1 from 0.99 no sooner than 0.99^2k is small: 1000 of them leave 2e-9."""
    values, taken = torch.cat([torch.linspace(0, 0.99, 500), torch.ones(1)]).double(), []

    def product(vector: Tensor) -> Tensor:
        taken.append(vector)
        return values * vector

    found = largest_eigenvalue(product, normal(501, 1)[:, 0])
    assert 1 - 1e-6 < found <= 1 + 100 * EPS
    assert len(taken) < 60


def test_a_vector_that_reaches_nothing_has_no_eigenvalue() -> None:
    assert largest_eigenvalue(lambda vector: 0 * vector, torch.ones(3)) == 0
    assert largest_eigenvalue(lambda vector: vector, torch.zeros(3)) == 0
    assert isnan(largest_eigenvalue(lambda vector: vector * torch.nan, torch.ones(3)))


# Distances and alignments of kernels obey their laws.


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


# Which units are on.


def test_the_pattern_is_the_sign_at_every_kink() -> None:
    given = problem("relu")
    assert isinstance(given.module, nn.Sequential)
    reader, own = reader_of(given.module)
    first, second = given.module[0](given.x), given.module[:3](given.x)
    expected = torch.cat([first.flatten(), second.flatten()]) > 0
    assert torch.equal(pattern(reader.record(own, given.x)), expected)


def test_it_changes_with_the_unit_that_crosses() -> None:
    given = problem("leaky_relu")
    reader, own = reader_of(given.module)
    before = pattern(reader.record(own, given.x))
    bias = own["2.bias"].clone()
    bias[0] += 1e3
    after = pattern(reader.record(own | {"2.bias": bias}, given.x))
    changed = (before != after).nonzero().flatten()
    hidden = len(given.x) * 7
    assert len(changed) > 0
    assert all(int(unit) >= hidden and (int(unit) - hidden) % 6 == 0 for unit in changed)


def test_smooth_networks_have_none() -> None:
    given = problem("tanh")
    reader, own = reader_of(given.module)
    assert len(pattern(reader.record(own, given.x))) == 0
