"""The kernels between the examples of two sides, [row, column, *pair].

Each side brings the variances that its examples have at every nonlinear layer, in the order in which they are met. The
sides are the same if row k and column k are one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.coarse import Coarse, averaged, reached, trivial
from ntkexp.covariance.covariance import AbstractCovariance, Alone, Dual, Learn, Mix, PairEnd, Scalar
from ntkexp.covariance.pairs import Pairs

Variances = tuple[Float[Tensor, "_ ..."], ...]
"""Of the examples of a side, [example, *pixel], as many pixels as there are by then."""


@dataclass(frozen=True)
class Cross(AbstractCovariance):
    """The covariance and the tangent kernel are those between two sides, after `met` nonlinear layers.

    >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> Cross.of(x, x, Pairs.equal(()), (), (), same=True).nngp
    tensor([[1., 0.],
            [0., 1.]])
    """

    nngp: Float[Tensor, "row column *pair"]
    ntk: Float[Tensor, "row column *pair"]
    pairs: Pairs
    left: Variances
    right: Variances
    same: bool = False
    met: int = 0

    @classmethod
    def of(cls, x1: Tensor, x2: Tensor, pairs: Pairs, left: Variances, right: Variances, same: bool) -> Cross:
        """Find the covariance of inputs [example, channel, *pixel]: means of products over channels; nothing is
        learned.
        """
        nngp = products(x1, x2, pairs)
        return cls(nngp, torch.zeros_like(nngp), pairs, left, right, same)

    @property
    def first(self) -> PairEnd:
        """The next nonlinear layer has this left side."""
        return PairEnd(self.left[self.met], lambda values: self.pairs.spread(values)[:, None])

    @property
    def second(self) -> PairEnd:
        """The next nonlinear layer has this right side."""
        return PairEnd(self.right[self.met], lambda values: self.pairs.at_second(values)[None])

    def affine(self, mix: Mix, scale: Scalar, shift: Scalar, learn: Learn) -> Cross:
        mixed = mix(self.nngp, self.pairs)
        nngp = scale * mixed + shift
        return replace(self, nngp=nngp, ntk=scale * mix(self.ntk, self.pairs) + learn(mixed, nngp))

    def pointwise(self, dual: Dual, alone: Alone) -> Cross:
        nngp, slope = dual(self.first, self.nngp, self.second)
        if self.same:
            nngp, slope = map(self.where_same, (nngp, slope), alone(self.left[self.met]))
        return replace(self, nngp=nngp, ntk=self.ntk * slope, met=self.met + 1)

    def where_same(self, values: Tensor, own: Float[Tensor, "example *pixel"]) -> Tensor:
        """Values with others where a pixel of an example meets itself."""
        diagonal = self.pairs.with_diagonal(values.diagonal(dim1=0, dim2=1).movedim(-1, 0), own)
        return values.diagonal_scatter(diagonal.movedim(0, -1), dim1=0, dim2=1)

    def normalised(self, eps: float) -> Cross:
        one, two = self.first, self.second
        length = one.lay_out((one.variance + eps).rsqrt()) * two.lay_out((two.variance + eps).rsqrt())
        return replace(self, nngp=self.nngp * length, ntk=self.ntk * length, met=self.met + 1)

    def coarse(self, coarse: Sequence[Coarse]) -> Cross:
        if trivial(coarse, self.pairs):
            return self
        nngp, ntk = (averaged(values, self.pairs, coarse) for values in (self.nngp, self.ntk))
        return replace(self, nngp=nngp, ntk=ntk, pairs=reached(coarse, self.pairs))

    def without_pixels(self) -> Cross:
        shape = self.nngp.shape[:2]
        return replace(self, nngp=self.nngp.view(shape), ntk=self.ntk.view(shape), pairs=Pairs((), ()))

    def following(self, branch: Cross) -> Cross:
        return replace(self, met=branch.met)

    def plus(self, last: Cross) -> Cross:
        pairs = self.pairs.common(last.pairs)
        nngp = self.pairs.kept(self.nngp, pairs) + last.pairs.kept(last.nngp, pairs)
        ntk = self.pairs.kept(self.ntk, pairs) + last.pairs.kept(last.ntk, pairs)
        return replace(last, nngp=nngp, ntk=ntk, pairs=pairs)


def products(x1: Tensor, x2: Tensor, pairs: Pairs) -> Float[Tensor, "row column *pair"]:
    """The mean over channels of x₁[p] x₂[q]."""
    if not pairs.axes:
        return x1 @ x2.t() / x1.shape[1]
    total = x1.new_zeros(())
    for one, two in zip(x1.unbind(1), x2.unbind(1), strict=True):
        total = total + pairs.spread(one)[:, None] * pairs.at_second(two)[None]
    return total / x1.shape[1]
