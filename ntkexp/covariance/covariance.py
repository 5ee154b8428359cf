"""Covariances and tangent kernels between pixels at infinite width,
and the operations that layers need.

    nngp   K[p, q](x, x′), the covariance of pixel p for x with pixel q for x′
    ntk    Θ[p, q](x, x′), the tangent kernel at these pixels

Layers transform two objects, one after the other. The first is K between each example
and itself, [example, *pair]. It gives the variances K[p, p](x, x) at all nonlinear
layers. The second is K and Θ between left and right examples, [row, column, *pair].
There, nonlinear layers use the variances from the first object. The method `push` of a
layer contains the formulas for both.

>>> from ntkexp.layer.pointwise import ReLU
>>> alone = ReLU().push(Covariance.alone(torch.tensor([[2.0, 0.0]]), Pairs.equal(())), (2,))
>>> alone.nngp, alone.left
(tensor([1.]), (tensor([2.]),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.pairs import (
    Coarse,
    Pairs,
    average_pixels,
    pairs_after,
)
from ntkexp.mistake import Mistake

ROUNDING = 16
"""If 1 − |ρ| is at most this many eps, the correlation ρ counts as ±1. A relative
difference of at most this many eps counts as 0."""
PORTION = 2**17
"""Number of elements in a portion of examples. Portions of this size stay in the cache
between operations."""
Variances = tuple[Float[Tensor, "_ ..."], ...]
"""The variances of the left or right examples at each nonlinear layer,
[example, *pixel]."""


@dataclass(frozen=True)
class Signal:
    """Properties of a signal (the values after a layer) in an infinitely wide network.
    Layers use them to check that a limit exists.

    - `gaussian`: the channels are independent Gaussians of equal variance at each
      pixel. This holds after weights. Pointwise layers and norms require it.
    - `fresh`: the signal is independent of the input of its branch. The covariances of
      a sum add only if all terms except one are fresh.
    - `wide`: the number of channels grows with the width, unlike the number of input
      channels. Dropout and concatenations require it.
    - `uneven`: a concatenation has joined channels of different variances.

    >>> Signal().after_weights()
    Signal(gaussian=True, fresh=True, wide=True, uneven=False)
    """

    gaussian: bool = False
    fresh: bool = False
    wide: bool = False
    uneven: bool = False

    def after_weights(self) -> Signal:
        return Signal(gaussian=True, fresh=True, wide=True)

    def refuse_unmixed(self, layer: str) -> None:
        """Raise unless the signal directly follows weights,
        as activations and norms require."""
        if self.uneven:
            raise Mistake(
                f"{layer} has no known limit of infinite width right after a concatenation, whose "
                "channels differ in variance; put it into the branches, or a Dense or Conv layer "
                "before it"
            )
        if not self.gaussian:
            raise Mistake(
                f"{layer} has a limit of infinite width only after weights; put a Dense or Conv "
                "layer right before it"
            )


@dataclass(frozen=True)
class PairEnd:
    """The variances of the first pixels of all pairs, or of the second pixels.

    `broadcast` expands values per pixel to the axes of the pairs.
    """

    variance: Tensor
    broadcast: Callable[[Tensor], Tensor]


class Distances(NamedTuple):
    """Squared distances of the signals u and v at the two pixels of each pair,
    [*examples, *pair].

        near + slack = E (u − v)² = q₁ + q₂ − 2c
        far + slack  = E (u + v)² = q₁ + q₂ + 2c
        excess       = q₁ − q₂

    q₁ and q₂ are the variances of u and v, and c is their covariance. The differences
    on the right lose digits if u ≈ ±v. Distances avoid this: they are computed from the
    inputs, and affine layers transform near, far, slack and excess linearly, like q and
    c. Only the sums near + slack and far + slack are determined. At a nonlinear layer,
    `at` chooses slack = (√q₁ − √q₂)², so that near = 2(√(q₁q₂) − c) and
    far = 2(√(q₁q₂) + c)."""

    near: Tensor
    far: Tensor
    slack: Tensor
    excess: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Distances:
        return Distances(*map(function, self))

    def plus(self, other: Distances) -> Distances:
        return Distances(*map(torch.add, self, other))

    def at(self, q1: Tensor, q2: Tensor) -> Distances:
        """Return the same distances with slack = (√q₁ − √q₂)²,
        for the variances q₁ and q₂."""
        slack = unequal_roots(q1, q2, self.excess)
        # After biases and means over pixels, slack is larger than (√q₁ − √q₂)². Move
        # the surplus into near and far.
        surplus = self.slack - slack
        is_significant = (
            surplus > ROUNDING * torch.finfo(surplus.dtype).eps * self.slack
        )
        surplus = torch.where(is_significant, surplus, 0.0)
        near = (self.near + surplus).clamp_min(0)
        far = (self.far + surplus).clamp_min(0)
        return Distances(near, far, slack, self.excess)

    @property
    def of_difference(self) -> Tensor:
        """E (u − v)² = near + slack, for the signals u and v at the two pixels."""
        return self.near + self.slack

    @property
    def of_sum(self) -> Tensor:
        """E (u + v)² = far + slack, for the signals u and v at the two pixels."""
        return self.far + self.slack


def unequal_roots(q1: Tensor, q2: Tensor, excess: Tensor) -> Tensor:
    """Return (√q₁ − √q₂)². `excess` is q₁ − q₂."""
    total = safe_root(q1) + safe_root(q2)
    return (excess / torch.where(total > 0, total, 1.0)).square()


def safe_root(x: Tensor) -> Tensor:
    """Return √x. For x ≤ 0, return 0 with derivative 0."""
    positive = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, positive.sqrt(), 0.0)


@dataclass(frozen=True)
class Covariance:
    """K and Θ between left and right examples, or K between each example and itself if
    `ntk` is None.

    Between left and right examples, `left` and `right` hold the variances of the
    examples at all nonlinear layers, and `nonlinear_layers` counts the nonlinear layers
    that `push` has passed. Between each example and itself, nonlinear layers append
    their variances to `left`.

    >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> Covariance.between(x, x, Pairs.equal(()), (), (), same=True).nngp
    tensor([[1., 0.],
            [0., 1.]])
    """

    nngp: Float[Tensor, "*examples *pair"]
    ntk: Float[Tensor, "*examples *pair"] | None
    pairs: Pairs
    left: Variances = ()
    right: Variances = ()
    same: bool = False
    """True if row k and column k are the same example, for all k."""
    nonlinear_layers: int = 0
    in_pairs: bool = False
    """True if left example k is paired only with right example k. Kernels then have a
    single column."""
    carried: tuple[Tensor, Distances] | None = None
    """The tensor `nngp`, and the distances that belong to it."""

    @classmethod
    def alone(
        cls, x: Float[Tensor, "example channel *pixel"], pairs: Pairs
    ) -> Covariance:
        """Return K between each input and itself:
        the mean over channels of x[p] x[q]."""
        means = []
        for part in split_portions(x, pairs.count * x.shape[1]):
            products = pairs.at_first(part) * pairs.at_second(part)
            means.append(products.mean(1))
        return cls(torch.cat(means), None, pairs)

    @classmethod
    def between(
        cls,
        x1: Tensor,
        x2: Tensor,
        pairs: Pairs,
        left: Variances,
        right: Variances,
        same: bool,
    ) -> Covariance:
        """Return K = mean over channels of x₁[p] x₂[q], and Θ = 0,
        for inputs [example, channel, *pixel]."""
        if pairs.pixels:
            total = x1.new_zeros(())
            for one, two in zip(x1.unbind(1), x2.unbind(1), strict=True):
                total = (
                    total + pairs.at_first(one)[:, None] * pairs.at_second(two)[None]
                )
        else:
            total = x1 @ x2.t()
        nngp = total / x1.shape[1]
        return cls(nngp, torch.zeros_like(nngp), pairs, left, right, same)

    @classmethod
    def of_pairs(
        cls,
        x1: Tensor,
        x2: Tensor,
        pairs: Pairs,
        left: Variances,
        right: Variances,
        same: bool,
    ) -> Covariance:
        """Return K and the distances between the k-th inputs in x₁ and x₂, for all k.
        Each pair consists of equal pixels."""

        def mean(values: Tensor) -> Tensor:
            return pairs.at_first(values.mean(1))[:, None]

        nngp = mean(x1 * x2)
        start = cls(
            nngp, torch.zeros_like(nngp), pairs, left, right, same, in_pairs=True
        )
        q1 = x1.square().mean(1, keepdim=True)
        q2 = x2.square().mean(1, keepdim=True)
        difference = x1 - x2
        total = x1 + x2
        excess = (difference * total).mean(1, keepdim=True)

        # near and far are E (su ∓ v/s)² with s² = √q₂/√q₁. Evaluate su ∓ v/s as s(u ∓
        # v) ± (s − 1/s)v, and s − 1/s from q₁ − q₂ = E (u − v)(u + v) (`excess`). So
        # rounding errors stay small if u ≈ ±v.
        nonzero = (q1 > 0) & (q2 > 0)
        root1 = torch.where(nonzero, q1, 1.0).sqrt()
        root2 = torch.where(nonzero, q2, 1.0).sqrt()
        s = torch.where(nonzero, (root2 / root1).sqrt(), 0.0)
        s_minus_inverse = -excess / ((root2 * root1).sqrt() * (root1 + root2))
        shift = torch.where(nonzero, s_minus_inverse, 0.0) * x2
        near = (s * difference + shift).square()
        far = (s * total - shift).square()
        slack = unequal_roots(q1, q2, excess)
        distances = Distances(near, far, slack, excess)
        return start.with_distances(distances.map(mean))

    @property
    def distances(self) -> Distances | None:
        """The distances for the present `nngp`. None if the layer that computed `nngp`
        has no formula for distances."""
        if self.carried is None or self.carried[0] is not self.nngp:
            return None
        return self.carried[1]

    def with_distances(self, distances: Distances | None) -> Covariance:
        if distances is None:
            return replace(self, carried=None)
        return replace(self, carried=(self.nngp, distances))

    def map(self, function: Callable[[Tensor], Tensor]) -> Covariance:
        """Apply a linear function to the covariance K,
        the tangent kernel Θ and the distances."""
        mapped = replace(self, nngp=function(self.nngp), carried=None)
        if self.ntk is not None:
            mapped = replace(mapped, ntk=function(self.ntk))
        if self.distances is not None:
            mapped = mapped.with_distances(self.distances.map(function))
        return mapped

    def enter_nonlinear(self) -> tuple[Covariance, PairEnd, PairEnd]:
        """Enter a nonlinear layer. Return the covariance, in which `left` or
        `nonlinear_layers` is updated, and the variances at both pixels."""
        pairs = self.pairs
        if self.ntk is None:
            q = pairs.diagonal(self.nngp)
            collected = replace(self, left=(*self.left, q))
            return collected, PairEnd(q, pairs.at_first), PairEnd(q, pairs.at_second)
        row_axis = 1 if self.in_pairs else 0

        def at_first(values: Tensor) -> Tensor:
            return pairs.at_first(values)[:, None]

        def at_second(values: Tensor) -> Tensor:
            return pairs.at_second(values).unsqueeze(row_axis)

        first = PairEnd(self.left[self.nonlinear_layers], at_first)
        second = PairEnd(self.right[self.nonlinear_layers], at_second)
        return replace(self, nonlinear_layers=self.nonlinear_layers + 1), first, second

    def replace_self_pairs(
        self, values: Tensor, alone: Float[Tensor, " example *pixel"]
    ) -> Tensor:
        """Replace the values of pairs of a pixel with itself by `alone`."""
        if self.in_pairs:
            return self.pairs.with_diagonal(values[:, 0], alone)[:, None]
        of_same = values.diagonal(dim1=0, dim2=1).movedim(-1, 0)
        of_same = self.pairs.with_diagonal(of_same, alone)
        return values.diagonal_scatter(of_same.movedim(0, -1), dim1=0, dim2=1)

    def coarse(self, coarse: Sequence[Coarse]) -> Covariance:
        """Average pixels in K and Θ: K′[p′, q′] = mean K[p, q]
        over p in p′ and q in q′."""
        axes = zip(coarse, self.pairs.pixels, strict=True)
        if all(one.is_identity(pixels) for one, pixels in axes):
            return self
        averages = self.map(lambda values: average_pixels(values, self.pairs, coarse))
        return replace(averages, pairs=pairs_after(coarse, self.pairs))

    def without_pixels(self) -> Covariance:
        """Turn an image of one pixel into a vector."""
        if not self.pairs.pixels:
            return self
        # The sum over the pixel pairs removes their axes: there is only one pair. If
        # no later layer needs variances, no pair is stored, and the sum is 0.
        axis = self.nngp.dim() - 2 * len(self.pairs.pixels)
        vectors = self.map(lambda values: values.flatten(axis).sum(axis))
        return replace(vectors, pairs=Pairs((), ()))

    def for_next_branch(self, branch: Covariance) -> Covariance:
        """Return this covariance as the input of the next branch. Take `left` and
        `nonlinear_layers` from the result of `branch`.
        """
        return replace(self, left=branch.left, nonlinear_layers=branch.nonlinear_layers)

    def plus(self, last: Covariance) -> Covariance:
        """Add the kernels of another branch, an independent signal,
        at the pairs that both branches have."""
        pairs = self.pairs.common(last.pairs)
        one = self.map(lambda v: self.pairs.restrict(v, pairs))
        two = last.map(lambda v: last.pairs.restrict(v, pairs))
        total = replace(
            last, nngp=one.nngp + two.nngp, ntk=None, pairs=pairs, carried=None
        )
        if one.ntk is not None and two.ntk is not None:
            total = replace(total, ntk=one.ntk + two.ntk)
        if one.distances is not None and two.distances is not None:
            total = total.with_distances(one.distances.plus(two.distances))
        return total


def split_portions(
    x: Float[Tensor, "example ..."], numbers_each: int
) -> Sequence[Float[Tensor, "few ..."]]:
    """Split examples into portions with at most about PORTION elements. An example has
    `numbers_each` elements.

    >>> [len(portion) for portion in split_portions(torch.zeros(5, 3), 2**16)]
    [2, 2, 1]
    """
    examples = PORTION // max(1, numbers_each)
    return torch.split(x, max(1, examples))
