"""Diagnostics of kernels whose eigenvalues are known."""

from __future__ import annotations

from math import inf, isnan, sqrt

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from ntkexp.library import reader_of
from ntkexp.statistics import (
    LANCZOS_TOLERANCE,
    activity,
    alignment,
    centred,
    kernel_change,
    kinks,
    label_alignment,
    largest_eigenvalue,
    largest_kernel_eigenvalue,
    pattern,
    selectivity,
    spectrum,
    summary,
    top_share,
)
from tests.kernel.oracle import EPS, agree, normal
from tests.kernel.problems import problem

seeds = st.integers(0, 2**32 - 1)


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """F Fᵀ as a kernel [train, out, train, out_]."""
    rows = features.reshape(-1, outputs, features.shape[-1])
    return torch.einsum("ncp,mdp->ncmd", rows, rows)


def diagonal(values: list[float]) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))[:, None, :, None]


def test_a_diagonal_kernel() -> None:
    found = spectrum(diagonal([1.0, 4.0, 2.0]))
    assert found.values.tolist() == [4.0, 2.0, 1.0]
    assert found.modes.abs().argmax(0).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("eigenvalues", "expected"),
    [
        ([1.0, 4.0, 2.0], 4.0),
        # an eigenvalue up to n · eps · λ_max is rounding
        ([4.0, 2.0, 11 * EPS], inf),
        ([4.0, 2.0, 13 * EPS], 4 / (13 * EPS)),
    ],
)
def test_the_condition_number_is_infinite_where_rounding_is_left(eigenvalues: list[float], expected: float) -> None:
    assert spectrum(diagonal(eigenvalues)).condition == expected


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
    assert isnan(spectrum(diagonal([0.0, 0.0])).effective_rank)


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


def test_products_with_vectors_replace_a_large_matrix() -> None:
    """Three vectors span the space of a rotated matrix with three eigenvalues."""
    values = torch.tensor([1.0, 4.0, 2.0] * 30, dtype=torch.float64)
    rotation = torch.linalg.qr(normal(90, 90))[0]
    kernel = ((rotation * values) @ rotation.t())[:, None, :, None]
    assert abs(largest_kernel_eigenvalue(kernel) - 4.0) <= 400 * EPS


@pytest.mark.parametrize("pairs", [1, 2049])  # a small matrix is decomposed
def test_the_largest_eigenvalue_of_inputs_with_their_negatives(pairs: int) -> None:
    """√K(x, x) is then an eigenvector of another eigenvalue, here 0.02 for each pair."""
    inputs = torch.nn.functional.normalize(normal(pairs, 5), dim=1)
    offset = torch.full((pairs, 1), 0.1, dtype=torch.float64)
    features = torch.cat([torch.cat([inputs, offset], 1), torch.cat([-inputs, offset], 1)])
    expected = float(torch.linalg.eigvalsh(features.t() @ features)[-1])
    assert expected > 10 * 0.02 * pairs
    assert abs(largest_kernel_eigenvalue(kernel_of(features)) - expected) <= LANCZOS_TOLERANCE * expected


@pytest.mark.parametrize(
    ("values", "products"),
    [
        # Powers of the matrix would need thousands of products to distinguish 1 from 0.99.
        (torch.cat([torch.linspace(0, 0.99, 500), torch.ones(1)]), range(10, 60)),
        # three products span the space, in any unit
        (torch.tensor([3.0, 1.0, 2.0]), range(3, 4)),
        (1e-20 * torch.tensor([3.0, 1.0, 2.0]), range(3, 4)),
        (1e20 * torch.tensor([3.0, 1.0, 2.0]), range(3, 4)),
        (torch.full((5,), 1.0), range(1, 2)),  # the start is an eigenvector
    ],
)
def test_lanczos_stops_once_the_eigenvalue_has_settled(values: Tensor, products: range) -> None:
    values = values.double()
    count = 0

    def product(vector: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return values * vector

    largest = float(values.max())
    found = largest_eigenvalue(product, normal(len(values), 1)[:, 0])
    assert (1 - 1e-6) * largest < found <= (1 + 100 * EPS) * largest
    assert count in products


def test_lanczos_takes_at_most_a_hundred_products() -> None:
    """The eigenvalue of a long chain settles slowly: 2 on the diagonal, 1 next to it."""
    count = 0

    def product(vector: Tensor) -> Tensor:
        nonlocal count
        count += 1
        following = torch.cat([vector[1:], vector[:1] * 0])
        return 2 * vector + following + torch.cat([vector[-1:] * 0, vector[:-1]])

    start = torch.zeros(1000, dtype=torch.float64)
    start[0] = 1.0
    largest_eigenvalue(product, start)
    assert count == 100


def test_a_vector_that_reaches_nothing_has_no_eigenvalue() -> None:
    assert largest_eigenvalue(lambda vector: 0 * vector, torch.ones(3)) == 0
    assert largest_eigenvalue(lambda vector: vector, torch.zeros(3)) == 0
    assert isnan(largest_eigenvalue(lambda vector: vector * torch.nan, torch.ones(3)))


# Distances and alignments of kernels obey their laws.


@given(seeds)
def test_drift_is_a_distance_in_units_of_the_start(seed: int) -> None:
    start, end = kernel_of(normal(6, 4, seed=seed)), kernel_of(normal(6, 4, seed=seed + 1))
    assert kernel_change(start, start) == 0
    assert abs(kernel_change(3 * end, 3 * start) - kernel_change(end, start)) <= 100 * EPS * kernel_change(end, start)
    assert abs(kernel_change(start + 0.25 * end, start) * float(start.norm()) - 0.25 * float(end.norm())) <= 1e-13 * (
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


# Active units.


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


class Kinked(nn.Module):
    """Kinks before the first weights, and two between weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.second = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.abs()))
        pooled = nn.functional.max_pool2d(hidden[:, None, None], (1, 2))[:, 0, 0]
        return torch.relu(self.second(pooled))


def test_kinks_are_named_once_if_weights_reach_them() -> None:
    reader, weights = reader_of(Kinked())
    assert kinks(reader.record(weights, normal(3, 4))) == ["relu", "max pooling"]


# Tuning of hidden units.


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], 1.0),
        ([[1.0, 2.0], [1.0, 2.0]], 0.0),
        ([[3.0, 1.0], [1.0, 2.0]], 3 / 7),
        ([[3.0], [1.0], [1.0]], (1 / 2 + 1 / 2 + 0) / 3),
        ([[1.0, 2.0]], None),
        ([[0.0], [0.0]], None),
    ],
)
def test_selectivity_is_the_mean_contrast_of_pairs(responses: list[list[float]], expected: float | None) -> None:
    found = selectivity([torch.tensor(response, dtype=torch.float64) for response in responses])
    assert found == (expected if expected is None else pytest.approx(expected, rel=1e-15))


def test_the_activity_is_what_the_readout_takes() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 2, 1))
    x = torch.ones(5, 4)
    found = activity(network, lambda: network(x))
    assert found is not None
    assert torch.equal(found, network[1](network[0](x)).detach())
    assert activity(network[0], lambda: network[0](x)) is None
    assert not any(layer._forward_pre_hooks for layer in network)


# The integrals of a run.


def machine(queries: int, outs: int, train: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A kernel, coefficients that depend on the query, and the contributions K(x, xᵢ) aᵢ(x)."""
    kernel = normal(queries, outs, train, outs, seed=seed) + 3 * torch.eye(outs, dtype=torch.float64)[:, None]
    coefficients = 2 + normal(queries, train, outs, seed=seed + 1)
    return kernel, coefficients, torch.einsum("pcid,pid->pci", kernel, coefficients)


@pytest.mark.parametrize("outs", [1, 2])
def test_coefficients_vary_as_much_as_they_do(outs: int) -> None:
    kernel, coefficients, contributions = machine(5, outs, 4)
    facts = summary(kernel, contributions, train=0)
    deviation = coefficients.std(0, correction=0) / coefficients.mean(0).abs()
    assert facts["coefficient_variation"] == pytest.approx(float(deviation.flatten().median()), rel=1e-9)
    constant = coefficients[:1].expand(5, -1, -1)
    facts = summary(kernel, torch.einsum("pcid,pid->pci", kernel, constant), train=0)
    assert facts["coefficient_variation"] < 1e-12


@pytest.mark.parametrize(("size", "left_out"), [(0.0, 1 / 6), (0.9e-3, 1 / 6), (1.1e-3, 0.0)])
@pytest.mark.parametrize("outs", [1, 2])
def test_small_kernels_are_not_divided_by(outs: int, size: float, left_out: float) -> None:
    """The smallest singular value of a block is compared with the largest entry, 2."""
    blocks = 2 * torch.eye(outs, dtype=torch.float64).expand(2, 3, outs, outs).clone()
    blocks[1, 2, 0, 0] = 2 * size
    facts = summary(blocks.transpose(1, 2), torch.ones(2, outs, 3, dtype=torch.float64), train=0)
    assert facts["left_out"] == pytest.approx(left_out, abs=1e-15)
    assert isnan(facts["coefficient_variation"]) is False


@pytest.mark.parametrize(
    ("matrix", "symmetry", "psd"),
    [
        ([[2.0, 1.0], [1.0, 2.0]], 0.0, 0.0),
        ([[2.0, 0.0], [0.0, -1.0]], 0.0, 0.5),
        ([[1.0, 1.0], [-1.0, 1.0]], sqrt(2), 0.0),
        ([[1.0, 4.0], [2.0, 1.0]], sqrt(8 / 22), 0.5),
        ([[-1.0, 0.0], [0.0, -2.0]], 0.0, inf),
        ([[-1.0, 0.0], [0.0, 0.0]], 0.0, inf),
    ],
)
def test_defects_of_a_kernel_that_is_none(matrix: list[list[float]], symmetry: float, psd: float) -> None:
    """The last matrix has the symmetric part [[1, 3], [3, 1]] with the eigenvalues 4 and −2."""
    kernel = torch.tensor([*matrix, [9.0, 9.0]], dtype=torch.float64)[:, None, :, None]
    contributions = torch.ones(3, 1, 2, dtype=torch.float64)
    facts = summary(kernel, contributions, train=2)
    assert facts["symmetry_defect"] == pytest.approx(symmetry, abs=10 * EPS)
    assert facts["psd_defect"] == pytest.approx(psd, abs=10 * EPS)
    assert "psd_defect" not in summary(kernel, contributions, train=0)
    assert summary(kernel.expand(-1, 1, -1, 2), contributions, train=2).keys() == {
        *("cancellation", "top_1", "top_5", "top_10"),
    }


def test_how_far_parts_exceed_their_sums_and_who_gives_most() -> None:
    contributions = torch.zeros(2, 1, 12, dtype=torch.float64)
    contributions[0, 0, :4] = torch.tensor([6.0, -2.0, 1.0, 1.0])
    contributions[1, 0] = 1.0
    facts = summary(torch.ones(2, 1, 0, 1), contributions, train=0)
    assert facts["cancellation"] == pytest.approx(22 / (6 + 12), rel=1e-15)
    assert facts["top_1"] == pytest.approx((6 / 10 + 1 / 12) / 2, rel=1e-15)
    assert facts["top_5"] == pytest.approx((1 + 5 / 12) / 2, rel=1e-15)
    assert facts["top_10"] == pytest.approx((1 + 10 / 12) / 2, rel=1e-15)
    assert isnan(summary(torch.ones(1, 1, 0, 1), torch.tensor([[[1.0, -1.0]]]), train=0)["cancellation"])
    assert top_share(torch.tensor([[[1.0, 1.0], [2.0, 0.0]]]), 1) == 0.75  # outputs of one example add up
