"""What layers push: covariances of one channel, pixel pair by pixel pair, within an example or between two, and
tangent kernels beside them.

What is known of a signal inside a network of infinite width, whatever its numbers are.

Its elements are independent Gaussians once fresh weights have mixed what came before; a pointwise function makes
something else of them. The formulas of pointwise layers and norms hold for Gaussians alone, and the covariance of a sum
is the sum of covariances only where all but one of its terms end in weights of their own. Shares of channels have a
limit only where all channels grow with the network's width, which those of inputs do not.

>>> Signal().after_weights()
Signal(gaussian=True, fresh=True, wide=True, uneven=False)

Examples a few at a time, so that what is done to them one after the other finds them in a cache.

>>> [len(portion) for portion in portions(torch.zeros(5, 3), 2**16)]
[2, 2, 1]

The covariances of examples with themselves, pushed ahead of everything else; the variances on the way are kept.

>>> from ntkexp.layer.pointwise import ReLU
>>> own = ReLU().push(Own.of(torch.tensor([[2.0, 0.0]]), Pairs.equal(())), (2,))
>>> own.nngp, own.variances
(tensor([1.]), (tensor([2.]),))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.pairs import Coarse, Pairs, averaged, reached, trivial
from ntkexp.mistake import Mistake


@dataclass(frozen=True)
class Signal:
    """`gaussian`: elements are independent Gaussians, the channels of a pixel of one variance; `fresh`: independent of
    whatever entered the branch of the network that it belongs to; `wide`: there are as many channels as the network is
    wide; `uneven`: channels of different variances stand behind each other.
    """

    gaussian: bool = False
    fresh: bool = False
    wide: bool = False
    uneven: bool = False

    def after_weights(self) -> Signal:
        """The signal after weights is this."""
        return Signal(gaussian=True, fresh=True, wide=True)

    def after_nonlinearity(self, layer: str) -> Signal:
        """The signal after a function that is not linear."""
        self.refuse_unmixed(layer)
        return Signal(wide=self.wide)

    def branch(self) -> Signal:
        """The signal at the entry of a branch is this."""
        return replace(self, fresh=False)

    def refuse_beside(self, other: Signal) -> None:
        """One of two branches that are added up ends in weights of its own."""
        if not (self.fresh or other.fresh):
            raise Mistake(
                "a residual layer has no limit of infinite width unless one of its branches ends in weights "
                "(Dense or Conv) that follow the last activation"
            )

    def refuse_narrow(self) -> None:
        """A part of many channels has a share of them."""
        if not self.wide:
            raise Mistake(
                "a concatenation of the inputs themselves has no limit of infinite width: channels of the inputs do "
                "not grow with width; put a Dense or Conv layer into that branch"
            )

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


# --- What layers push: covariances of one channel, pixel pair by pixel pair, and tangent kernels beside them.
#
#     nngp   K[p, q](x, x′), the covariance at pixel p for x and at pixel q for x′
#     ntk    Θ[p, q](x, x′), its tangent kernel
#
# Two things are pushed. First the covariances of each example with itself (`layer.own`), because nonlinear layers
# need the variances K[p, p](x, x), and pooling makes coarse variances of fine covariances. Then, with these at
# hand, the kernels between the examples of two sides (`layer.cross`).


@dataclass(frozen=True)
class PairEnd:
    """One end of many pairs: variances, and how a function of them is laid out beside the covariances."""

    variance: Tensor
    lay_out: Callable[[Tensor], Tensor]


Dual: TypeAlias = Callable[[PairEnd, Tensor, PairEnd], tuple[Tensor, Tensor]]
"""Variances at both ends and a covariance ↦ E σ(u) σ(v) and E σ′(u) σ′(v)."""
Alone: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A variance ↦ E σ(u)² and E σ′(u)²."""
Mix: TypeAlias = Callable[[Tensor, Pairs], Tensor]
"""A mean over the pairs that a window sees."""
Learn: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""What m(K) and K′ add to the tangent kernel."""
Scalar: TypeAlias = Tensor | float


class AbstractCovariance(ABC):
    """A covariance is on its way through the layers."""

    @abstractmethod
    def affine(self, mix: Mix, scale: Scalar, shift: Scalar, learn: Learn) -> Self:
        """K′ = s m(K) + b, and Θ′ = s m(Θ) + what the layer's own weights learn."""

    @abstractmethod
    def pointwise(self, dual: Dual, alone: Alone) -> Self:
        """K′ = κ(K) and Θ′ = Θ · κ̇(K); where an example meets itself by the formula for that, which rounds nothing."""

    @abstractmethod
    def normalised(self, eps: float) -> Self:
        """Divide the covariance by √((q₁ + ε)(q₂ + ε))."""

    @abstractmethod
    def coarse(self, coarse: Sequence[Coarse]) -> Self:
        """Put the covariance on coarser pixels, axis by axis."""

    @abstractmethod
    def without_pixels(self) -> Self:
        """The covariance of an image of one pixel, which is then a vector."""

    @abstractmethod
    def following(self, branch: Self) -> Self:
        """This covariance at the entry of a branch that is walked after the other one, `branch`."""

    @abstractmethod
    def plus(self, last: Self) -> Self:
        """The sum with the branch that was walked last, of independent signals."""


Covariance = TypeVar("Covariance", bound=AbstractCovariance)

NUMBERS = 2**17


def portions(x: Float[Tensor, "example ..."], each: int) -> Sequence[Float[Tensor, "few ..."]]:
    """The examples, as many at a time as are reasonable if each takes so many numbers."""
    return torch.split(x, max(1, NUMBERS // max(1, each)))


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


# --- The kernels between the examples of two sides, [row, column, *pair].
#
# Each side brings the variances that its examples have at every nonlinear layer, in the order in which they are
# met. The sides are the same if row k and column k are one example.


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
