"""What layers push: covariances of one channel, pixel pair by pixel pair, and tangent kernels beside them.

    nngp   K[p, q](x, x′), the covariance at pixel p for x and at pixel q for x′
    ntk    Θ[p, q](x, x′), its tangent kernel

Two things are pushed. First K of each example with itself, [example, *pair], because nonlinear layers need the
variances K[p, p](x, x), and pooling makes coarse variances of fine covariances. Then, with these variances at hand, K
and Θ between the examples of two sides, [row, column, *pair]. Each layer's `push` holds its formula for both.

>>> from ntkexp.layer.pointwise import ReLU
>>> alone = ReLU().push(Covariance.alone(torch.tensor([[2.0, 0.0]]), Pairs.equal(())), (2,))
>>> alone.nngp, alone.left
(tensor([1.]), (tensor([2.]),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.pairs import Coarse, Pairs, average_pixels, keeps_pixels, pairs_after
from ntkexp.mistake import Mistake

ROUNDING = 16
"""Units of rounding within which a correlation counts as one, and a difference as none."""
PORTION = (
    2**17
)  # numbers: what is done to a portion of examples, one step after the other, meets it in a cache
Variances = tuple[Float[Tensor, "_ ..."], ...]
"""Of a side at each nonlinear layer, in the order met, [example, *pixel], as many pixels as there are by then."""


@dataclass(frozen=True)
class Signal:
    """What is known of a signal inside a network of infinite width, whatever its numbers are.

    `gaussian`: elements are independent Gaussians, the channels of a pixel of one variance, as fresh weights leave
    them; the formulas of pointwise layers and norms hold for these alone. `fresh`: independent of whatever entered the
    branch of the network that it belongs to; the covariance of a sum is the sum of covariances only where all but one
    of its terms are. `wide`: there are as many channels as the network is wide, which inputs are not; shares of
    channels have a limit only then. `uneven`: channels of different variances stand behind each other.

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
        """Activations and norms follow weights."""
        if self.uneven:
            raise Mistake(
                f"{layer} has no known limit of infinite width right after a concatenation, whose channels differ in "
                "variance; put it into the branches, or a Dense or Conv layer before it"
            )
        if not self.gaussian:
            raise Mistake(
                f"{layer} has a limit of infinite width only after weights; put a Dense or Conv layer right before it"
            )


@dataclass(frozen=True)
class PairEnd:
    """One end of many pairs: variances, and how a function of them is laid out beside the covariances."""

    variance: Tensor
    lay_out: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Distances:
    """How nearly equal or opposite the two ends u and v of pairs are, [*examples, *pair].

        near + slack = E (u − v)² = q₁ + q₂ − 2c,    far + slack = E (u + v)² = q₁ + q₂ + 2c,    excess = q₁ − q₂

    No digits cancel in them as in these differences. After weights they are sums like q and c. At a nonlinear layer
    `at` makes `slack` (√q₁ − √q₂)², so that near is 2(√(q₁q₂) − c), and far 2(√(q₁q₂) + c).
    """

    near: Tensor
    far: Tensor
    slack: Tensor
    excess: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Distances:
        return Distances(
            function(self.near), function(self.far), function(self.slack), function(self.excess)
        )

    def plus(self, other: Distances) -> Distances:
        return Distances(
            self.near + other.near,
            self.far + other.far,
            self.slack + other.slack,
            self.excess + other.excess,
        )

    def at(self, q1: Tensor, q2: Tensor) -> Distances:
        """The same distances, divided as these variances say."""
        unequal = unequal_roots(q1, q2, self.excess)
        rest = self.slack - unequal  # what biases and means over pixels make of it; never negative
        rest = torch.where(rest > ROUNDING * torch.finfo(rest.dtype).eps * self.slack, rest, 0.0)
        return Distances(
            (self.near + rest).clamp_min(0), (self.far + rest).clamp_min(0), unequal, self.excess
        )

    @property
    def of_difference(self) -> Tensor:
        """E (u − v)²."""
        return self.near + self.slack

    @property
    def of_sum(self) -> Tensor:
        """E (u + v)²."""
        return self.far + self.slack


def unequal_roots(q1: Tensor, q2: Tensor, excess: Tensor) -> Tensor:
    """(√q₁ − √q₂)², from q₁ − q₂."""
    total = safe_root(q1) + safe_root(q2)
    return (excess / torch.where(total > 0, total, 1.0)).square()


def safe_root(x: Tensor) -> Tensor:
    """√x, zero where x ≤ 0, with a derivative of zero there."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)


@dataclass(frozen=True)
class Covariance:
    """K and Θ between two sides, whose variances at nonlinear layers are `left` and `right`, after `met` such layers;
    or K of each example with itself (`ntk` is None), whose variances are collected in `left` on the way.

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
    same: bool = False  # row k and column k are one example
    met: int = 0
    in_pairs: bool = (
        False  # row k is paired with example k of the other side alone, and there is one column
    )
    carried: tuple[Tensor, Distances] | None = (
        None  # distances, and the covariances to which they belong
    )

    @classmethod
    def alone(cls, x: Float[Tensor, "example channel *pixel"], pairs: Pairs) -> Covariance:
        """K of each input with itself: the mean over channels of x[p] x[q]."""
        few = split_portions(x, pairs.count * x.shape[1])
        return cls(
            torch.cat([(pairs.spread(part) * pairs.at_second(part)).mean(1) for part in few]),
            None,
            pairs,
        )

    @classmethod
    def between(
        cls, x1: Tensor, x2: Tensor, pairs: Pairs, left: Variances, right: Variances, same: bool
    ) -> Covariance:
        """K of inputs [example, channel, *pixel]: the mean over channels of x₁[p] x₂[q]; nothing is learned yet."""
        if pairs.pixels:
            nngp = x1.new_zeros(())
            for one, two in zip(x1.unbind(1), x2.unbind(1), strict=True):
                nngp = nngp + pairs.spread(one)[:, None] * pairs.at_second(two)[None]
            nngp = nngp / x1.shape[1]
        else:
            nngp = x1 @ x2.t() / x1.shape[1]
        return cls(nngp, torch.zeros_like(nngp), pairs, left, right, same)

    @classmethod
    def of_pairs(
        cls, x1: Tensor, x2: Tensor, pairs: Pairs, left: Variances, right: Variances, same: bool
    ) -> Covariance:
        """K of each input in x₁ with the one in x₂ that stands at the same place, and their distances, where pixels
        meet themselves alone."""

        def mean(values: Tensor) -> Tensor:
            return pairs.spread(values.mean(1))[:, None]

        nngp = mean(x1 * x2)
        start = cls(nngp, torch.zeros_like(nngp), pairs, left, right, same, in_pairs=True)
        # near and far are E (su ∓ v/s)² with s² = √q₂/√q₁, and su ∓ v/s = s(u ∓ v) ± (s − 1/s)v
        q1, q2 = (x.square().mean(1, keepdim=True) for x in (x1, x2))
        difference, total = x1 - x2, x1 + x2
        excess = (difference * total).mean(1, keepdim=True)
        alive = (q1 > 0) & (q2 > 0)
        root1, root2 = (torch.where(alive, q, 1.0).sqrt() for q in (q1, q2))
        s = torch.where(alive, (root2 / root1).sqrt(), 0.0)
        gap = (
            torch.where(alive, -excess / ((root2 * root1).sqrt() * (root1 + root2)), 0.0) * x2
        )  # (s − 1/s)v
        near, far = ((s * difference + gap).square(), (s * total - gap).square())
        unequal = unequal_roots(q1, q2, excess)
        return start.with_distances(Distances(mean(near), mean(far), mean(unequal), mean(excess)))

    @property
    def distances(self) -> Distances | None:
        """The distances. A layer that makes other covariances, and does not give their distances, loses them."""
        return (
            self.carried[1] if self.carried is not None and self.carried[0] is self.nngp else None
        )

    def with_distances(self, distances: Distances | None) -> Covariance:
        """The same covariance with these distances."""
        return replace(self, carried=None if distances is None else (self.nngp, distances))

    def map(self, function: Callable[[Tensor], Tensor]) -> Covariance:
        """The same linear function of K and of Θ."""
        found = replace(
            self, nngp=function(self.nngp), ntk=None if self.ntk is None else function(self.ntk)
        )
        return found.with_distances(
            None if self.distances is None else self.distances.map(function)
        )

    def meet(self) -> tuple[Covariance, PairEnd, PairEnd]:
        """A nonlinear layer: the covariance with that layer counted, and the variances that it needs at both ends."""
        pairs = self.pairs
        if self.ntk is None:
            q = pairs.diagonal(self.nngp)
            return (
                replace(self, left=(*self.left, q)),
                PairEnd(q, pairs.spread),
                PairEnd(q, pairs.at_second),
            )
        first = PairEnd(self.left[self.met], lambda values: pairs.spread(values)[:, None])
        rows = 1 if self.in_pairs else 0
        second = PairEnd(
            self.right[self.met], lambda values: pairs.at_second(values).unsqueeze(rows)
        )
        return replace(self, met=self.met + 1), first, second

    def where_same(self, values: Tensor, alone: Float[Tensor, "example *pixel"]) -> Tensor:
        """Values between two equal sides, with others where a pixel of an example meets itself."""
        if self.in_pairs:
            return self.pairs.with_diagonal(values[:, 0], alone)[:, None]
        diagonal = self.pairs.with_diagonal(values.diagonal(dim1=0, dim2=1).movedim(-1, 0), alone)
        return values.diagonal_scatter(diagonal.movedim(0, -1), dim1=0, dim2=1)

    def coarse(self, coarse: Sequence[Coarse]) -> Covariance:
        """On coarser pixels, axis by axis: K′[p′, q′] = mean K[p, q] over members p of p′ and q of q′, and Θ′ alike."""
        if keeps_pixels(coarse, self.pairs):
            return self
        averages = self.map(lambda values: average_pixels(values, self.pairs, coarse))
        return replace(averages, pairs=pairs_after(coarse, self.pairs))

    def without_pixels(self) -> Covariance:
        """An image of one pixel as a vector."""
        if not self.pairs.pixels:
            return self
        # The only pair, or none where no later layer asks for variances: its sum is then zero.
        examples = self.nngp.dim() - 2 * len(self.pairs.pixels)
        return replace(
            self.map(lambda values: values.flatten(examples).sum(examples)), pairs=Pairs((), ())
        )

    def following(self, branch: Covariance) -> Covariance:
        """This covariance at the entry of a branch that comes after another one, `branch`, has met its variances."""
        return replace(self, left=branch.left, met=branch.met)

    def plus(self, last: Covariance) -> Covariance:
        """The sum with the branch that came last, of independent signals, at the pairs that both have."""
        pairs = self.pairs.common(last.pairs)
        one = self.map(lambda v: self.pairs.restrict(v, pairs))
        two = last.map(lambda v: last.pairs.restrict(v, pairs))
        ntk = None if one.ntk is None or two.ntk is None else one.ntk + two.ntk
        total = replace(last, nngp=one.nngp + two.nngp, ntk=ntk, pairs=pairs)
        if one.distances is None or two.distances is None:
            return total.with_distances(None)
        return total.with_distances(one.distances.plus(two.distances))


def split_portions(
    x: Float[Tensor, "example ..."], each: int
) -> Sequence[Float[Tensor, "few ..."]]:
    """The examples, in chunks of a reasonable size.

    >>> [len(portion) for portion in split_portions(torch.zeros(5, 3), 2**16)]
    [2, 2, 1]
    """
    return torch.split(x, max(1, PORTION // max(1, each)))
