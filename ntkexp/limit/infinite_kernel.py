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

from ntkexp.covariance.portions import portions
from ntkexp.layer.spec import Spec, parse
from ntkexp.limit.blocks import blocks
from ntkexp.limit.engine import Engine
from ntkexp.limit.network import network
from ntkexp.mistake import Mistake

MOST = 1e9  # GB


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
    if threads is not None and (not isinstance(threads, int) or not 0 < threads < MOST):
        raise Mistake(f"threads={threads!r:.40}: it takes a whole number > 0")
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
    if not isinstance(memory_gb, int | float) or not 0 < memory_gb < MOST:
        raise Mistake(f"memory_gb={memory_gb!r}: it takes a number > 0, and the machine has less than {MOST:g}")
    for name, x in (("x1", x1), *(() if x2 is None else (("x2", x2),))):
        if not isinstance(x, Tensor):
            raise Mistake(f"{name} is a {type(x).__name__}; give a tensor [example, …]")
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.is_quantized:
            raise Mistake(f"{name} is nested, sparse, quantized or without numbers; give a plain tensor [example, …]")
        if x.dim() < 2 or not x.is_floating_point():
            raise Mistake(f"{name} is {x.dtype} of shape {list(x.shape)}; it takes floating numbers [example, …]")
        if x.shape[1:] != x1.shape[1:] or x.dtype != x1.dtype:
            raise Mistake(
                f"x1 has examples of shape {list(x1.shape[1:])} and {x1.dtype}, "
                f"x2 of {list(x.shape[1:])} and {x.dtype}; they are of one kind"
            )
        sizes = largest(x.detach())
        if not sizes.isfinite().all():
            raise Mistake(
                f"{name} has entries that are not finite, the first in example {first_odd(~sizes.isfinite())}"
            )
        if (odd := is_tiny(sizes)).any():
            raise Mistake(f"{name} is so small that its squares lose digits, in example {first_odd(odd)}; scale it up")


def largest(x: Float[Tensor, "example *shape"]) -> Float[Tensor, " example"]:
    """The size of the largest entry of each example, or what is not finite there.

    >>> largest(torch.tensor([[1.0, -2.0], [torch.nan, torch.inf]]))
    tensor([2., nan])
    """
    if not x[:1].numel():
        return x.flatten(1).sum(1)
    parts = portions(x.flatten(1), x[0].numel())
    return torch.cat([torch.maximum(part.amax(1), -part.amin(1)) for part in parts])


def is_tiny(sizes: Float[Tensor, " example"]) -> Bool[Tensor, " example"]:
    """The examples whose largest squares are no normal numbers; zeros are zeros."""
    kind = torch.finfo(sizes.dtype)
    found: Tensor = (sizes > 0) & (sizes < (kind.tiny / kind.eps) ** 0.5)
    return found


def first_odd(odd: Bool[Tensor, " example"]) -> int:
    """The first example of this kind."""
    return int(odd.nonzero()[0])
