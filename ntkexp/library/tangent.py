"""The tangent kernel of any module.

It is computed from Jacobians with one block for each parameter (assembled Jacobians).
If these exceed the memory, it is computed from chunks of Jacobians. With `sketch`, it
is estimated from random projections (sketches). If the kernel itself exceeds the
memory, an error is raised before the computation.

>>> refuse_large("kernel", 10**6, 10**6, outputs=1000, needed=8e18)  # doctest: +ELLIPSIS
Traceback (most recent call last):
ntkexp.mistake.Mistake: the kernel of 1000000 × 1000000 examples with 1000 outputs each takes 8e+09 GB, and this ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, overload, runtime_checkable
from warnings import warn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel import Casts, ChosenOutputs, Jacobian, NoRule, Reader, Tape, gram
from ntkexp.kernel.features.gram import trace
from ntkexp.kernel.features.jacobian import with_merged_uses
from ntkexp.kernel.read.plan import chunks, selected_outputs, threads_for, work
from ntkexp.kernel.read.program_cache import input_signature
from ntkexp.kernel.read.reader import MAX_ASSEMBLED_BYTES, kernel_bytes
from ntkexp.kernel.read.sketched import (
    BatchedJacobian,
    SketchedKernel,
    batches,
    kernel_by_groups,
    remark,
    sketched_kernel,
)
from ntkexp.kernel.record.products import full_precision, refuse_rounded_products
from ntkexp.kernel.record.tape import as_inputs, examples, part
from ntkexp.library.module import (
    finite,
    is_plain,
    named,
    of_module,
    reader_of,
    refuse_unlike_outputs,
    warn_of,
)
from ntkexp.mistake import Mistake, in_short
from ntkexp.shapes import Inputs, Weights


def refuse_large(
    name: str,
    query: int,
    train: int,
    *,
    outputs: int,
    needed: float,
    choice: str = "outputs=[0]",
) -> None:
    """Raise if a result needs more bytes than the machine has.

    `choice` is the argument that chooses fewer outputs, for the message.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory_bytes:
        raise Mistake(
            f"the {name} of {query} × {train} examples with {outputs} outputs each takes "
            f"{needed / 1e9:.3g} GB, and this machine has {memory_bytes / 1e9:.3g}; choose fewer "
            f"outputs by {choice}, or let the module return fewer, such as the log-likelihood of "
            "a text"
        )


# --- The kernel from assembled Jacobians


OutputMode: TypeAlias = ChosenOutputs | Literal["diagonal"]
"""The entries [out, out_] of each block: all, the entries of some outputs, the trace,
or the diagonal."""

MODES = ("all", "trace", "diagonal")


def as_list(outputs: object) -> Any:
    """Convert an array or tensor of output indices to a list. Return other values
    unchanged.

    >>> as_list(torch.tensor([0, 3])), as_list("all")
    ([0, 3], 'all')
    """
    if isinstance(outputs, Tensor) and not is_plain(outputs):
        raise Mistake(
            "outputs= is nested, sparse, quantized or without numbers; give a list of outputs, "
            "such as [0, 3]"
        )
    return outputs.tolist() if isinstance(outputs, Tensor | np.ndarray) else outputs


@runtime_checkable
class JacobianSide(Protocol):
    """The left or right examples of a kernel, and their Jacobian for chosen outputs."""

    @property
    def examples(self) -> int: ...

    @property
    def tape(self) -> Tape:
        """The recorded forward pass of some examples."""
        ...

    def read(self, chosen: Sequence[int]) -> Jacobian: ...


def kernel(
    left: JacobianSide, right: JacobianSide, outputs: ChosenOutputs
) -> Float[Tensor, "query out train out_"]:
    """Return the kernel for all pairs of the chosen outputs, or its trace,
    computed in chunks of outputs."""
    count = left.tape.outputs.shape[1]
    chosen = selected_outputs(outputs, count)

    def jacobians(chosen: Sequence[int]) -> tuple[Jacobian, Jacobian]:
        left_jacobian = with_merged_uses(left.read(chosen))
        if left is right:
            return left_jacobian, left_jacobian
        return left_jacobian, with_merged_uses(right.read(chosen))

    sides = (left.examples, right.examples)
    with threads_for(work(left.tape).of_kernel(sides, len(chosen))):
        if outputs != "trace":
            return gram(*jacobians(chosen))
        # Σ_c J_c J_cᵀ, a chunk of outputs c at a time
        total: Tensor | None = None
        for chunk in chunks(left.tape, max(sides), count, left.read):
            chunk_trace = trace(*jacobians(chunk))
            total = chunk_trace if total is None else total + chunk_trace
        assert total is not None
        return total


def refuse_sides(left: JacobianSide, right: JacobianSide, outputs: OutputMode) -> None:
    """Raise if left and right have different numbers of outputs,
    or if the kernel exceeds the memory."""
    refuse_unlike_outputs(left.tape.outputs.shape[1], right.tape.outputs.shape[1])
    if outputs == "trace":
        return
    if outputs == "diagonal":
        count = left.tape.outputs.shape[1]
        block_numbers = count
    else:
        count = len(selected_outputs(outputs, left.tape.outputs.shape[1]))
        block_numbers = count**2
    pairs = left.examples * right.examples
    refuse_large(
        "kernel",
        left.examples,
        right.examples,
        outputs=count,
        needed=pairs * block_numbers * left.tape.outputs.element_size(),
        choice="outputs=[0], their sum by outputs='trace'",
    )


# --- The tangent kernel if assembled Jacobians exceed the memory


def tangent_in_chunks(
    reader: Reader,
    weights: Weights,
    x1: Inputs,
    x2: Inputs | None,
    chosen: Sequence[int],
) -> Float[Tensor, "query out train out_"] | None:
    """Return the kernel, computed from chunks of Jacobians.

    Return None if the assembled Jacobians fit into memory, or if an operation of the
    module has no rule for chunks."""
    left = BatchedJacobian(reader, weights, as_inputs(x1), chosen)
    train = left.examples if x2 is None else examples(as_inputs(x2))
    trained = sum(
        weight.nbytes for name, weight in weights.items() if name in reader.trained
    )
    if trained * len(chosen) * (left.examples + train) <= MAX_ASSEMBLED_BYTES:
        return None

    def probably_fits() -> bool:
        """Return True if the assembled Jacobians probably fit, judging by the first
        examples, or if they are the only way because an operation has no rule."""
        first_rows = (
            left.places[0] if len(left.places) > 1 else slice(0, min(2, left.examples))
        )
        try:
            first = left.jacobian(first_rows)
        except NoRule:
            return True
        return kernel_bytes(first, left.examples, train) <= MAX_ASSEMBLED_BYTES

    key = (
        input_signature(part(left.inputs, slice(0, 1))),
        left.examples,
        train,
        len(chosen),
        trained,
    )
    if reader.check_cache.fits.get(key, probably_fits):
        return None
    right = left
    if x2 is not None:
        right = BatchedJacobian(reader, weights, as_inputs(x2), chosen)
    return kernel_by_groups(left, right)


# --- The tangent kernel from sketches of Jacobians


def sketched_tangent(
    reader: Reader,
    weights: Weights,
    x1: Inputs,
    x2: Inputs | None,
    outputs: OutputMode,
    size: int,
    seed: int,
) -> SketchedKernel:
    """Return the estimate K̂ of the tangent kernel of the chosen outputs,
    from `size` random projections."""
    refuse_unfit_sketch(outputs, size, seed)
    inputs = as_inputs(x1)
    other_inputs = None if x2 is None else as_inputs(x2)
    recorded_outputs = reader.record(weights, part(inputs, slice(0, 2))).outputs
    chosen = selected_outputs(cast(ChosenOutputs, outputs), recorded_outputs.shape[1])
    query = train = examples(inputs)
    if other_inputs is not None:
        other_tape = reader.record(weights, part(other_inputs, slice(0, 2)))
        refuse_unlike_outputs(recorded_outputs.shape[1], other_tape.outputs.shape[1])
        train = examples(other_inputs)
    # the kernel and the sketches of both sides
    numbers = query * train * len(chosen) ** 2 + (query + train) * len(chosen) * size
    needed = numbers * recorded_outputs.element_size()
    refuse_large("sketched kernel", query, train, outputs=len(chosen), needed=needed)
    left = right = BatchedJacobian(reader, weights, inputs, chosen, any_module=True)
    if other_inputs is not None:
        right = BatchedJacobian(reader, weights, other_inputs, chosen, any_module=True)
    first = left.jacobian(left.places[0])
    sketch_remark = remark(first, query, 0 if x2 is None else train, size)
    if sketch_remark:
        warn(sketch_remark, stacklevel=4)
    trained = {
        name: weight for name, weight in weights.items() if name in reader.trained
    }
    sketched = sketched_kernel(left, right, trained, size, seed)
    return sketched._replace(kernel=finite(sketched.kernel))


def refuse_unfit_sketch(outputs: OutputMode, size: int, seed: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        raise Mistake(
            f"sketch={in_short(size)}: give the number of dimensions that gradients are projected "
            "to, such as 1024"
        )
    if (
        not isinstance(seed, int)
        or isinstance(seed, bool)
        or not -(2**63) <= seed < 2**63
    ):
        raise Mistake(f"seed={in_short(seed)}: give a whole number")
    if outputs in ("trace", "diagonal"):
        raise Mistake(
            f"outputs={in_short(outputs)}: it cannot be sketched; give 'all' or a list of "
            "outputs, or leave out sketch="
        )


# --- The public function


@overload
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: OutputMode = "all",
    casts: Casts = "keep",
    sketch: None = None,
) -> Float[Tensor, " query *kernel"]: ...


@overload
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: OutputMode = "all",
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
    outputs: OutputMode = "all",
    casts: Casts = "keep",
    sketch: int | None = None,
    seed: int = 0,
) -> Float[Tensor, " query *kernel"] | SketchedKernel:
    """Return the tangent kernel K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ, summed over the
    parameters that require gradients.

    Other libraries call it the empirical NTK. If the Jacobians exceed the memory, the
    kernel is computed in chunks of examples and parameters.

    Args:
        module: any module whose outputs for an example do not depend
            on the other examples.
        x1: a tensor, a tuple of tensors or a dict of keyword arguments. The first axis
            of each tensor counts examples.
        x2: other examples. By default, the examples of x1.
        weights: replaces some or all parameters of the module, by name.
        output: the name or index of a tensor, if the module returns several. Its axes
            after the first are flattened to C outputs.
        outputs: "all", a list of indices, "trace" for Σ_c K[x, c, x′, c] as [n1, 1, n2,
            1], or "diagonal" for K[x, c, x′, c] as [n1, n2, C].
        casts: "ignore" skips casts to dtypes of lower precision than the weights. With
            "keep", a warning states the rounding error if the module contains such
            casts.
        sketch: the number k of random projections of the gradients, for many examples
            and a large module. Sketches suit kernel change, spectra and alignment, but
            not single entries.
        seed: the seed of the projection.

    Returns:
        The kernel, [n1, C, n2, C]. With `sketch`, a pair: an unbiased estimate K̂, and an error bar.
        ‖K̂ − K‖_F exceeds the error bar with probability 1 %, and decreases like 1/√k.

    Raises:
        Mistake: if the module is random, couples the examples of a batch, or needs more
            memory than the machine has.

    >>> import torch
    >>> layer, x = torch.nn.Linear(50, 1).double(), torch.eye(9, 50).double()
    >>> kernel, error_bar = tangent_kernel(layer, x, sketch=4096)
    >>> bool((kernel - tangent_kernel(layer, x)).norm() < error_bar)
    True
    """
    reader, module_weights = reader_of(module, output, casts)
    all_weights = module_weights | named(module, weights, "weights")
    refuse_rounded_products(all_weights)
    outputs = as_list(outputs)
    if isinstance(outputs, str) and outputs not in MODES:
        raise Mistake(
            f"outputs={in_short(outputs)}: give {', '.join(map(repr, MODES))} or a list of "
            "outputs, such as [0, 3]"
        )
    if sketch is not None:
        tape = reader.record(all_weights, part(as_inputs(x1), slice(0, 2)))
        warn_of(module, output, tape, casts)
        return sketched_tangent(reader, all_weights, x1, x2, outputs, sketch, seed)
    left = batches(reader, all_weights, x1)
    warn_of(module, output, left.tape, casts)
    right = left if x2 is None else batches(reader, all_weights, x2)
    refuse_sides(left, right, outputs)

    def read(part_of_outputs: ChosenOutputs) -> Float[Tensor, "query out train out_"]:
        if part_of_outputs != "trace":
            kernel_in_chunks = tangent_in_chunks(
                reader,
                all_weights,
                x1,
                x2,
                selected_outputs(part_of_outputs, left.tape.outputs.shape[1]),
            )
            if kernel_in_chunks is not None:
                return kernel_in_chunks
        return kernel(left, right, part_of_outputs)

    # one output at a time, so that no other entries are computed
    if outputs == "diagonal":
        output_count = left.tape.outputs.shape[1]
        by_output = [read([output])[:, 0, :, 0] for output in range(output_count)]
        return finite(torch.stack(by_output, 2))
    return finite(read(outputs))
