"""Dense and convolutional layers: modules, parametrisations and kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod, sqrt
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.component import MAX_COUNT, MAX_DEPTH, Depth
from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import (
    CLEAR,
    WRAP,
    Coarse,
    Operation,
    Operations,
    Pairs,
    Taps,
    coarsen,
    pairs_after,
    pairs_before,
    tap_mean,
    weigh,
    window_mean,
)
from ntkexp.layer.base import AbstractLayer, NotNegative, Positive, detached_number
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape
from ntkexp.stream import normal

# --- Modules with weights, and with constant factors for the inputs or the outputs


TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: nn.functional.conv_transpose1d,
    2: nn.functional.conv_transpose2d,
    3: nn.functional.conv_transpose3d,
}
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: nn.functional.conv1d,
    2: nn.functional.conv2d,
    3: nn.functional.conv3d,
}


class AffineWeights(NamedTuple):
    """The weight W and the bias b of an affine map z = gain · W x + shift · b.

    Without a bias, `shift` is 1.
    """

    weight: Float[Tensor, "first second *window"]
    bias: Float[Tensor, " features"] | None
    gain: float
    shift: float


class AbstractAffineModule(nn.Module):
    """A module with a weight, a bias, and constant factors."""

    def __init__(self, weights: AffineWeights) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights.weight)
        self.bias = None if weights.bias is None else nn.Parameter(weights.bias)
        self.gain = weights.gain
        self.shift = weights.shift


class Affine(AbstractAffineModule):
    """A dense layer z = gain · x Wᵀ + shift · b."""

    def forward(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row features"]:
        if self.bias is None:
            return torch.mm(self.gain * x, self.weight.t())
        return torch.addmm(
            self.bias, x, self.weight.t(), beta=self.shift, alpha=self.gain
        )


class Convolution(AbstractAffineModule):
    """A convolution z = gain · W ∗ x + shift · b,
    on channels and up to three axes of pixels.

    The module computes shift · (W ∗ (gain/shift · x) + b), so that a single operation
    uses both weight and bias."""

    def __init__(
        self,
        weights: AffineWeights,
        stride: int = 1,
        circular: bool = False,
        valid: bool = False,
    ) -> None:
        super().__init__(weights)
        self.stride = stride
        self.mode = "circular" if circular else "constant"
        # the padding before and after each axis, the last axis first (as in `pad`)
        self.borders: list[int] = []
        for width in reversed(self.weight.shape[2:]):
            border = 0 if valid else width // 2
            self.borders += [border, border]

    def forward(
        self, x: Float[Tensor, "example channels *pixels"]
    ) -> Float[Tensor, "example features *pixels_"]:
        convolve = CONVOLUTIONS[x.dim() - 2]
        padded = nn.functional.pad(self.gain / self.shift * x, self.borders, self.mode)
        z: Tensor = convolve(padded, self.weight, self.bias, stride=self.stride)
        return z if self.shift == 1 else self.shift * z


class ConvolutionOfTorch(AbstractAffineModule):
    """A convolution z = gain · W ∗ x + shift · b, computed by a function of torch with
    `options`."""

    def __init__(
        self,
        weights: AffineWeights,
        function: Callable[..., Tensor],
        options: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__(weights)
        self.function = function
        self.options = dict(options)

    def forward(
        self, x: Float[Tensor, "example channels *pixels"]
    ) -> Float[Tensor, "example features *pixels_"]:
        z = self.function(
            self.gain / self.shift * x, self.weight, self.bias, **self.options
        )
        return z if self.shift == 1 else self.shift * z


# --- Layers z(x) with n inputs per unit, weights W and biases b:
#
#     ntk           z = W_std/√n · W x + b_std · b     W, b ~ N(0, 1)
#     standard      z = W x + b                        W ~ N(0, W_std²/n), b ~ N(0, b_std²)
#     mean_field    z = W_std/n · W x + b_std · b      W, b ~ N(0, 1)
#
# The module multiplies its inputs or outputs by these factors, never its weight. A
# scaled weight would be a tensor computed from a parameter, and the factorised formulas
# of tangent kernels need the parameter itself. If b_std = 0, the layer has no bias.
#
# At infinite width, the layer maps the NNGP kernel K and the tangent kernel Θ of its
# inputs to K′ and Θ′. Let m be the mean over the window of a convolution,
# m(K)[p, q] = mean_δ K[p + δ, q + δ]. For a dense layer, m is the identity. The finite
# network has N input channels.
#
#     K′ = W_std² m(K) + b_std²
#     Θ′ = W_std² m(Θ) + source,    source = K′                              in NTK parametrisation
#                                            N·|window|·m(K) + [b_std > 0]    in standard parametrisation
#                                            0                                if frozen


Border = Annotated[int, Field(ge=0, le=MAX_DEPTH)]
Parametrisation = Literal["ntk", "standard", "mean_field"]


class AbstractAffine(AbstractLayer):
    """A dense or convolutional layer with `features` outputs.

    `W_std` and `b_std` scale the weights and the bias. A `frozen` layer is not trained.
    """

    features: int = Field(ge=1, le=100 * MAX_COUNT)  # may exceed the network's width
    W_std: Positive = 1.0
    b_std: NotNegative = 0.0
    param: Parametrisation = "ntk"
    frozen: bool = False

    @abstractmethod
    def weight_shape(self, shape: Shape) -> Shape:
        """Return the shape of the weight, [features, …]. The axes after the first are
        the inputs of a unit."""

    @abstractmethod
    def assembled(self, weights: AffineWeights) -> nn.Module:
        """Return a module with this weight and bias."""

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        """Return the means of the values over a window, m(values)."""
        return values

    def mixed_pairs(self, pairs: Pairs) -> Pairs:
        """Return the pixel pairs at which m(values) can be computed from the values at
        `pairs`."""
        return pairs

    def samples(self, shape: Shape) -> list[Coarse]:
        """Return, for each axis, the input pixels at which the layer has an output."""
        return []

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        weight_shape = self.weight_shape(shape)
        inputs = prod(weight_shape[1:])
        W_std = detached_number(self.W_std)
        b_std = detached_number(self.b_std)
        weight = normal(generator, *weight_shape)
        bias = None
        shift = 1.0
        if b_std > 0:
            bias = normal(generator, self.features)
            shift = b_std
        gain = W_std / sqrt(inputs)
        if self.param == "standard":
            weight *= gain
            if bias is not None:
                bias *= shift
            gain = 1.0
            shift = 1.0
        elif self.param == "mean_field":
            gain = W_std / inputs
        module = self.assembled(AffineWeights(weight, bias, gain, shift))
        return module.requires_grad_(not self.frozen)

    def carry(self, signal: Signal) -> Signal:
        if self.param == "mean_field":
            raise Mistake(
                "mean-field parametrisation has no kernel in the limit of infinite width: its "
                "features move; choose init=ntk or init=standard"
            )
        return signal.after_weights()

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:

        def weighed_mean(values: Tensor) -> Tensor:
            return self.W_std**2 * self.mix(values, covariance.pairs)

        # K′ = W_std² m(K) + b_std²
        mixed = self.mix(covariance.nngp, covariance.pairs)
        nngp = self.W_std**2 * mixed + self.b_std**2

        # Θ′ = W_std² m(Θ) + source
        ntk = covariance.ntk
        if ntk is not None:
            ntk = weighed_mean(ntk) + self.source(nngp, mixed, shape)
        pairs = self.mixed_pairs(covariance.pairs)
        after = replace(covariance, nngp=nngp, ntk=ntk, pairs=pairs)

        # The bias cancels in E (u − v)², and adds (2 b_std)² to E (u + v)².
        if covariance.distances is not None:
            distances = covariance.distances.map(weighed_mean)
            distances = distances._replace(far=distances.far + 4 * self.b_std**2)
            after = after.with_distances(distances)
        return after.coarse(self.samples(shape))

    def source(self, nngp: Tensor, mixed: Tensor, shape: Shape) -> Tensor | float:
        """Return the term `source` of Θ′ (see above), which comes from the gradients of
        this layer's weights. `nngp` is K′, and `mixed` is m(K)."""
        if self.frozen:
            return 0.0
        if self.param == "ntk":
            return nngp
        inputs = shape[0] * prod(self.weight_shape(shape)[2:])
        return inputs * mixed + float(self.b_std > 0)

    def weighed(
        self, shape: Shape, register: int, windows: tuple[int, int, int]
    ) -> Operation:
        """Return this layer as an operation of the fused engine (see
        `covariance.pairs`). The operation sums over windows. Its factor
        s = W_std²/|window| turns the sums into W_std² m(K)."""
        scale = detached_number(self.W_std) ** 2 / prod(windows)
        shift = detached_number(self.b_std) ** 2
        if self.frozen:
            learned = (0.0, 0.0)
        elif self.param == "ntk":
            learned = (scale, shift)
        else:
            learned = (float(shape[0]), float(shift > 0))
        deep, down, across = (window // 2 for window in windows)
        return weigh(register, scale, shift, learned, (deep, down, across))


class Dense(AbstractAffine):
    """A fully connected layer.

    >>> Dense(features=3).shape((5,))
    (3,)
    """

    def shape(self, shape: Shape) -> Shape:
        if len(shape) != 1:
            raise Mistake(
                f"Dense takes vectors, and was given examples of shape {list(shape)}; "
                "put a Flatten before it"
            )
        return (self.features,)

    def weight_shape(self, shape: Shape) -> Shape:
        return (self.features, *shape)

    def assembled(self, weights: AffineWeights) -> nn.Module:
        return Affine(weights)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        return Operation(CLEAR, register), self.weighed(shape, register, (1, 1, 1))


class Conv(AbstractAffine):
    """A convolution with odd windows and one `stride` for all axes.

    Zeros pad the image, or the image is periodic (`circular`). A `valid` convolution
    has outputs only for windows inside the image.

    >>> Conv(features=4, stride=2).shape((1, 8, 7)), Conv(features=4, valid=True).shape((1, 8, 7))
    ((4, 4, 4), (4, 6, 5))
    """

    window: Depth | tuple[Depth, ...] = 3
    stride: Depth = 1
    circular: bool = False
    valid: bool = False

    def shape(self, shape: Shape) -> Shape:
        if len(shape) - 1 not in CONVOLUTIONS:
            raise Mistake(
                "Conv takes [channels, *pixels] with 1 to 3 axes of pixels, and was given "
                f"{list(shape)}"
            )
        windows = self.windows(shape)
        sizes = list(zip(windows, shape[1:], strict=True))
        if self.circular and any(window > 2 * n + 1 for window, n in sizes):
            raise Mistake(
                f"a circular window {list(windows)} does not fit into {list(shape[1:])} pixels"
            )
        if self.valid and (self.circular or any(window > n for window, n in sizes)):
            raise Mistake(
                f"a valid window {list(windows)} must fit into {list(shape[1:])} pixels, without "
                "circular; choose a smaller window, or one of circular and valid"
            )
        return (self.features, *(len(one.members) for one in self.samples(shape)))

    def windows(self, shape: Shape) -> tuple[int, ...]:
        window = (
            (self.window,) * (len(shape) - 1)
            if isinstance(self.window, int)
            else self.window
        )
        if len(window) != len(shape) - 1 or any(w % 2 == 0 for w in window):
            raise Mistake(
                f"Conv: window={list(window)} must have one odd number for each axis of "
                f"{list(shape[1:])}"
            )
        return window

    def weight_shape(self, shape: Shape) -> Shape:
        return (self.features, shape[0], *self.windows(shape))

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        return window_mean(
            values, pairs, self.windows((1, *pairs.pixels)), self.circular
        )

    def samples(self, shape: Shape) -> list[Coarse]:
        samples = []
        for n, window in zip(shape[1:], self.windows(shape), strict=True):
            margin = window // 2 if self.valid else 0
            samples.append(Coarse.strided(n, self.stride, margin))
        return samples

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return pairs_before(self.samples(shape), output_pairs, shape[1:])

    def assembled(self, weights: AffineWeights) -> nn.Module:
        return Convolution(weights, self.stride, self.circular, self.valid)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        deep, down, across = (1, 1, *self.windows(shape))[-3:]
        outside = Operation(WRAP if self.circular else CLEAR, register)
        weighed = self.weighed(shape, register, (deep, down, across))
        if self.stride == 1 and not self.valid:
            return outside, weighed
        return outside, weighed, coarsen(register, self.samples(shape))


class AbstractTapped(AbstractAffine):
    """Convolution with an arbitrary window: output pixel p sums weight k times input
    pixel p_k.

        K′[p, q] = W_std² Σ_k K[p_k, q_k]/|window| + b_std²

    The sum is over the weights k for which both p_k and q_k are inside the image. Θ′
    contains the same sum. Each option is one number, or
    one number per axis of pixels."""

    window: Depth | tuple[Depth, ...] = 3
    stride: Depth | tuple[Depth, ...] = 1
    padding: Border | tuple[Border, ...] = 0
    dilation: Depth | tuple[Depth, ...] = 1

    functions: ClassVar[Mapping[int, Callable[..., Tensor]]] = CONVOLUTIONS
    """Torch's functions, by the number of axes of pixels."""

    @abstractmethod
    def taps_of(self, pixels: int, **options: int) -> Taps:
        """Return the input pixel p_k of each output pixel p and weight k,
        along an axis of `pixels` pixels."""

    def options(self, axes: int) -> dict[str, tuple[int, ...]]:
        """Return each option as one number per axis of pixels."""
        options: dict[str, tuple[int, ...]] = {}
        for name in type(self).model_fields:
            if name in AbstractAffine.model_fields:
                continue
            value = getattr(self, name)
            numbers = (value,) * axes if isinstance(value, int) else value
            if len(numbers) != axes:
                raise Mistake(
                    f"{type(self).__name__}: {name}={list(value)} must have one number for each of "
                    f"{axes} axes of pixels"
                )
            options[name] = numbers
        return options

    def taps(self, pixels: tuple[int, ...]) -> list[Taps]:
        """Return the input pixel p_k of each output pixel p and weight k,
        for each axis."""
        options = self.options(len(pixels))
        taps = []
        for axis, n in enumerate(pixels):
            options_of_axis = {name: numbers[axis] for name, numbers in options.items()}
            taps.append(self.taps_of(n, **options_of_axis))
        return taps

    def shape(self, shape: Shape) -> Shape:
        name = type(self).__name__
        if len(shape) - 1 not in CONVOLUTIONS:
            raise Mistake(
                f"{name} takes [channels, *pixels] with 1 to 3 axes of pixels, and was given "
                f"{list(shape)}"
            )
        taps = self.taps(shape[1:])
        if not all(one.members for one in taps):
            options = self.options(len(shape) - 1)
            raise Mistake(
                f"{name}: window={list(options['window'])} and "
                f"padding={list(options['padding'])} leave no pixel of {list(shape[1:])}; "
                "choose others"
            )
        return (self.features, *(len(one.members) for one in taps))

    def weight_shape(self, shape: Shape) -> Shape:
        return (self.features, shape[0], *self.options(len(shape) - 1)["window"])

    def assembled(self, weights: AffineWeights) -> nn.Module:
        axes = weights.weight.dim() - 2
        options = self.options(axes)
        del options["window"]
        return ConvolutionOfTorch(weights, self.functions[axes], options)

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        return tap_mean(values, pairs, self.taps(pairs.pixels))

    def mixed_pairs(self, pairs: Pairs) -> Pairs:
        return pairs_after(self.taps(pairs.pixels), pairs)

    def samples(self, shape: Shape) -> list[Coarse]:
        return [Coarse.strided(len(one.members), 1) for one in self.taps(shape[1:])]

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return pairs_before(self.taps(shape[1:]), output_pairs, shape[1:])


class PaddedConv(AbstractTapped):
    """A convolution with any window, and with `padding` zeros at both ends
    of each axis.

    For output pixel p, weight k of the window multiplies the input pixel p_k = p ·
    stride + k · dilation − padding. If `Conv` supports the options, it computes the
    same kernel faster.

    >>> PaddedConv(features=4, window=4, stride=2, padding=1).shape((3, 8, 8))
    (4, 4, 4)
    """

    def taps_of(self, pixels: int, **options: int) -> Taps:
        return Taps.convolution(pixels, **options)


class ConvTranspose(AbstractTapped):
    """A transposed convolution, which enlarges images.

    Input pixel p adds its window to the output pixels from p · stride on. Then
    `padding` pixels are removed at both ends of each axis, and `output_padding` pixels
    are added at the end. For output pixel p, weight k of the window multiplies the
    input pixel p_k = (p + padding − k · dilation)/stride, if this is an integer.

    >>> ConvTranspose(features=4, window=3, stride=2, padding=1, output_padding=1).shape((3, 8, 8))
    (4, 16, 16)
    """

    output_padding: Border | tuple[Border, ...] = 0

    functions = TRANSPOSED

    def shape(self, shape: Shape) -> Shape:
        output_shape = super().shape(shape)
        options = self.options(len(shape) - 1)
        extra = options["output_padding"]
        strides = options["stride"]
        by_axis = zip(extra, strides, options["dilation"], strict=True)
        if any(more >= max(stride, dilation) for more, stride, dilation in by_axis):
            raise Mistake(
                f"ConvTranspose: output_padding={list(extra)} must be less than "
                f"stride={list(strides)} or dilation"
            )
        return output_shape

    def taps_of(self, pixels: int, **options: int) -> Taps:
        return Taps.transposed(pixels, **options)

    def assembled(self, weights: AffineWeights) -> nn.Module:
        # Torch stores the weights of transposed convolutions as [channels,
        # features, *window].
        transposed = weights.weight.transpose(0, 1).contiguous()
        return super().assembled(weights._replace(weight=transposed))
