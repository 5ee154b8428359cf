"""The kernels of an infinitely wide network, as a function.

>>> import torch
>>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
>>> nngp, ntk = infinite_kernel([{"layer": "Dense", "features": 1, "b_std": 1.0}], x)
>>> nngp
tensor([[1.5000, 1.0000],
        [1.0000, 3.0000]], dtype=torch.float64)
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ntkexp.layer.spec import Spec, parse
from ntkexp.limit.blocks import blocks, is_finite
from ntkexp.limit.engine import Engine
from ntkexp.limit.network import network
from ntkexp.mistake import Mistake


def infinite_kernel(
    spec: Spec,
    x1: Shaped[Tensor, "..."],
    x2: Shaped[Tensor, "..."] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
) -> tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]]:
    """NNGP kernel and tangent kernel between examples [example, channel, *pixel] or [example, feature].

    `spec` is a list of layers, each a mapping `{"layer": NAME, …}` or a layer of `ntkexp.layer`, or the list as JSON:
    Dense, Conv, ReLU, LeakyReLU, Abs, Erf, GELU, Sin, Cos, Tanh, SiLU, Generic, Polynomial, Hermite, AvgPool,
    GlobalAvgPool, Flatten, LayerNorm, Residual, Concatenation. Without x2 the examples are paired with themselves, and
    where one meets itself nothing is rounded that is 1 by definition. `W_std` and `b_std` may be tensors: both kernels
    are differentiable by them and by the inputs. Beside its result, a call takes up to `memory_gb`.
    """
    refuse_unfit(x1, x2, memory_gb)
    net = network(parse(spec), tuple(x1.shape[1:]))
    shape = (len(x1), len(x1 if x2 is None else x2))
    side = max(shape) if len(net.shape) == 1 else None  # beside its result, a block of vectors takes next to nothing
    nngp, ntk = x1.new_empty(shape), x1.new_empty(shape)
    for block in blocks(net, x1, x2, memory_gb=memory_gb, engine=engine, threads=threads, side=side):
        if block.nngp.shape == shape:
            return block.nngp, block.ntk
        for part in (block, block.mirrored) if x2 is None else (block,):
            nngp[part.place.rows, part.place.columns] = part.nngp
            ntk[part.place.rows, part.place.columns] = part.ntk
    return nngp, ntk


def refuse_unfit(x1: Tensor, x2: Tensor | None, memory_gb: float) -> None:
    """Inputs are finite numbers, of one shape."""
    if not memory_gb > 0:
        raise Mistake(f"memory_gb={memory_gb:g}: it takes a number > 0")
    for name, x in (("x1", x1), *(() if x2 is None else (("x2", x2),))):
        if x.dim() < 2 or not x.is_floating_point():
            raise Mistake(f"{name} is {x.dtype} of shape {list(x.shape)}; it takes floating numbers [example, …]")
        if x.shape[1:] != x1.shape[1:] or x.dtype != x1.dtype:
            raise Mistake(
                f"x1 has examples of shape {list(x1.shape[1:])} and {x1.dtype}, "
                f"x2 of {list(x.shape[1:])} and {x.dtype}; they are of one kind"
            )
        if not is_finite(x):
            raise Mistake(f"{name} has entries that are not finite, the first in example {first_odd(~x.isfinite())}")
        if (odd := is_tiny(x.detach())).any():
            raise Mistake(f"{name} is so small that its squares lose digits, in example {first_odd(odd)}; scale it up")


def is_tiny(x: Float[Tensor, "example *shape"]) -> Bool[Tensor, " example"]:
    """The examples whose largest squares are no normal numbers; zeros are zeros."""
    sizes, kind = x.flatten(1).abs(), torch.finfo(x.dtype)
    largest = sizes.amax(1) if sizes.shape[1] else sizes.sum(1)
    found: Tensor = (largest > 0) & (largest < (kind.tiny / kind.eps) ** 0.5)
    return found


def first_odd(odd: Bool[Tensor, "example *shape"]) -> int:
    """The first example with an entry of this kind."""
    return int(odd.reshape(len(odd), -1).any(1).nonzero()[0])
