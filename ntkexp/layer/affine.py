"""Affine layers, dense or convolutional, what their weights are drawn from, and their modules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod, sqrt
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.component import DEEPEST, LARGEST, Depth
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

# --- The modules of affine layers: weights as they are drawn, and factors that multiply the inputs or the result.


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


class Affine(nn.Module):
    """z = gain · x Wᵀ + shift · b."""

    def __init__(
        self,
        weight: Float[Tensor, "features inputs"],
        bias: Float[Tensor, " features"] | None,
        gain: float = 1.0,
        shift: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.gain, self.shift = gain, shift

    def forward(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row features"]:
        if self.bias is None:
            return torch.mm(self.gain * x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t(), beta=self.shift, alpha=self.gain)


class Convolution(nn.Module):
    """z = gain · W ∗ x + shift · b, on channels and up to three axes of pixels.

    Computed as shift · (W ∗ (gain/shift · x) + b), so that weight and bias are used by the same operation.
    """

    def __init__(
        self,
        weight: Float[Tensor, "features channels *window"],
        bias: Float[Tensor, " features"] | None,
        gain: float = 1.0,
        shift: float = 1.0,
        stride: int = 1,
        circular: bool = False,
        valid: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.gain, self.shift, self.stride = gain, shift, stride
        self.mode = "circular" if circular else "constant"
        self.borders = [
            0 if valid else w // 2 for w in reversed(weight.shape[2:]) for _ in range(2)
        ]

    def forward(
        self, x: Float[Tensor, "example channels *pixels"]
    ) -> Float[Tensor, "example features *pixels_"]:
        convolve = CONVOLUTIONS[x.dim() - 2]
        padded = nn.functional.pad(self.gain / self.shift * x, self.borders, self.mode)
        z: Tensor = convolve(padded, self.weight, self.bias, stride=self.stride)
        return z if self.shift == 1 else self.shift * z


class ConvolutionOfTorch(nn.Module):
    """z = gain · W ∗ x + shift · b as above, by a convolution of torch's with its options: stride, padding, …"""

    def __init__(
        self,
        function: Callable[..., Tensor],
        weight: Float[Tensor, "first second *window"],
        bias: Float[Tensor, " features"] | None,
        gain: float,
        shift: float,
        options: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.function, self.gain, self.shift, self.options = function, gain, shift, dict(options)

    def forward(
        self, x: Float[Tensor, "example channels *pixels"]
    ) -> Float[Tensor, "example features *pixels_"]:
        z = self.function(self.gain / self.shift * x, self.weight, self.bias, **self.options)
        return z if self.shift == 1 else self.shift * z


# --- Affine layers, dense or convolutional, and what their weights are drawn from. With n the number of inputs of a
# unit:
#
#     ntk           z = W_std/√n · W x + b_std · b     W, b ~ N(0, 1)
#     standard      z = W x + b                        W ~ N(0, W_std²/n), b ~ N(0, b_std²)
#     mean_field    z = W_std/n · W x + b_std · b      W, b ~ N(0, 1)
#
# The factors multiply the inputs or the result, never the weight itself: a scaled weight would be a new tensor
# made of parameters, and its tangent kernel would no longer factorise. There is no bias where b_std is zero.
#
# At infinite width, with m the mean over a window in which both pixels move (a dense layer has none) and N the
# channels that come in, counted at the width that is written down:
#
#     K′ = W_std² m(K) + b_std²,    Θ′ = W_std² m(Θ) + source,    source = K′                               ntk
#                                                                          N·|window|·m(K) + [b_std > 0]     standard
#                                                                          0                                 if frozen


Border = Annotated[int, Field(ge=0, le=DEEPEST)]
Parametrisation = Literal["ntk", "standard", "mean_field"]


class AbstractAffine(AbstractLayer):
    """A layer with `features` outputs, and the scales of its weights; a `frozen` one keeps its first weights."""

    features: int = Field(ge=1, le=100 * LARGEST)  # layers may be wider than the network's width
    W_std: Positive = 1.0
    b_std: NotNegative = 0.0
    param: Parametrisation = "ntk"
    frozen: bool = False

    @abstractmethod
    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[features, …], everything after the first axis being the inputs of a unit."""

    @abstractmethod
    def assembled(
        self, weight: Tensor, bias: Tensor | None, gain: float, shift: float
    ) -> nn.Module:
        """Put the module together with these weights."""

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        """m(·), the mean over the pairs of pixels that a window sees."""
        return values

    def mixed_pairs(self, pairs: Pairs) -> Pairs:
        """The pairs at which m(·) is known, of those at which its argument is."""
        return pairs

    def samples(self, shape: tuple[int, ...]) -> list[Coarse]:
        """The pixels that have an output, along each axis."""
        return []

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        weights = self.weight_shape(shape)
        inputs, W_std, b_std = (
            prod(weights[1:]),
            detached_number(self.W_std),
            detached_number(self.b_std),
        )
        weight = torch.randn(weights, generator=generator, dtype=torch.float64)
        bias = (
            torch.randn(self.features, generator=generator, dtype=torch.float64)
            if b_std > 0
            else None
        )
        if self.param == "standard":
            scaled = None if bias is None else bias * b_std
            module = self.assembled(weight * (W_std / sqrt(inputs)), scaled, 1.0, 1.0)
        else:
            gain = W_std / (inputs if self.param == "mean_field" else sqrt(inputs))
            module = self.assembled(weight, bias, gain, b_std)
        return module.requires_grad_(not self.frozen)

    def carry(self, signal: Signal) -> Signal:
        if self.param == "mean_field":
            raise Mistake(
                "mean-field parametrisation has no kernel in the limit of infinite width: its features move; "
                "choose init=ntk or init=standard"
            )
        return signal.after_weights()

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        # K′ = W_std² m(K) + b_std²
        mixed = self.mix(covariance.nngp, covariance.pairs)
        nngp = self.W_std**2 * mixed + self.b_std**2
        ntk = covariance.ntk
        if ntk is not None:  # Θ′ = W_std² m(Θ) + what the layer's own weights learn
            source: Tensor | float = 0.0
            if not self.frozen and self.param == "ntk":
                source = nngp
            elif not self.frozen:
                source = shape[0] * prod(self.weight_shape(shape)[2:]) * mixed + float(
                    self.b_std > 0
                )
            ntk = self.W_std**2 * self.mix(ntk, covariance.pairs) + source
        pairs = self.mixed_pairs(covariance.pairs)
        after = replace(covariance, nngp=nngp, ntk=ntk, pairs=pairs)
        if (
            distances := covariance.distances
        ) is not None:  # a difference has no bias, and a sum has two
            mixed_distances = distances.map(
                lambda values: self.W_std**2 * self.mix(values, covariance.pairs)
            )
            after = after.with_distances(
                replace(mixed_distances, far=mixed_distances.far + 4 * self.b_std**2)
            )
        return after.coarse(self.samples(shape))

    def weighed(
        self, shape: tuple[int, ...], register: int, windows: tuple[int, int, int]
    ) -> Operation:
        """The sum over a window with the weights of a mean."""
        scale, shift = (
            detached_number(self.W_std) ** 2 / prod(windows),
            detached_number(self.b_std) ** 2,
        )
        learned = (scale, shift) if self.param == "ntk" else (float(shape[0]), float(shift > 0))
        deep, down, across = (window // 2 for window in windows)
        return weigh(
            register, scale, shift, (0.0, 0.0) if self.frozen else learned, (deep, down, across)
        )


class Dense(AbstractAffine):
    """A fully connected layer.

    >>> Dense(features=3).shape((5,))
    (3,)
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 1:
            raise Mistake(
                f"Dense takes vectors, and was given examples of shape {list(shape)}; put a Flatten before it"
            )
        return (self.features,)

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.features, *shape)

    def assembled(
        self, weight: Tensor, bias: Tensor | None, gain: float, shift: float
    ) -> nn.Module:
        return Affine(weight, bias, gain, shift)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return Operation(CLEAR, register), self.weighed(shape, register, (1, 1, 1))


class Conv(AbstractAffine):
    """A convolution with an output for every `stride`-th pixel; the image is padded by zeros, or continues around. A
    `valid` one is not padded: it has outputs where its window lies within the image.

    >>> Conv(features=4, stride=2).shape((1, 8, 7)), Conv(features=4, valid=True).shape((1, 8, 7))
    ((4, 4, 4), (4, 6, 5))
    """

    window: Depth | tuple[Depth, ...] = 3
    stride: Depth = 1
    circular: bool = False
    valid: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) - 1 not in CONVOLUTIONS:
            raise Mistake(
                f"Conv takes [channels, *pixels] with 1 to 3 axes of pixels, and was given {list(shape)}"
            )
        windows = self.windows(shape)
        if self.circular and any(w > 2 * n + 1 for w, n in zip(windows, shape[1:], strict=True)):
            raise Mistake(
                f"a circular window {list(windows)} does not fit into {list(shape[1:])} pixels"
            )
        if self.valid and (
            self.circular or any(w > n for w, n in zip(windows, shape[1:], strict=True))
        ):
            raise Mistake(
                f"a valid window {list(windows)} lies within an image, not around {list(shape[1:])} pixels; choose a "
                "smaller window, or one of circular and valid"
            )
        return (self.features, *(len(one.members) for one in self.samples(shape)))

    def windows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        window = (self.window,) * (len(shape) - 1) if isinstance(self.window, int) else self.window
        if len(window) != len(shape) - 1 or any(w % 2 == 0 for w in window):
            raise Mistake(
                f"Conv: window={list(window)} must be odd, one for each axis of {list(shape[1:])}"
            )
        return window

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.features, shape[0], *self.windows(shape))

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        return window_mean(values, pairs, self.windows((1, *pairs.pixels)), self.circular)

    def samples(self, shape: tuple[int, ...]) -> list[Coarse]:
        windows = self.windows(shape)
        margins = [w // 2 if self.valid else 0 for w in windows]
        return [
            Coarse.every(n, self.stride, margin)
            for n, margin in zip(shape[1:], margins, strict=True)
        ]

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return pairs_before(self.samples(shape), wanted, shape[1:])

    def assembled(
        self, weight: Tensor, bias: Tensor | None, gain: float, shift: float
    ) -> nn.Module:
        shift = 1.0 if bias is None else shift
        return Convolution(weight, bias, gain, shift, self.stride, self.circular, self.valid)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        deep, down, across = (1, 1, *self.windows(shape))[-3:]
        outside = Operation(WRAP if self.circular else CLEAR, register)
        operations = outside, self.weighed(shape, register, (deep, down, across))
        if self.stride == 1 and not self.valid:
            return operations
        return (*operations, coarsen(register, self.samples(shape)))


class AbstractTapped(AbstractAffine):
    """Convolutions by any windows, of which each pixel after them says what pixel each weight meets:

        K′[p, q] = W_std² Σ_k K[p_k, q_k]/|window| + b_std²

    over the weights k for which p_k and q_k are both in the image; Θ′ alike. Each option is one number, or one for each
    axis of pixels.
    """

    window: Depth | tuple[Depth, ...] = 3
    stride: Depth | tuple[Depth, ...] = 1
    padding: Border | tuple[Border, ...] = 0
    dilation: Depth | tuple[Depth, ...] = 1

    functions: ClassVar[Mapping[int, Callable[..., Tensor]]] = CONVOLUTIONS
    """Torch's, by the number of axes of pixels."""

    @abstractmethod
    def taps_of(self, pixels: int, **options: int) -> Taps:
        """The pixel that each weight meets, along one axis of pixels with these options."""

    def options(self, axes: int) -> dict[str, tuple[int, ...]]:
        """Each option, one number for each axis of pixels."""
        found = dict[str, tuple[int, ...]]()
        for name in type(self).model_fields:
            if name in AbstractAffine.model_fields:
                continue
            value = getattr(self, name)
            found[name] = (value,) * axes if isinstance(value, int) else value
            if len(found[name]) != axes:
                raise Mistake(
                    f"{type(self).__name__}: {name}={list(value)} has not one number for each of {axes} axes of pixels"
                )
        return found

    def taps(self, pixels: tuple[int, ...]) -> list[Taps]:
        """The pixel that each weight meets, along each axis."""
        options = self.options(len(pixels))
        return [
            self.taps_of(n, **{name: each[k] for name, each in options.items()})
            for k, n in enumerate(pixels)
        ]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        name = type(self).__name__
        if len(shape) - 1 not in CONVOLUTIONS:
            raise Mistake(
                f"{name} takes [channels, *pixels] with 1 to 3 axes of pixels, and was given {list(shape)}"
            )
        taps = self.taps(shape[1:])
        if not all(one.members for one in taps):
            options = self.options(len(shape) - 1)
            raise Mistake(
                f"{name}: window={list(options['window'])} and padding={list(options['padding'])} leave no pixel of "
                f"{list(shape[1:])}; choose others"
            )
        return (self.features, *(len(one.members) for one in taps))

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.features, shape[0], *self.options(len(shape) - 1)["window"])

    def assembled(
        self, weight: Tensor, bias: Tensor | None, gain: float, shift: float
    ) -> nn.Module:
        axes, shift = weight.dim() - 2, 1.0 if bias is None else shift
        options = self.options(axes)
        del options["window"]
        return ConvolutionOfTorch(self.functions[axes], weight, bias, gain, shift, options)

    def mix(self, values: Tensor, pairs: Pairs) -> Tensor:
        return tap_mean(values, pairs, self.taps(pairs.pixels))

    def mixed_pairs(self, pairs: Pairs) -> Pairs:
        return pairs_after(self.taps(pairs.pixels), pairs)

    def samples(self, shape: tuple[int, ...]) -> list[Coarse]:
        return [Coarse.every(len(one.members), 1) for one in self.taps(shape[1:])]

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return pairs_before(self.taps(shape[1:]), wanted, shape[1:])


class PaddedConv(AbstractTapped):
    """A convolution by any window, with `padding` zeros at both ends of each axis, p_k = p · stride + k · dilation −
    padding. It does what `Conv` does for odd windows, which is faster on a CPU.

    >>> PaddedConv(features=4, window=4, stride=2, padding=1).shape((3, 8, 8))
    (4, 4, 4)
    """

    def taps_of(self, pixels: int, **options: int) -> Taps:
        return Taps.convolution(pixels, **options)


class ConvTranspose(AbstractTapped):
    """A transposed convolution, which makes images larger: each pixel adds the window to those from `stride` times its
    place on; then `padding` pixels are cut off at both ends of each axis, and `output_padding` put to the end. Here p_k
    is (p + padding − k · dilation)/stride, where that is a whole number.

    >>> ConvTranspose(features=4, window=3, stride=2, padding=1, output_padding=1).shape((3, 8, 8))
    (4, 16, 16)
    """

    output_padding: Border | tuple[Border, ...] = 0

    functions: ClassVar[Mapping[int, Callable[..., Tensor]]] = TRANSPOSED

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        after, options = super().shape(shape), self.options(len(shape) - 1)
        extra, strides, spread = (
            options[name] for name in ("output_padding", "stride", "dilation")
        )
        if any(
            more >= max(step, wide) for more, step, wide in zip(extra, strides, spread, strict=True)
        ):
            raise Mistake(
                f"ConvTranspose: output_padding={list(extra)} must be less than stride={list(strides)} or dilation"
            )
        return after

    def taps_of(self, pixels: int, **options: int) -> Taps:
        return Taps.transposed(pixels, **options)

    def assembled(
        self, weight: Tensor, bias: Tensor | None, gain: float, shift: float
    ) -> nn.Module:
        return super().assembled(
            weight.transpose(0, 1).contiguous(), bias, gain, shift
        )  # as torch has it
