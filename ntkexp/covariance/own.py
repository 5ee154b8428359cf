"""The covariances of examples with themselves, pushed ahead of everything else; the variances on the way are kept.

>>> from ntkexp.layer.pointwise import ReLU
>>> own = ReLU().push(Own.of(torch.tensor([[2.0, 0.0]]), Pairs.equal(())), (2,))
>>> own.nngp, own.variances
(tensor([1.]), (tensor([2.]),))
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
from ntkexp.covariance.portions import portions


@dataclass(frozen=True)
class Own(AbstractCovariance):
    """Equal pixels are among the pairs wherever a layer asks for variances; `variances` are those asked for so far."""

    nngp: Float[Tensor, "example *pair"]
    pairs: Pairs
    variances: tuple[Float[Tensor, "example ..."], ...] = ()

    @classmethod
    def of(cls, x: Float[Tensor, "example channel *pixel"], pairs: Pairs) -> Own:
        """Find the covariance of inputs: the mean over channels of x[p] x[q]."""
        few = portions(x, pairs.count * x.shape[1])
        return cls(torch.cat([(pairs.spread(part) * pairs.at_second(part)).mean(1) for part in few]), pairs)

    def affine(self, mix: Mix, scale: Scalar, shift: Scalar, learn: Learn) -> Own:
        return replace(self, nngp=scale * mix(self.nngp, self.pairs) + shift)

    def pointwise(self, dual: Dual, alone: Alone) -> Own:
        variance, nngp = self.pairs.diagonal(self.nngp), self.nngp
        if self.pairs != Pairs.equal(self.pairs.pixels):
            nngp, _ = dual(PairEnd(variance, self.pairs.spread), nngp, PairEnd(variance, self.pairs.at_second))
        return Own(self.pairs.with_diagonal(nngp, alone(variance)[0]), self.pairs, (*self.variances, variance))

    def normalised(self, eps: float) -> Own:
        variance = self.pairs.diagonal(self.nngp)
        length = (variance + eps).rsqrt()
        nngp = self.nngp * self.pairs.spread(length) * self.pairs.at_second(length)
        return Own(nngp, self.pairs, (*self.variances, variance))

    def coarse(self, coarse: Sequence[Coarse]) -> Own:
        if trivial(coarse, self.pairs):
            return self
        return replace(self, nngp=averaged(self.nngp, self.pairs, coarse), pairs=reached(coarse, self.pairs))

    def without_pixels(self) -> Own:
        if not self.pairs.pixels:
            return self
        one = self.nngp.flatten(1).sum(1)  # of the only pair; nothing, where no later layer asks for variances
        return replace(self, nngp=one, pairs=Pairs((), ()))

    def following(self, branch: Own) -> Own:
        return replace(self, variances=branch.variances)

    def plus(self, last: Own) -> Own:
        pairs = self.pairs.common(last.pairs)
        nngp = self.pairs.kept(self.nngp, pairs) + last.pairs.kept(last.nngp, pairs)
        return Own(nngp, pairs, last.variances)
