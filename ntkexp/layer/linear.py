"""Linear maps without weights: flattening, and the mean over an image.

An affine layer sees of a flattened image the mean over equal pixels, K′ = mean_p K[p, p], and after global average
pooling the mean over all pairs, K′ = mean_pq K[p, q]; Θ goes the same way. The pixels of a flattened image may have
different variances, so that no activation follows it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.covariance.coarse import Coarse
from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer.base import AbstractLayer
from ntkexp.mistake import Mistake


class Flatten(AbstractLayer):
    """All axes of an example as one.

    >>> Flatten().shape((1, 8, 8))
    (64,)
    """

    averages = True

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(shape),)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return nn.Flatten()

    def carry(self, signal: Signal) -> Signal:
        return replace(signal, gaussian=False)

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.coarse([Coarse.one(n, equal=True) for n in shape[1:]]).without_pixels()


class GlobalAvgPool(AbstractLayer):
    """The mean over all pixels.

    >>> GlobalAvgPool().shape((3, 8, 8))
    (3,)
    """

    averages = True

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 1:
            raise Mistake(f"GlobalAvgPool takes [channels, *pixels], and was given {list(shape)}; leave it out")
        return shape[:1]

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return MeanOverPixels()

    def carry(self, signal: Signal) -> Signal:
        return signal

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return Pairs.all(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.coarse([Coarse.one(n, equal=False) for n in shape[1:]]).without_pixels()


class MeanOverPixels(nn.Module):
    """[example, channel, *pixels] → [example, channel]."""

    def forward(self, x: Float[Tensor, "example channel *pixels"]) -> Float[Tensor, "example channel"]:
        return x.flatten(2).mean(2)
