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

PORTION = 2**17  # numbers: what is done to a portion of examples, one step after the other, meets it in a cache
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

    @classmethod
    def alone(cls, x: Float[Tensor, "example channel *pixel"], pairs: Pairs) -> Covariance:
        """K of each input with itself: the mean over channels of x[p] x[q]."""
        few = split_portions(x, pairs.count * x.shape[1])
        return cls(torch.cat([(pairs.spread(part) * pairs.at_second(part)).mean(1) for part in few]), None, pairs)

    @classmethod
    def between(cls, x1: Tensor, x2: Tensor, pairs: Pairs, left: Variances, right: Variances, same: bool) -> Covariance:
        """K of inputs [example, channel, *pixel]: the mean over channels of x₁[p] x₂[q]; nothing is learned yet."""
        if pairs.pixels:
            nngp = x1.new_zeros(())
            for one, two in zip(x1.unbind(1), x2.unbind(1), strict=True):
                nngp = nngp + pairs.spread(one)[:, None] * pairs.at_second(two)[None]
            nngp = nngp / x1.shape[1]
        else:
            nngp = x1 @ x2.t() / x1.shape[1]
        return cls(nngp, torch.zeros_like(nngp), pairs, left, right, same)

    def map(self, function: Callable[[Tensor], Tensor]) -> Covariance:
        """The same linear function of K and of Θ."""
        return replace(self, nngp=function(self.nngp), ntk=None if self.ntk is None else function(self.ntk))

    def meet(self) -> tuple[Covariance, PairEnd, PairEnd]:
        """A nonlinear layer: the covariance with that layer counted, and the variances that it needs at both ends."""
        pairs = self.pairs
        if self.ntk is None:
            q = pairs.diagonal(self.nngp)
            return replace(self, left=(*self.left, q)), PairEnd(q, pairs.spread), PairEnd(q, pairs.at_second)
        first = PairEnd(self.left[self.met], lambda values: pairs.spread(values)[:, None])
        second = PairEnd(self.right[self.met], lambda values: pairs.at_second(values)[None])
        return replace(self, met=self.met + 1), first, second

    def where_same(self, values: Tensor, alone: Float[Tensor, "example *pixel"]) -> Tensor:
        """Values between two equal sides, with others where a pixel of an example meets itself."""
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
        return replace(self.map(lambda values: values.flatten(examples).sum(examples)), pairs=Pairs((), ()))

    def following(self, branch: Covariance) -> Covariance:
        """This covariance at the entry of a branch that comes after another one, `branch`, has met its variances."""
        return replace(self, left=branch.left, met=branch.met)

    def plus(self, last: Covariance) -> Covariance:
        """The sum with the branch that came last, of independent signals, at the pairs that both have."""
        pairs = self.pairs.common(last.pairs)
        one, two = (each.map(lambda v, own=each.pairs: own.restrict(v, pairs)) for each in (self, last))  # type: ignore[misc]
        ntk = None if one.ntk is None or two.ntk is None else one.ntk + two.ntk
        return replace(last, nngp=one.nngp + two.nngp, ntk=ntk, pairs=pairs)


def split_portions(x: Float[Tensor, "example ..."], each: int) -> Sequence[Float[Tensor, "few ..."]]:
    """The examples, in chunks of a reasonable size.

    >>> [len(portion) for portion in split_portions(torch.zeros(5, 3), 2**16)]
    [2, 2, 1]
    """
    return torch.split(x, max(1, PORTION // max(1, each)))
