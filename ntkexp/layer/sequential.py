"""An `nn.Sequential` as layers: what its kernel of infinite width is, weights being drawn as torch draws them.

torch draws weights and biases of Linear and Conv uniformly from ±1/√n, n being the inputs of a unit. Their variance is
1/(3n), so that in standard parametrisation W_std = 1/√3 and b_std = 1/√(3n). Of the module only its form is read, never
the numbers that its weights hold.

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
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import AvgPool, Dropout, Flatten, LayerNorm
from ntkexp.layer.pointwise import GELU, LeakyReLU, ReLU
from ntkexp.layer.smooth import Generic, SiLU, Tanh
from ntkexp.layer.spec import layer_mistake
from ntkexp.mistake import Mistake

ADVICE = "; write the layers as a list, or take method='monte_carlo'"


@dataclass(frozen=True)
class Scales:
    """How weights are drawn: as torch does where a scale is not given."""

    W_std: float | None = None
    b_std: float | None = None
    param: Parametrisation = "standard"

    def of(self, module: nn.Module, inputs: int, counted: int | None = None) -> dict[str, Any]:
        """The scales of one layer whose units have n = `inputs`, and whether it is trained.

        torch draws weights and biases from ±1/√counted, where `counted` is n but for a transposed convolution.
        """
        counted = counted or inputs
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        if bias is not None and bias.requires_grad != weight.requires_grad:
            raise Mistake(
                f"one of weight and bias of {type(module).__name__} is trained, and the other not{ADVICE}"
            )
        b_std = 0.0 if bias is None else 1 / sqrt(3 * counted) if self.b_std is None else self.b_std
        return {
            "W_std": sqrt(inputs / (3 * counted)) if self.W_std is None else self.W_std,
            "b_std": b_std,
            "param": self.param,
            "frozen": not weight.requires_grad,
        }


def read_sequential(
    module: nn.Sequential, shape: tuple[int, ...], scales: Scales | None = None
) -> tuple[AbstractLayer, ...]:
    """The layers of a module, for examples of this shape; what has no known limit is refused by its place."""
    found, seen = list[AbstractLayer](), dict[int, str]()
    for place, one in leaves(module, "module"):
        kind = type(one)
        if kind not in READERS:
            raise Mistake(
                f"{place} is a {kind.__name__}, whose limit of infinite width is not known here{ADVICE}"
            )
        if one._forward_hooks or one._forward_pre_hooks:
            raise Mistake(
                f"{place} has a hook, by which it may be another function than its {kind.__name__}{ADVICE}"
            )
        first = seen.setdefault(id(one), place) if any(True for _ in one.parameters()) else place
        if first != place:
            raise Mistake(
                f"{place} is {first} again: weights that are used twice have no limit known here{ADVICE}"
            )
        try:
            layers = READERS[kind](one, shape, scales or Scales())
            for layer in layers:
                shape = layer.shape(shape)
        except Mistake as mistake:
            raise Mistake(f"{place}: {mistake}") from None
        except ValidationError as error:
            raise layer_mistake(error, place) from None
        found += layers
    return tuple(found)


def leaves(module: nn.Sequential, place: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in order, those of an nn.Sequential inside included, and how they are spoken of."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise Mistake(f"{place} has a hook, by which it may be another function{ADVICE}")
    for name, child in module._modules.items():  # `children` would skip what comes again
        assert child is not None
        here = f"{place}[{name}]"
        if type(child) is nn.Sequential:
            yield from leaves(child, here)
        else:
            yield here, child


# --- Each module that can be read, and how.

Reader = Callable[[Any, tuple[int, ...], Scales], list[AbstractLayer]]


def read_linear(module: nn.Linear, shape: tuple[int, ...], scales: Scales) -> list[AbstractLayer]:
    if shape != (module.in_features,):
        raise Mistake(
            f"it takes vectors of {module.in_features}, and is given examples of shape {list(shape)}"
        )
    return [Dense(features=module.out_features, **scales.of(module, module.in_features))]


def refuse_other_images(module: Any, shape: tuple[int, ...]) -> None:
    axes = len(module.kernel_size)
    if len(shape) != axes + 1 or shape[0] != module.in_channels:
        raise Mistake(
            f"it takes {module.in_channels} channels of {axes} axes of pixels, and is given {list(shape)}"
        )


def read_convolution(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, shape: tuple[int, ...], scales: Scales
) -> list[AbstractLayer]:
    """Convolutions; by odd windows, with padding of half a window or none, as the faster `Conv`."""
    windows, spread = tuple(module.kernel_size), tuple(module.dilation)
    refuse_other_images(module, shape)
    padding, odd = module.padding, all(w % 2 for w in windows)
    if isinstance(padding, str):
        reach = tuple(d * (w - 1) for d, w in zip(spread, windows, strict=True))
        if padding == "same" and any(each % 2 for each in reach):
            raise Mistake(
                f"padding='same' of an even window has two unequal ends, which are not supported{ADVICE}"
            )
        padding = tuple(each // 2 if padding == "same" else 0 for each in reach)
    same, valid, mode = (
        padding == tuple(w // 2 for w in windows),
        not any(padding),
        module.padding_mode,
    )
    plain = odd and (same or valid) and set(spread) == {1} and len(set(module.stride)) == 1
    circular = mode == "circular" and not valid
    if (
        module.groups != 1
        or (mode not in {"zeros", "circular"} and not valid)
        or (circular and not plain)
    ):
        raise Mistake(
            f"groups, and padding other than by zeros or circular by half a window, are not supported{ADVICE}"
        )
    drawn = scales.of(module, module.in_channels * prod(windows))
    if not plain:
        options = {
            "window": windows,
            "stride": tuple(module.stride),
            "padding": padding,
            "dilation": spread,
        }
        return [PaddedConv(features=module.out_channels, **options, **drawn)]
    step = module.stride[0]
    only = valid and not same
    return [
        Conv(
            features=module.out_channels,
            window=windows,
            stride=step,
            circular=circular,
            valid=only,
            **drawn,
        )
    ]


def read_transposed(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
    shape: tuple[int, ...],
    scales: Scales,
) -> list[AbstractLayer]:
    """Transposed convolutions; torch draws their weights by the number of units, in place of that of inputs."""
    windows = tuple(module.kernel_size)
    refuse_other_images(module, shape)
    if module.groups != 1:
        raise Mistake(f"groups are not supported{ADVICE}")
    count = prod(windows)
    return [
        ConvTranspose(
            features=module.out_channels,
            window=windows,
            stride=tuple(module.stride),
            padding=tuple(module.padding),
            dilation=tuple(module.dilation),
            output_padding=tuple(module.output_padding),
            **scales.of(module, module.in_channels * count, module.out_channels * count),
        )
    ]


def read_pool(module: Any, shape: tuple[int, ...], scales: Scales) -> list[AbstractLayer]:
    """Averages over windows that do not overlap."""
    axes = len(shape) - 1

    def each(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple) else (value,) * axes

    if (
        each(module.kernel_size) != each(module.stride)
        or any(each(module.padding))
        or module.ceil_mode
    ):
        raise Mistake(
            f"windows that overlap, are apart, or look beyond the image are not supported{ADVICE}"
        )
    if getattr(module, "divisor_override", None) is not None:
        raise Mistake(f"divisor_override is not supported{ADVICE}")
    return [AvgPool(window=each(module.kernel_size))]


def read_global_pool(module: Any, shape: tuple[int, ...], scales: Scales) -> list[AbstractLayer]:
    """The mean over the image, as an image of one pixel."""
    sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
    if set(sizes) != {1}:
        raise Mistake(f"output_size={module.output_size} is not supported, only 1{ADVICE}")
    return [AvgPool(window=shape[1:])]


def read_flatten(module: nn.Flatten, shape: tuple[int, ...], scales: Scales) -> list[AbstractLayer]:
    if module.start_dim != 1 or module.end_dim not in {-1, len(shape)}:
        raise Mistake(
            f"of Flatten({module.start_dim}, {module.end_dim}), only that of all axes of an example is supported"
        )
    return [Flatten()] if len(shape) > 1 else []


def read_layer_norm(
    module: nn.LayerNorm, shape: tuple[int, ...], scales: Scales
) -> list[AbstractLayer]:
    if module.elementwise_affine or shape != tuple(module.normalized_shape) or len(shape) > 1:
        raise Mistake(
            "LayerNorm has a known limit of infinite width on vectors, without a gain that is trained; give "
            "elementwise_affine=False"
        )
    return [LayerNorm(eps=module.eps)]


def read_gelu(module: nn.GELU, shape: tuple[int, ...], scales: Scales) -> list[AbstractLayer]:
    if module.approximate != "none":
        raise Mistake(
            f"GELU(approximate={module.approximate!r}) is not supported; give approximate='none'"
        )
    return [GELU()]


def read_softplus(
    module: nn.Softplus, shape: tuple[int, ...], scales: Scales
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
    nn.LeakyReLU: lambda module, shape, scales: [LeakyReLU(slope=module.negative_slope)],
    nn.Tanh: lambda module, shape, scales: [Tanh()],
    nn.SiLU: lambda module, shape, scales: [SiLU()],
    nn.Sigmoid: lambda module, shape, scales: [Generic(fn="sigmoid")],
    nn.Mish: lambda module, shape, scales: [Generic(fn="mish")],
    nn.Identity: lambda module, shape, scales: [],
    nn.Dropout: lambda module, shape, scales: (
        [Dropout(rate=module.p)] if module.training and module.p else []
    ),
}
"""By the class itself: one made from it may be another function."""
