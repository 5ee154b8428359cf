"""Kernels of any module, as functions.

>>> import torch
>>> layer = torch.nn.Linear(2, 1, dtype=torch.float64)
>>> x = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
>>> tangent_kernel(layer, x)[:, 0, :, 0]
tensor([[ 6.,  7.],
        [ 7., 10.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel.gram import gram
from ntkexp.kernel.reader import Reader
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights


def tangent_kernel(
    module: nn.Module,
    x1: Float[Tensor, "probe *shape"],
    x2: Float[Tensor, "train *shape"] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "probe out train out_"]:
    """K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ, summed over the parameters that require gradients.

    `weights` may name some or all parameters; the others are the module's own. Outputs of several axes are flattened.
    """
    reader, own = reader_of(module)
    chosen = own | named(module, weights or {}, "weights")
    left = reader.tangent(reader.record(chosen, x1))
    return gram(left, left if x2 is None else reader.tangent(reader.record(chosen, x2)))


def secant_kernel(
    module: nn.Module,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    probes: Float[Tensor, "probe *shape"],
    train: Float[Tensor, "train *shape"],
) -> Float[Tensor, "probe out train out_"]:
    """K̄(x, x′) = J̄(x) J(x′)ᵀ between the segment start → end at the probes and its start at the training inputs.

    With g = Σᵢ J(start; xᵢ)ᵀ ℓ′ᵢ and end = start − η g, the change of the module is −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ exactly:

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()
    >>> x, start = torch.tensor([[1.0]]).double(), dict(net.named_parameters())
    >>> gradients = torch.autograd.grad(net(x).sum(), list(start.values()))
    >>> end = {name: w - 0.5 * g for (name, w), g in zip(start.items(), gradients)}
    >>> change = torch.func.functional_call(net, end, (x,)) - net(x)
    >>> bool((change + 0.5 * secant_kernel(net, start, end, x, x).sum()).abs() < 1e-14)
    True
    """
    reader, own = reader_of(module)
    before, after = own | named(module, start, "start"), own | named(module, end, "end")
    left = reader.secant(reader.record(before, probes), reader.record(after, probes))
    return gram(left.features, reader.tangent(reader.record(before, train)))


OWNERSHIP: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
"""What was found of each module that is still alive: which example owns what, asked once for every structure."""


def reader_of(module: nn.Module) -> tuple[Reader, Weights]:
    """A reader of the module, and all its parameters."""
    own = {name: weight.detach() for name, weight in module.named_parameters()}
    trained = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad)
    if not trained:
        raise Mistake("no parameter of the module requires gradients, so it has no tangent kernel")
    known = OWNERSHIP.setdefault(module, {})
    return Reader(function_of(module), trained, known.setdefault(trained, {})), own


def named(module: nn.Module, weights: Mapping[str, Tensor], argument: str) -> Weights:
    """The tensors of a mapping that are parameters; buffers in it are the module's business."""
    shapes = {name: weight.shape for name, weight in module.named_parameters()}
    buffers = {name for name, _ in module.named_buffers()}
    for name, weight in weights.items():
        if name not in shapes and name not in buffers:
            raise Mistake(f"{argument}['{name}']: the module has no such parameter{nearest(name, shapes)}")
        if name in shapes and weight.shape != shapes[name]:
            raise Mistake(f"{argument}['{name}'] has shape {list(weight.shape)}; the module's has {list(shapes[name])}")
    return {name: weight.detach() for name, weight in weights.items() if name in shapes}
