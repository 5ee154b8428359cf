"""Pairs of nearly equal or opposite examples: recompute their kernels from distances.

The engines compute the angle between two signals from their covariance c and their
variances q₁ and q₂. Rounding changes the correlation ρ = c/√(q₁q₂) by a few eps, and
therefore the angle by about eps/√(2(1 − |ρ|)). The tangent kernel of a ReLU network
depends on this angle. For two unit vectors at a distance of 1e-7, only nine digits of
the kernel are correct in float64. At a distance of 1e-4, four digits are correct in
float32. A computation from the distance ‖x − x′‖ loses no digits. Near pairs are rare,
so only their kernels are recomputed from distances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.covariance.covariance import PORTION
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.layer.spec import every_layer
from ntkexp.limit.network import Kernels, Network, Side, finite, kernels_of_pairs
from ntkexp.stream import normal, stream

MAX_NEAR_REST = {torch.float64: 1e-6, torch.float32: 1e-5}
"""A pair is near if 1 − |ρ| is at most this value, where ρ is the correlation of its
inputs.

If the kernel of a layer is computed from the covariance of such a pair, digits cancel.
At this threshold, the error is 1e-13 in float64 and 2e-5 in float32."""
SEARCH_DEVIATIONS = 3.0
"""The search radius for projections on a random axis. Its unit is the standard
deviation of the difference between the two projections of a pair at the threshold.

With three standard deviations, the search may miss a few pairs near the threshold. A
pair at half this distance is missed only if its projected difference exceeds six of its
own standard deviations."""
PROJECTIONS = 2
PairIndices: TypeAlias = tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]
"""Row and column indices of pairs."""


def resolves(network: Network) -> bool:
    """Return True if kernels of near pairs can be computed from distances.

    This requires a layer with a distance formula. The kernels of the outputs must
    depend only on pairs of equal pixels.
    """
    pairs_equal_pixels = network.pairs == Pairs.equal(network.shape[1:])
    layers = every_layer(network.layers)
    return pairs_equal_pixels and any(
        isinstance(layer, AbstractPointwise) and layer.resolves for layer in layers
    )


def with_near_pairs(
    network: Network, left: Side, right: Side, same: bool, kernels: Kernels
) -> Kernels:
    """Replace the kernels of near pairs by values computed from distances."""
    rest = MAX_NEAR_REST.get(left.x.dtype)
    if rest is None or not resolves(network):
        return kernels
    block = BlockSides(network, left, right, same)
    x1 = left.x.detach().flatten(1)
    x2 = right.x.detach().flatten(1)
    has_changed = False
    for places in near_pairs(x1, x2, same, rest):
        has_changed |= block.fill(kernels, places)
    if not has_changed:
        return kernels
    return finite(kernels)


def all_from_distances(
    network: Network, left: Side, right: Side, same: bool
) -> Kernels:
    """Compute all kernels of a block from distances,
    after an engine raised `Unresolved`."""
    rows = len(left.x)
    columns = len(right.x)
    kernels = left.x.new_zeros(rows, columns), left.x.new_zeros(rows, columns)
    block = BlockSides(network, left, right, same)
    for row in range(rows):
        first = row + 1 if same else 0
        others = torch.arange(first, columns, device=left.x.device)
        block.fill(kernels, (torch.full_like(others, row), others))
    if same:
        diagonal = torch.arange(rows, device=left.x.device)
        values_by_kernel = kernels_of_pairs(network, left, right, same=True)
        for kernel, values in zip(kernels, values_by_kernel, strict=True):
            kernel[diagonal, diagonal] = values
    return finite(kernels)


@dataclass(frozen=True)
class BlockSides:
    """A network, and the examples of a block's rows (`left`) and columns (`right`)."""

    network: Network
    left: Side
    right: Side
    same: bool

    def fill(self, kernels: Kernels, places: PairIndices) -> bool:
        """Write the kernels of the given pairs into a block. If rows and columns are
        the same examples, also write the mirrored pairs.

        Return False if there are no pairs.
        """
        rows, columns = places
        if not len(rows):
            return False
        pairs = self.left.part(rows), self.right.part(columns)
        values_by_kernel = kernels_of_pairs(self.network, *pairs, same=False)
        for kernel, values in zip(kernels, values_by_kernel, strict=True):
            kernel[rows, columns] = values
            if self.same:
                kernel[columns, rows] = values
        return True


# --- The search for near pairs
#
# Near examples, divided by their norms, have nearly equal or nearly opposite
# projections on random axes. Find candidates by sorting the first projections, discard
# candidates whose other projections differ, and compute the distances of the remaining
# pairs.


def near_pairs(
    x1: Float[Tensor, "row number"],
    x2: Float[Tensor, "column number"],
    same: bool,
    rest: float,
) -> Iterator[PairIndices]:
    """Yield groups of pairs whose correlation ρ satisfies 1 − |ρ| ≤ rest. If rows and
    columns are the same examples, yield only pairs above the diagonal."""
    generator = stream("near pairs")
    axes = normal(generator, PROJECTIONS, x1.shape[1]).to(x1)
    norms1, keys1 = project_unit_vectors(x1, axes)
    norms2, keys2 = (norms1, keys1) if same else project_unit_vectors(x2, axes)
    # unit vectors have ‖u − v‖ = √(2 (1 − ρ)), and their projections differ by about
    # this much
    radius = SEARCH_DEVIATIONS * sqrt(2 * rest)
    for sign in (1.0, -1.0):
        for rows, columns in pairs_within(keys1[0], sign * keys2[0], radius):
            places = torch.stack([rows, columns])
            if same:
                places = places[:, rows < columns]

            # Keep candidates whose other projections agree.
            for key1, key2 in zip(keys1[1:], keys2[1:], strict=True):
                gap = (key1[places[0]] - sign * key2[places[1]]).abs()
                places = places[:, gap <= radius]

            # Keep pairs at small distances.
            for part in torch.split(places, max(1, PORTION // x1.shape[1]), 1):
                one = x1[part[0]] / norms1[part[0]]
                other = x2[part[1]] / norms2[part[1]]
                is_near = (one - sign * other).square().sum(1) <= 2 * rest
                yield part[0, is_near], part[1, is_near]


def project_unit_vectors(
    x: Float[Tensor, "example number"], axes: Float[Tensor, "axis number"]
) -> tuple[Float[Tensor, "example 1"], Float[Tensor, "axis example"]]:
    """Return the norms of the examples, and the projections of their unit vectors.

    An example of zeros gets norm 1, so that it is far from all others.
    """
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    norm = torch.where(norm > 0, norm, 1.0)
    # Separate products are faster than one product with a narrow matrix.
    keys = [torch.mv(x, axis) / norm[:, 0] for axis in axes]
    return norm, torch.stack(keys)


def pairs_within(
    keys: Float[Tensor, " row"], others: Float[Tensor, " column"], radius: float
) -> Iterator[PairIndices]:
    """Yield groups of pairs (row, column) whose numbers differ by at most `radius`.

    >>> keys, others = torch.tensor([0.0, 5.0]), torch.tensor([5.5, 0.5])
    >>> [(rows.tolist(), columns.tolist()) for rows, columns in pairs_within(keys, others, 1.0)]
    [([0, 1], [1, 0])]
    """
    # For each key: its first match in sorted order, and the number of matches.
    ordered, order = others.sort()
    first = torch.searchsorted(ordered, keys - radius)
    counts = torch.searchsorted(ordered, keys + radius, right=True) - first
    # Form groups of consecutive keys with about PORTION matches in total.
    group = counts.cumsum(0) // PORTION
    sizes = torch.unique_consecutive(group, return_counts=True)[1].tolist()
    for keys_of_group in torch.split(
        torch.arange(len(keys), device=keys.device), sizes
    ):
        group_counts = counts[keys_of_group]
        rows = torch.repeat_interleave(keys_of_group, group_counts)
        before = group_counts.cumsum(0) - group_counts
        matches_before = torch.repeat_interleave(before, group_counts)
        match = torch.arange(len(rows), device=keys.device) - matches_before
        yield rows, order[first[rows] + match]
