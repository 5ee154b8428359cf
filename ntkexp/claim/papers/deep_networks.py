"""Tangent kernels of deep networks at initialisation, by depth and width.

The claim is from A. Jacot et al. 2018, arXiv:1806.07572, and B. Hanin & M. Nica 2019,
arXiv:1909.05989."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, NamedTuple, Self, TypeAlias

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.claim.trial import NetworkTrial, Row, Rows
from ntkexp.component import MAX_COUNT, Count, Depth
from ntkexp.layer.affine import Dense
from ntkexp.layer.base import LayerChain, shapes
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered
from ntkexp.stream import stream

WEIGHTS_AT_ONCE = 1 << 22
"""The maximum number of weights in a batch of networks."""
Networks: TypeAlias = Annotated[int, Field(ge=2, le=MAX_COUNT)]
HIDDEN = "the randomness of the mean kernel hides the bias; give more networks"


class DeepKernels(NetworkTrial):
    """The mean and the spread of the tangent kernels K of random deep networks.

    Each of the `sizes` is a depth, a ratio width/depth, and a number N of networks. A
    network has `depth` hidden layers of depth · ratio units, and one output. K̄ and
    Var K are the mean and the variance over the networks, and K_∞ is the kernel at
    infinite width. Norms and sums run over all pairs of the first training examples.

        bias      √(‖K̄ − K_∞‖² − Σ Var K/N)/‖K_∞‖      ∝ 1/width
        spread    √(Σ Var K)/‖K_∞‖                     ∝ √(depth/width) for ReLU

    K̄ is random, too: the expectation of ‖K̄ − K_∞‖² is ‖E K − K_∞‖² + E Σ Var K/N. So the
    square of `bias` is an unbiased estimate of ‖E K − K_∞‖²/‖K_∞‖². If it is not
    positive, the row has no bias, and the column `reason` says so.

    Networks are computed in single precision, whose rounding errors are far below the
    bias. Means and variances are summed in double precision."""

    model: AbstractLayered
    sizes: tuple[tuple[Depth, Count, Networks], ...] = Field(min_length=1)
    points: Count = 8

    @model_validator(mode="after")
    def refuse_fixed_depth(self) -> Self:
        if "depth" not in type(self.model).model_fields:
            raise Mistake(
                f"trial.model: {self.model.option} has no field depth; choose mlp"
            )
        return self

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs[: self.points]
        for depth, ratio, networks in self.sizes:
            size = {"depth": depth, "width": depth * ratio}
            model = self.model.model_copy(update=size)
            layers = model.layers(self.init, tuple(x.shape[1:]), 1)
            generator = stream("weights", seed, depth, ratio)
            moments = kernel_moments(layers, x, networks, generator)
            limit = infinite_kernel(layers, x, threads=1).ntk
            yield {**size, "ratio": ratio, **compare(moments, limit)}


class KernelMoments(NamedTuple):
    """The mean and the variance of the kernels of some networks."""

    mean: Float[Tensor, "point point_"]
    variance: Float[Tensor, "point point_"]
    networks: int


def compare(moments: KernelMoments, limit: Float[Tensor, "point point_"]) -> Row:
    """Return the bias and the spread of random kernels, relative to the limit (see
    `DeepKernels`).

    >>> one = torch.ones(1, 1)
    >>> compare(KernelMoments(6 * one, 64 * one, networks=8), 2 * one)
    {'bias': 1.4142135623730951, 'spread': 4.0, 'reason': ''}
    """
    size = float(limit.square().sum())
    spread = float(moments.variance.sum()) / size
    # an unbiased estimate of ‖E K − K_∞‖²/‖K_∞‖²
    missed = float((moments.mean - limit).square().sum()) / size
    bias = missed - spread / moments.networks
    return {
        "bias": bias**0.5 if bias > 0 else math.nan,
        "spread": spread**0.5,
        "reason": "" if bias > 0 else HIDDEN,
    }


def kernel_moments(
    layers: LayerChain,
    x: Float[Tensor, " point *shape"],
    networks: int,
    generator: torch.Generator,
) -> KernelMoments:
    """Return the mean and the variance of the tangent kernels of random networks.

    The networks are drawn in batches of `WEIGHTS_AT_ONCE` weights."""
    chain = shapes(layers, tuple(x.shape[1:]))
    weights = sum(
        inputs[0] * layer.features
        for layer, inputs in zip(layers, chain, strict=False)
        if isinstance(layer, Dense)
    )
    group = max(1, WEIGHTS_AT_ONCE // max(1, weights))
    total = torch.zeros(len(x), len(x), dtype=torch.float64)
    squares = torch.zeros_like(total)
    for start in range(0, networks, group):
        count = min(group, networks - start)
        kernels = random_kernels(layers, x.float(), count, generator).double()
        total += kernels.sum(0)
        squares += kernels.square().sum(0)
    mean = total / networks
    variance = (squares - networks * mean.square()) / (networks - 1)
    return KernelMoments(mean, variance, networks)


def random_kernels(
    layers: LayerChain,
    x: Float[Tensor, " point *shape"],
    networks: int,
    generator: torch.Generator,
) -> Float[Tensor, "network point point_"]:
    """Draw the weights of dense networks with one output, and return their tangent
    kernels.

        K(x, x′) = Σ_l (W_std²/n ⟨h_l, h′_l⟩ + b_std²) ⟨g_l, g′_l⟩

    The sum runs over the dense layers z_l = W_std/√n · W h_l + b_std · b. h_l are the n
    inputs of the layer, and g_l is the gradient of the output with respect to z_l."""
    draw = partial(torch.randn, generator=generator, dtype=x.dtype)
    h = x.flatten(1).expand(networks, -1, -1)
    factors: list[Tensor] = []
    signals: list[Tensor] = []
    for layer in layers:
        if isinstance(layer, Dense) and layer.param == "ntk" and not layer.frozen:
            inputs = h.shape[2]
            weight = draw(networks, inputs, layer.features)
            bias = draw(networks, 1, layer.features)
            scaled = float(layer.W_std) / inputs**0.5 * h
            factor = scaled @ scaled.mT + float(layer.b_std) ** 2
            factors.append(factor.detach())
            h = scaled @ weight + float(layer.b_std) * bias
            if not signals:  # the weights need no gradients
                h.requires_grad_()
            signals.append(h)
        elif isinstance(layer, AbstractPointwise):
            h = layer.apply(h)
        elif not isinstance(layer, Flatten):
            raise Mistake(
                f"trial.model: {type(layer).__name__} is no dense layer in NTK "
                "parametrisation, and no activation; choose mlp and init=ntk"
            )
    gradients = torch.autograd.grad(h.sum(), signals)
    kernels = torch.zeros(networks, len(x), len(x), dtype=x.dtype)
    for factor, g in zip(factors, gradients, strict=True):
        kernels += factor * (g @ g.mT)
    return kernels
