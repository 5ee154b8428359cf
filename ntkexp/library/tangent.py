"""The tangent kernel of any module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel.read.batches import batches
from ntkexp.kernel.read.outputs import Outputs
from ntkexp.kernel.read.sketched import SketchedKernel
from ntkexp.kernel.record.casts import Casts
from ntkexp.kernel.record.full_precision import full_precision
from ntkexp.library.blocks import kernel, refuse_pairs, side
from ntkexp.library.module import finite, named, of_module, reader_of, refuse_unlike_outputs, warn_of
from ntkexp.library.sketched import sketched_tangent
from ntkexp.library.strips import tangent_by_strips
from ntkexp.shapes import Inputs


@overload
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: Outputs = "all",
    casts: Casts = "keep",
    sketch: None = None,
) -> Float[Tensor, "probe out train out_"]: ...


@overload
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: Outputs = "all",
    casts: Casts = "keep",
    sketch: int,
    seed: int = 0,
) -> SketchedKernel: ...


@of_module
@full_precision()
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: Outputs = "all",
    casts: Casts = "keep",
    sketch: int | None = None,
    seed: int = 0,
) -> Float[Tensor, "probe out train out_"] | SketchedKernel:
    """K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ, summed over the parameters that require gradients.

    Inputs are a tensor, a tuple of tensors or a dict of keyword arguments, each tensor with the examples along its
    first axis. `weights` may name some or all parameters; the others are the module's own. Of a module that gives
    several tensors, `output` names the one that is read. Its axes but the first are flattened, and `outputs` chooses
    among them: "all", a list of places, or "trace" for Σ_c K[x, c, x′, c] as [n1, 1, n2, 1], however many there are.
    `casts="ignore"` leaves out what the module casts to shorter numbers than its weights.

    Features that would not fit are read some examples at a time, and multiplied out a strip of a parameter at a time.
    For many examples of a large module, `sketch=k` projects them to k dimensions at random (`seed`). Then there are
    two results, a kernel without bias and a bar, which ‖K̂ − K‖_F exceeds in one case of a hundred. Errors fall like
    1/√k: this is for drift, spectra, alignment and many examples, not for single entries.

    >>> import torch
    >>> layer, x = torch.nn.Linear(50, 1).double(), torch.eye(9, 50).double()
    >>> kernel, error_bar = tangent_kernel(layer, x, sketch=4096)
    >>> bool((kernel - tangent_kernel(layer, x)).norm() < error_bar)
    True
    """
    reader, own = reader_of(module, output, casts)
    place = own | named(module, {} if weights is None else weights, "weights")
    if sketch is not None:
        return sketched_tangent(reader, place, x1, x2, outputs, sketch, seed)
    left = side(batches(reader, place, x1))
    if casts == "ignore":
        warn_of(module, output, left.record(), casts)
    right = left if x2 is None else side(batches(reader, place, x2))
    refuse_unlike_outputs(left.outputs, right.outputs)
    refuse_pairs(left, right, outputs)
    if outputs != "trace" and (found := tangent_by_strips((reader, place), x1, x2, left, right, outputs)) is not None:
        return finite(found)
    return finite(kernel(left, right, outputs))
