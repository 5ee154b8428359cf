"""Kernels of infinitely wide networks, from a list of layers or an `nn.Sequential`.

They are computed in closed form, or estimated as means over random networks,
with standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import NDArray
from torch import Tensor, nn

from ntkexp.capacity import MemoryBudget
from ntkexp.component import MAX_COUNT
from ntkexp.kernel.record.products import full_precision, refuse_rounded_products
from ntkexp.layer.affine import Parametrisation
from ntkexp.layer.base import build
from ntkexp.layer.sequential import Scales, read_sequential
from ntkexp.layer.spec import Spec, parse_layers
from ntkexp.library.module import as_tensor
from ntkexp.library.tangent_object import TangentKernel
from ntkexp.limit import infinite_kernel as limit
from ntkexp.limit.infinite_kernel import Engine, InfiniteKernels
from ntkexp.mistake import Mistake, in_short
from ntkexp.model.functional import copy_module
from ntkexp.shapes import Shape
from ntkexp.stream import global_seed, stream

METHODS = ("closed_form", "monte_carlo")


class EstimatedKernels(InfiniteKernels):
    """The NNGP kernel and the tangent kernel as means over random networks,
    with standard errors."""

    error: InfiniteKernels

    @classmethod
    def of(
        cls,
        nngp: Float[Tensor, "draw row column"],
        ntk: Float[Tensor, "draw row column"],
    ) -> EstimatedKernels:
        """Return the means and standard errors of the NNGP
        and the tangent kernel over random networks."""
        root = len(nngp) ** 0.5
        means = cls(nngp.mean(0), ntk.mean(0))
        means.error = InfiniteKernels(nngp.std(0) / root, ntk.std(0) / root)
        return means


@full_precision()
def infinite_kernel(
    spec: Spec | nn.Module,
    x1: Shaped[Tensor, "..."] | NDArray[Any],
    x2: Shaped[Tensor, "..."] | NDArray[Any] | None = None,
    *,
    W_std: float | None = None,
    b_std: float | None = None,
    param: Parametrisation | None = None,
    method: Literal["closed_form", "monte_carlo"] = "closed_form",
    samples: int = 100,
    seed: int = 0,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
) -> InfiniteKernels:
    """Return the NNGP kernel and the tangent kernel as a named tuple (nngp, ntk).

    Layers are Dense, Conv, PaddedConv, ConvTranspose, ReLU, LeakyReLU, Abs, Erf, GELU,
    Sin, Cos, Tanh, SiLU, Generic, Polynomial, Hermite, AvgPool, GlobalAvgPool, Flatten,
    LayerNorm, Dropout, SelfAttention, Residual, Concatenation. The `W_std` and `b_std`
    of layers may be tensors. Both kernels are differentiable with respect to these
    tensors and the inputs.

    If `spec` is an `nn.Sequential`, its layers are used, but not the values of its
    weights. By default, weights are assumed to have torch's initialisation, uniform on
    [−1/√n, 1/√n] for n inputs, which is W_std = 1/√3 and b_std = 1/√(3n) in standard
    parametrisation. `tangent_kernel(module, x)` then tends to `ntk` as the width grows.
    Dropout has an effect only in training mode.

    Args:
        spec: a list of layers, each a mapping `{"layer": NAME, …}` or a layer of
            `ntkexp.layer`; such a list as JSON; or an `nn.Sequential`.
        x1 (tensor or array [example, feature] or [example, channel, pixel, …]): the
            examples.
        x2 (tensor, array, or None): other examples. Without them, the examples of `x1` are
            paired with each other, and the correlation of an example with itself is
            exactly 1.
        W_std: the scale of the weights in all layers of an `nn.Sequential`.
        b_std: the scale of the biases in all layers of an `nn.Sequential`.
        param: the parametrisation of an `nn.Sequential`, "standard" or "ntk".
        method: "monte_carlo" draws networks of the given width, and returns the means
            of their kernels over draws and outputs. It accepts any module whose layers
            can draw their weights by `reset_parameters`. The standard errors do not
            include the effect of the finite width on the means, which is O(1/width).
        samples: the number of networks that Monte Carlo draws.
        seed: the seed of these networks.
        memory_gb: the memory in addition to the result.
        engine: "torch", or "fused" for a compiled engine on CPUs, or "auto".
        threads: the number of CPU threads. By default, all.

    Returns:
        The kernels `nngp` and `ntk`, tensors [n1, n2] in the dtype of the examples. With Monte
        Carlo, the attribute `error` holds the standard errors of both.

    Raises:
        Mistake: if a layer has no closed form, or if the engine does not support it.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> infinite_kernel([{"layer": "Dense", "features": 1, "b_std": 1.0}], x).nngp
    tensor([[1.5000, 1.0000],
            [1.0000, 3.0000]], dtype=torch.float64)
    >>> net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1, bias=False))
    >>> nngp, ntk = infinite_kernel(net, x, W_std=2**0.5, b_std=0.0, param="ntk")
    >>> [round(float(value), 12) for value in (*nngp.diagonal(), *ntk.diagonal())]
    [1.0, 4.0, 2.0, 8.0]
    """
    if not isinstance(method, str) or method not in METHODS:
        raise Mistake(f"method={in_short(method)} is none of {', '.join(METHODS)}")
    budget = MemoryBudget.of_gb(memory_gb)
    if isinstance(x1, np.ndarray):
        x1 = as_tensor(x1, "x1")
    if isinstance(x2, np.ndarray):
        x2 = as_tensor(x2, "x2")
    limit.refuse_unfit(x1, x2)
    refuse_rounded_products({"x1": x1})
    given: dict[str, Any] = {"W_std": W_std, "b_std": b_std, "param": param}
    scales = {name: value for name, value in given.items() if value is not None}
    if scales and not isinstance(spec, nn.Sequential):
        raise Mistake(
            f"{', '.join(scales)}: they apply to an nn.Sequential only; in a list, set them in "
            "each layer"
        )
    if isinstance(spec, nn.Module) and (method == "closed_form" or scales):
        if not isinstance(spec, nn.Sequential):
            raise Mistake(
                f"the module is a {type(spec).__name__}; closed forms need an nn.Sequential; "
                "estimate the kernels of other modules by method='monte_carlo'"
            )
        spec = read_sequential(spec, tuple(x1.shape[1:]), Scales(**scales))
    if method == "monte_carlo":
        return estimate(spec, x1, x2, samples, seed, memory_gb)
    assert not isinstance(spec, nn.Module)
    return limit.infinite_kernel(
        spec, x1, x2, budget=budget, engine=engine, threads=threads
    )


# --- Means over random networks


def estimate(
    spec: Spec | nn.Module,
    x1: Tensor,
    x2: Tensor | None,
    samples: int,
    seed: int,
    memory_gb: float,
) -> EstimatedKernels:
    """Estimate two kernels by means over random networks with C outputs: the NNGP
    kernel E Σ_c f_c(x) f_c(x′)/C, and the tangent kernel E Σ_c Θ[x, c, x′, c]/C."""
    if not isinstance(samples, int) or not 2 <= samples <= MAX_COUNT:
        raise Mistake(
            f"samples={in_short(samples)}: give a whole number of draws, 2 at least, such as 100"
        )
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise Mistake(f"seed={in_short(seed)}: give a whole number")
    nngp = list[Tensor]()
    ntk = list[Tensor]()
    for module in draws(spec, tuple(x1.shape[1:]), samples, seed):
        weight = next(module.parameters(), None)
        if weight is None:
            raise Mistake(
                "method='monte_carlo': the network has no weights to draw; give it a layer"
            )
        sides = [x.to(weight) for x in (x1, x2) if x is not None]
        with torch.no_grad():
            outputs = [module(x).flatten(1) for x in sides]
        count = outputs[0].shape[1]
        nngp.append(outputs[0] @ outputs[-1].T / count)
        ntk.append(TangentKernel(module, "trace", memory_gb=memory_gb)(*sides) / count)
    return EstimatedKernels.of(
        torch.stack(nngp).to(x1.dtype), torch.stack(ntk).to(x1.dtype)
    )


@runtime_checkable
class DrawsItself(Protocol):
    """A module that draws its own weights, like the layers of torch."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def reset_parameters(self) -> None: ...


def draws(
    spec: Spec | nn.Module, shape: Shape, samples: int, seed: int
) -> Iterator[nn.Module]:
    """Yield random networks. If `spec` is a module, draw
    the weights of one copy repeatedly."""
    if not isinstance(spec, nn.Module):
        layers = parse_layers(spec)
        for k in range(samples):
            yield build(layers, shape, stream("monte carlo", seed, k))
        return
    module = copy_module(spec)
    # children before their parents, the order in which torch builds them
    drawn = [
        layer
        for layer in reversed([*module.modules()])
        if isinstance(layer, DrawsItself | nn.MultiheadAttention)
    ]
    known = {
        id(weight) for layer in drawn for weight in layer.parameters(recurse=False)
    }
    for name, weight in module.named_parameters():
        if id(weight) not in known:
            raise Mistake(
                f"method='monte_carlo': the parameter '{name}' belongs to a module without "
                "reset_parameters, so its distribution is unknown; give the module this method"
            )
    for k in range(samples):
        draw_weights(module, drawn, stream("monte carlo", seed, k).initial_seed())
        yield module


def draw_weights(
    module: nn.Module, layers: Sequence[DrawsItself | nn.MultiheadAttention], seed: int
) -> None:
    """Let these layers draw the weights of the module. Raise if a weight is not drawn.

    Under the older weight_norm or pruning, `reset_parameters` fills a computed weight
    instead of a parameter. The parameter then keeps the NaN that is set here.
    """
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.detach().fill_(math.nan)
    with global_seed(seed):
        for layer in layers:
            if isinstance(layer, nn.MultiheadAttention):
                layer._reset_parameters()
            else:
                layer.reset_parameters()
    for name, weight in module.named_parameters():
        if weight.isnan().any():
            raise Mistake(
                f"method='monte_carlo': the parameter '{name}' is not drawn by its layer's "
                "reset_parameters; take weight_norm or pruning off the layer, or draw it there"
            )
