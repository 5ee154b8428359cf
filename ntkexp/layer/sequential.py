"""Translate an `nn.Sequential` into layers, for its kernels of infinite width.

By default, the scales are those of torch's initialisation. torch draws weights and
biases of Linear and Conv uniformly from [−1/√n, 1/√n], where n is the number of inputs
of a unit. Their variance is 1/(3n), so W_std = 1/√3 and b_std = 1/√(3n) in standard
parametrisation. The values of the module's weights are not used.

>>> read_sequential(nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.ReLU()), (1, 3))[2]
ReLU()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from ntkexp.layer.affine import Conv, ConvTranspose, Dense, PaddedConv, Parametrisation
from ntkexp.layer.base import AbstractLayer, LayerChain
from ntkexp.layer.linear import AvgPool, Dropout, Flatten, LayerNorm
from ntkexp.layer.pointwise import GELU, LeakyReLU, ReLU
from ntkexp.layer.smooth import Generic, SiLU, Tanh
from ntkexp.layer.spec import layer_mistake
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape

LIST_ADVICE = "; write the layers as a list, or choose method='monte_carlo'"


@dataclass(frozen=True)
class Scales:
    """Scales of the weights and biases; None means torch's initialisation."""

    W_std: float | None = None
    b_std: float | None = None
    param: Parametrisation = "standard"

    def of(
        self, module: nn.Module, inputs: int, counted: int | None = None
    ) -> dict[str, Any]:
        """Return the fields `W_std`, `b_std`, `param` and `frozen` of a layer with
        `inputs` inputs per unit.

        torch draws the weights from [−1/√counted, 1/√counted]. By default, `counted`
        equals `inputs`. For transposed convolutions, it does not."""
        counted = counted or inputs
        weight = module.weight
        bias = module.bias
        assert isinstance(weight, Tensor)
        if bias is not None and bias.requires_grad != weight.requires_grad:
            raise Mistake(
                f"one of weight and bias of {type(module).__name__} is trained, and the other "
                f"not{LIST_ADVICE}"
            )
        W_std = sqrt(inputs / (3 * counted)) if self.W_std is None else self.W_std
        b_std = 1 / sqrt(3 * counted) if self.b_std is None else self.b_std
        return {
            "W_std": W_std,
            "b_std": 0.0 if bias is None else b_std,
            "param": self.param,
            "frozen": not weight.requires_grad,
        }


def read_sequential(
    module: nn.Sequential, shape: Shape, scales: Scales | None = None
) -> LayerChain:
    """Return the layers of a module for examples of this shape.

    Raise if a child has no known limit, has a hook, does not fit the shape,
    or occurs twice with weights."""
    layers: list[AbstractLayer] = []
    places: dict[int, str] = {}
    for place, leaf in leaves(module, "module"):
        kind = type(leaf)
        if kind not in READERS:
            raise Mistake(
                f"{place} is a {kind.__name__}, which has no known limit of infinite "
                f"width{LIST_ADVICE}"
            )
        if leaf._forward_hooks or leaf._forward_pre_hooks:
            raise Mistake(
                f"{place} has a hook, so it may compute another function than "
                f"{kind.__name__}{LIST_ADVICE}"
            )
        has_weights = any(True for _ in leaf.parameters())
        first = places.setdefault(id(leaf), place) if has_weights else place
        if first != place:
            raise Mistake(
                f"{place} is {first} again, but weights that are used twice have no known "
                f"limit{LIST_ADVICE}"
            )
        try:
            leaf_layers = READERS[kind](leaf, shape, scales or Scales())
            for layer in leaf_layers:
                shape = layer.shape(shape)
        except Mistake as mistake:
            raise Mistake(f"{place}: {mistake}") from None
        except ValidationError as error:
            raise layer_mistake(error, place) from None
        layers += leaf_layers
    return tuple(layers)


def leaves(module: nn.Sequential, place: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules in order, including the children
    of nested `nn.Sequential`s."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise Mistake(
            f"{place} has a hook, so it may compute another function{LIST_ADVICE}"
        )
    # `children()` would skip repeated modules
    for name, child in module._modules.items():
        assert child is not None
        child_place = f"{place}[{name}]"
        if type(child) is nn.Sequential:
            yield from leaves(child, child_place)
        else:
            yield child_place, child


# --- Readers of modules

Reader = Callable[[Any, tuple[int, ...], Scales], list[AbstractLayer]]


def read_linear(module: nn.Linear, shape: Shape, scales: Scales) -> list[AbstractLayer]:
    if shape != (module.in_features,):
        raise Mistake(
            f"it takes vectors of {module.in_features}, and is given examples of shape "
            f"{list(shape)}"
        )
    return [
        Dense(features=module.out_features, **scales.of(module, module.in_features))
    ]


def refuse_other_images(module: Any, shape: Shape) -> None:
    axes = len(module.kernel_size)
    if len(shape) != axes + 1 or shape[0] != module.in_channels:
        raise Mistake(
            f"it takes {module.in_channels} channels of {axes} axes of pixels, and is given "
            f"{list(shape)}"
        )


def read_convolution(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, shape: Shape, scales: Scales
) -> list[AbstractLayer]:
    """Return the faster `Conv` if it supports the options of the convolution,
    else `PaddedConv`.

    `Conv` supports odd windows, one stride for all axes, no dilation, and padding by
    half a window or zero."""
    refuse_other_images(module, shape)
    windows = tuple(module.kernel_size)
    dilation = tuple(module.dilation)
    padding = padding_of(module)
    half_padded = padding == tuple(w // 2 for w in windows)
    unpadded = not any(padding)
    is_odd = all(w % 2 for w in windows)
    one_stride = set(dilation) == {1} and len(set(module.stride)) == 1
    is_plain = is_odd and (half_padded or unpadded) and one_stride
    mode = module.padding_mode
    circular = mode == "circular" and not unpadded
    known_mode = mode in {"zeros", "circular"} or unpadded
    if module.groups != 1 or not known_mode or (circular and not is_plain):
        raise Mistake(
            "groups, and padding other than by zeros or circular by half a window, are not "
            f"supported{LIST_ADVICE}"
        )
    scale_fields = scales.of(module, module.in_channels * prod(windows))
    if not is_plain:
        options = {
            "window": windows,
            "stride": tuple(module.stride),
            "padding": padding,
            "dilation": dilation,
        }
        return [PaddedConv(features=module.out_channels, **options, **scale_fields)]
    conv = Conv(
        features=module.out_channels,
        window=windows,
        stride=module.stride[0],
        circular=circular,
        valid=unpadded and not half_padded,
        **scale_fields,
    )
    return [conv]


def padding_of(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    if module.padding != "same":
        return (0,) * len(module.kernel_size)
    sizes = zip(module.dilation, module.kernel_size, strict=True)
    totals = [dilation * (window - 1) for dilation, window in sizes]
    if any(total % 2 for total in totals):
        raise Mistake(
            "padding='same' of an even window has two unequal ends, which are not "
            f"supported{LIST_ADVICE}"
        )
    return tuple(total // 2 for total in totals)


def read_transposed(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
    shape: Shape,
    scales: Scales,
) -> list[AbstractLayer]:
    """Return a `ConvTranspose`. torch scales its weights by `out_channels`,
    not `in_channels`."""
    windows = tuple(module.kernel_size)
    refuse_other_images(module, shape)
    if module.groups != 1:
        raise Mistake(f"groups are not supported{LIST_ADVICE}")
    count = prod(windows)
    return [
        ConvTranspose(
            features=module.out_channels,
            window=windows,
            stride=tuple(module.stride),
            padding=tuple(module.padding),
            dilation=tuple(module.dilation),
            output_padding=tuple(module.output_padding),
            **scales.of(
                module, module.in_channels * count, module.out_channels * count
            ),
        )
    ]


def read_pool(module: Any, shape: Shape, scales: Scales) -> list[AbstractLayer]:
    """Return an `AvgPool`. Raise unless the windows are adjacent."""
    axes = len(shape) - 1

    def per_axis(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple) else (value,) * axes

    window = per_axis(module.kernel_size)
    if (
        window != per_axis(module.stride)
        or any(per_axis(module.padding))
        or module.ceil_mode
    ):
        raise Mistake(
            f"windows that overlap, are apart, or look beyond the image are not supported{LIST_ADVICE}"
        )
    if getattr(module, "divisor_override", None) is not None:
        raise Mistake(f"divisor_override is not supported{LIST_ADVICE}")
    return [AvgPool(window=window)]


def read_global_pool(module: Any, shape: Shape, scales: Scales) -> list[AbstractLayer]:
    """Return an `AvgPool` whose window is the whole image.
    The result is an image of one pixel."""
    sizes = (
        module.output_size
        if isinstance(module.output_size, tuple)
        else (module.output_size,)
    )
    if set(sizes) != {1}:
        raise Mistake(
            f"output_size={module.output_size} is not supported, only 1{LIST_ADVICE}"
        )
    return [AvgPool(window=shape[1:])]


def read_flatten(
    module: nn.Flatten, shape: Shape, scales: Scales
) -> list[AbstractLayer]:
    if module.start_dim != 1 or module.end_dim not in {-1, len(shape)}:
        raise Mistake(
            f"Flatten({module.start_dim}, {module.end_dim}) is not supported; flatten all axes of an "
            "example"
        )
    return [Flatten()] if len(shape) > 1 else []


def read_layer_norm(
    module: nn.LayerNorm, shape: Shape, scales: Scales
) -> list[AbstractLayer]:
    if (
        module.elementwise_affine
        or shape != tuple(module.normalized_shape)
        or len(shape) > 1
    ):
        raise Mistake(
            "LayerNorm has a known limit of infinite width on vectors, without a gain that is "
            "trained; give elementwise_affine=False"
        )
    return [LayerNorm(eps=module.eps)]


def read_gelu(module: nn.GELU, shape: Shape, scales: Scales) -> list[AbstractLayer]:
    if module.approximate != "none":
        raise Mistake(
            f"GELU(approximate={module.approximate!r}) is not supported; give approximate='none'"
        )
    return [GELU()]


def read_softplus(
    module: nn.Softplus, shape: Shape, scales: Scales
) -> list[AbstractLayer]:
    if module.beta != 1:
        raise Mistake(f"Softplus(beta={module.beta}) is not supported; give beta=1")
    return [Generic(fn="softplus")]


READERS: Mapping[type[nn.Module], Reader] = {
    nn.Linear: read_linear,
    nn.Conv1d: read_convolution,
    nn.Conv2d: read_convolution,
    nn.Conv3d: read_convolution,
    nn.ConvTranspose1d: read_transposed,
    nn.ConvTranspose2d: read_transposed,
    nn.ConvTranspose3d: read_transposed,
    nn.AvgPool1d: read_pool,
    nn.AvgPool2d: read_pool,
    nn.AvgPool3d: read_pool,
    nn.AdaptiveAvgPool1d: read_global_pool,
    nn.AdaptiveAvgPool2d: read_global_pool,
    nn.AdaptiveAvgPool3d: read_global_pool,
    nn.Flatten: read_flatten,
    nn.LayerNorm: read_layer_norm,
    nn.GELU: read_gelu,
    nn.Softplus: read_softplus,
    nn.ReLU: lambda module, shape, scales: [ReLU()],
    nn.LeakyReLU: lambda module, shape, scales: [
        LeakyReLU(slope=module.negative_slope)
    ],
    nn.Tanh: lambda module, shape, scales: [Tanh()],
    nn.SiLU: lambda module, shape, scales: [SiLU()],
    nn.Sigmoid: lambda module, shape, scales: [Generic(fn="sigmoid")],
    nn.Mish: lambda module, shape, scales: [Generic(fn="mish")],
    nn.Identity: lambda module, shape, scales: [],
    nn.Dropout: lambda module, shape, scales: (
        [Dropout(rate=module.p)] if module.training and module.p else []
    ),
}
"""Functions that translate a module, by the exact class of the module. (A subclass may
compute a different function.)"""
