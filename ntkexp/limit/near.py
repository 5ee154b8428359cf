"""Pairs of examples that are nearly equal or opposite, whose kernels are computed again from their distances.

The engines know a pair by its covariance c. Rounding moves the correlation ρ = c/√(q₁q₂) by a few eps, and so the angle
of the pair by eps/√(2(1 − |ρ|)), and with it the tangent kernel of a ReLU: at a distance of 1e-7 it has nine digits
left, and at 1e-4 in single precision four. From the distance itself none are lost.

Most examples are far from each other, so the engines stay as they are, and only near pairs are computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ntkexp.covariance.covariance import PORTION
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.layer.spec import every_layer
from ntkexp.limit.network import Kernels, Network, Side, cuts, finite, kernels_of_pairs
from ntkexp.stream import stream

NEAR = {torch.float64: 1e-6, torch.float32: 1e-5}
"""1 − |ρ| of the inputs, up to which a pair is near: there a layer loses 1e-13 of a kernel, or 2e-5."""
DEVIATIONS = 3.0  # at half the distance, where twice as much would be lost, these are six
PROJECTIONS = 2
Places: TypeAlias = tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]


def resolves(network: Network) -> bool:
    """Whether distances help: a layer needs them, and pixels meet only themselves on the way."""
    layers = (
        layer for layer in every_layer(network.layers) if isinstance(layer, AbstractPointwise)
    )
    return any(layer.resolves for layer in layers) and network.pairs == Pairs.equal(
        network.shape[1:]
    )


def with_near_pairs(
    network: Network, left: Side, right: Side, same: bool, kernels: Kernels
) -> Kernels:
    """The kernels of a block, with those of near pairs from their distances."""
    rest = NEAR.get(left.x.dtype)
    if rest is None or not resolves(network):
        return kernels
    changed = False
    for places in near_pairs(left.x.detach().flatten(1), right.x.detach().flatten(1), same, rest):
        changed |= fill(network, left, right, same, kernels, places)
    return finite(kernels) if changed else kernels


def all_from_distances(network: Network, left: Side, right: Side, same: bool) -> Kernels:
    """The kernels of a block in which an engine could not tell near neighbours apart."""
    shape = len(left.x), len(right.x)
    kernels = left.x.new_zeros(shape), left.x.new_zeros(shape)
    for row in range(shape[0]):
        columns = torch.arange(row + 1 if same else 0, shape[1], device=left.x.device)
        fill(network, left, right, same, kernels, (torch.full_like(columns, row), columns))
    if same:
        everyone = torch.arange(shape[0], device=left.x.device)
        own = kernels_of_pairs(network, left, right, same=True)
        for whole, values in zip(kernels, own, strict=True):
            whole[everyone, everyone] = values
    return finite(kernels)


def fill(
    network: Network, left: Side, right: Side, same: bool, kernels: Kernels, places: Places
) -> bool:
    """Fill in the pairs at these places, and their mirror images if both sides are the same. Return whether there were
    any."""
    rows, columns = places
    if not len(rows):
        return False
    found = kernels_of_pairs(network, left.part(rows), right.part(columns), same=False)
    for whole, values in zip(kernels, found, strict=True):
        whole[rows, columns] = values
        if same:
            whole[columns, rows] = values
    return True


# --- The search. Near examples, divided by their lengths, have nearly the same projections on any axis, or opposite
# ones. So examples are sorted by one projection, neighbours in this order are compared by others, and few remain.


def near_pairs(
    x1: Float[Tensor, "row number"], x2: Float[Tensor, "column number"], same: bool, rest: float
) -> Iterator[Places]:
    """The places of pairs with 1 − |ρ| ≤ rest, some at a time; above the diagonal if both sides are the same."""
    axes = torch.randn(
        PROJECTIONS, x1.shape[1], generator=stream("near pairs"), dtype=torch.float64
    ).to(x1)
    lengths1, keys = projected(x1, axes)
    lengths2, others = (lengths1, keys) if same else projected(x2, axes)
    reach = DEVIATIONS * sqrt(
        2 * rest
    )  # u − v has the length √(2 (1 − ρ)), and projections of this deviation
    for sign in (1.0, -1.0):
        for places in within(keys[0], sign * others[0], reach):
            if same:
                places = kept(places, places[0] < places[1])  # noqa: PLW2901  fewer with each test
            for key, other in zip(keys[1:], others[1:], strict=True):
                apart = (key[places[0]] - sign * other[places[1]]).abs()
                places = kept(places, apart <= reach)  # noqa: PLW2901
            for part in cuts(len(places[0]), max(1, PORTION // x1.shape[1])):
                rows, columns = places[0][part], places[1][part]
                difference = x1[rows] / lengths1[rows] - sign * x2[columns] / lengths2[columns]
                yield kept((rows, columns), difference.square().sum(1) <= 2 * rest)


def kept(
    places: Places, chosen: Bool[Tensor, " pair"]
) -> tuple[Int[Tensor, " some"], Int[Tensor, " some"]]:
    return places[0][chosen], places[1][chosen]


def projected(
    x: Float[Tensor, "example number"], axes: Float[Tensor, "axis number"]
) -> tuple[Float[Tensor, "example 1"], Float[Tensor, "axis example"]]:
    """The lengths of examples, and the projections of their units. An example of zeros is far from all others."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    length = torch.where(length > 0, length, 1.0)
    keys = [
        torch.mv(x, axis) / length[:, 0] for axis in axes
    ]  # faster than a product with a narrow matrix
    return length, torch.stack(keys)


def within(
    keys: Float[Tensor, " row"], others: Float[Tensor, " column"], reach: float
) -> Iterator[Places]:
    """The places of pairs of numbers that differ by at most `reach`, some at a time.

    >>> [[each.tolist() for each in some] for some in within(torch.tensor([0.0, 5.0]), torch.tensor([5.5, 0.5]), 1.0)]
    [[[0, 1], [1, 0]]]
    """
    ordered, order = others.sort()
    first = torch.searchsorted(ordered, keys - reach)
    counts = torch.searchsorted(ordered, keys + reach, right=True) - first
    group = counts.cumsum(0) // PORTION
    sizes = torch.unique_consecutive(group, return_counts=True)[1].tolist()
    for some in torch.split(torch.arange(len(keys), device=keys.device), sizes):
        rows = torch.repeat_interleave(some, counts[some])
        begun = torch.repeat_interleave(counts[some].cumsum(0) - counts[some], counts[some])
        place = torch.arange(len(rows), device=keys.device) - begun
        yield rows, order[first[rows] + place]
