"""The tangent kernel of any module: by points, in blocks of outputs, by chunks of parameters, or from sketches.

A kernel that this machine cannot hold is refused before anything of it is computed.

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

from ntkexp.kernel import Casts, Jacobian, NoRule, Outputs, Reader, Tape, gram
from ntkexp.kernel.features.gram import trace
from ntkexp.kernel.features.jacobian import in_few_uses
from ntkexp.kernel.read.plan import chunks, threads_for, wanted, work
from ntkexp.kernel.read.program_cache import outline
from ntkexp.kernel.read.reader import FITS, fits
from ntkexp.kernel.read.sketched import (
    InTurns,
    SketchedKernel,
    batches,
    kernel_in_turns,
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
    what: str, probe: int, train: int, *, outputs: int, needed: float, choice: str = "outputs=[0]"
) -> None:
    """Refuse what takes more bytes than the machine has; fewer outputs are had by a `choice`."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise Mistake(
            f"the {what} of {probe} × {train} examples with {outputs} outputs each takes {needed / 1e9:.3g} GB, and "
            f"this machine has {room / 1e9:.3g}; choose some by {choice}, or have the module give fewer, such "
            "as the log-likelihood of a text"
        )


# --- The kernel of assembled Jacobians, which are read for some outputs at a time.


OutputMode: TypeAlias = Outputs | Literal["diagonal"]
"""Which entries [out, out_] of a kernel's blocks: all, some, their trace, or K[x, c, x′, c] for each output c."""

MODES = ("all", "trace", "diagonal")


def listed(outputs: object) -> Any:
    """Outputs that are given as an array or a tensor, as a list; other choices as they are.

    >>> listed(torch.tensor([0, 3])), listed("all")
    ([0, 3], 'all')
    """
    if isinstance(outputs, Tensor) and not is_plain(outputs):
        raise Mistake(
            "outputs= is nested, sparse, quantized or without numbers; give a list of outputs, such as [0, 3]"
        )
    return outputs.tolist() if isinstance(outputs, Tensor | np.ndarray) else outputs


MANY = 10**8  # numbers, from which on the cost is estimated first


@runtime_checkable
class JacobianSide(Protocol):
    """One side of a kernel: its examples, and the Jacobian of all of them at some outputs."""

    @property
    def examples(self) -> int: ...

    @property
    def tape(self) -> Tape:
        """Of some of the examples."""
        ...

    def read(self, chosen: Sequence[int]) -> Jacobian: ...


def kernel(
    left: JacobianSide, right: JacobianSide, outputs: Outputs
) -> Float[Tensor, "probe out train out_"]:
    """The kernel of all pairs of the outputs that are wanted, or its trace, a few outputs at a time."""
    count = left.tape.outputs.shape[1]
    chosen = wanted(outputs, count)

    def both(
        chosen: Sequence[int],
    ) -> tuple[Jacobian, Jacobian]:  # those of the same side are read once
        one = in_few_uses(left.read(chosen))
        return one, one if left is right else in_few_uses(right.read(chosen))

    with threads_for(work(left.tape).of_kernel((left.examples, right.examples), len(chosen))):
        if outputs != "trace":
            return gram(*both(chosen))
        total: Tensor | None = None
        for chunk in chunks(left.tape, max(left.examples, right.examples), count, left.read):
            share = trace(*both(chunk))
            total = share if total is None else total + share
        assert total is not None
        return total


def refuse_sides(left: JacobianSide, right: JacobianSide, outputs: OutputMode) -> None:
    """Refuse sides of different outputs, and blocks that do not fit into the machine's memory."""
    refuse_unlike_outputs(left.tape.outputs.shape[1], right.tape.outputs.shape[1])
    if outputs == "trace":
        return
    if outputs == "diagonal":
        count = left.tape.outputs.shape[1]
        numbers = left.examples * right.examples * count
    else:
        count = len(wanted(outputs, left.tape.outputs.shape[1]))
        numbers = left.examples * right.examples * count**2
    if numbers > MANY:
        choice, needed = (
            "outputs=[0], their sum by outputs='trace'",
            numbers * left.tape.outputs.element_size(),
        )
        refuse_large(
            "kernel", left.examples, right.examples, outputs=count, needed=needed, choice=choice
        )


# --- The tangent kernel of a module whose assembled Jacobian would not fit.


def tangent_in_turns(
    reader: Reader, weights: Weights, x1: Inputs, x2: Inputs | None, chosen: Sequence[int]
) -> Float[Tensor, "probe out train out_"] | None:
    """The kernel, or None where Jacobians fit assembled, or no rules lead through the module."""
    one = InTurns(reader, weights, as_inputs(x1), chosen)
    train = one.examples if x2 is None else examples(as_inputs(x2))
    trained = sum(weight.nbytes for name, weight in weights.items() if name in reader.trained)
    if trained * len(chosen) * (one.examples + train) <= FITS:
        return None

    def looks_small() -> bool:
        """By the first examples; where no rules lead through the module, nothing else is known."""
        few = one.places[0] if len(one.places) > 1 else slice(0, min(2, one.examples))
        try:
            return fits(one.jacobian(few), one.examples, train)
        except NoRule:
            return True

    question = outline(part(one.inputs, slice(0, 1))), one.examples, train, len(chosen), trained
    if reader.findings.fits.to(question, looks_small):
        return None
    return kernel_in_turns(
        one, one if x2 is None else InTurns(reader, weights, as_inputs(x2), chosen)
    )


# --- The tangent kernel of any module from sketches of its Jacobian.


def sketched_tangent(
    reader: Reader,
    weights: Weights,
    x1: Inputs,
    x2: Inputs | None,
    outputs: OutputMode,
    size: int,
    seed: int,
) -> SketchedKernel:
    """K̂ of the chosen outputs, from a sketch of `size` dimensions."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        raise Mistake(
            f"sketch={in_short(size)}: give the number of dimensions that gradients are projected to, such as 1024"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise Mistake(f"seed={in_short(seed)}: give a whole number")
    if outputs in ("trace", "diagonal"):
        raise Mistake(
            f"outputs={in_short(outputs)}: it is not sketched; give 'all' or a list of outputs, or leave out sketch="
        )
    some = reader.record(weights, part(as_inputs(x1), slice(0, 2))).outputs
    chosen = wanted(cast(Outputs, outputs), some.shape[1])
    if x2 is not None:
        refuse_unlike_outputs(
            some.shape[1], reader.record(weights, part(as_inputs(x2), slice(0, 2))).outputs.shape[1]
        )
    probe, train = (examples(as_inputs(x1 if each is None else each)) for each in (x1, x2))
    needed = (
        some.element_size() * len(chosen) * (probe * train * len(chosen) + (probe + train) * size)
    )
    refuse_large("sketched kernel", probe, train, outputs=len(chosen), needed=needed)
    left = InTurns(reader, weights, as_inputs(x1), chosen, any_module=True)
    right = left if x2 is None else InTurns(reader, weights, as_inputs(x2), chosen, any_module=True)
    if why := remark(left.jacobian(left.places[0]), probe, 0 if x2 is None else train, size):
        warn(why, stacklevel=4)
    trained = {name: weight for name, weight in weights.items() if name in reader.trained}
    found = sketched_kernel(left, right, trained, size, seed)
    return found._replace(kernel=finite(found.kernel))


# --- The tangent kernel of any module.


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
) -> Float[Tensor, "probe *kernel"]: ...


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
) -> Float[Tensor, "probe *kernel"] | SketchedKernel:
    """K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ, summed over the parameters that require gradients.

    Inputs are a tensor, a tuple of tensors or a dict of keyword arguments, each tensor with the examples along its
    first axis. `weights` may name some or all parameters; the others are the module's own. Of a module that gives
    several tensors, `output` names the one that is read. Its axes but the first are flattened, and `outputs` chooses
    among them: "all", a list of places, "trace" for Σ_c K[x, c, x′, c] as [n1, 1, n2, 1], however many there are, or
    "diagonal" for each K[x, c, x′, c] as [n1, n2, C].
    `casts="ignore"` leaves out what the module casts to shorter numbers than its weights. A warning says what casts
    cost, kept or left out.

    Gradients that would not fit are read some examples at a time, and multiplied out a chunk of a parameter at a time.
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
    refuse_rounded_products(place)
    outputs = listed(outputs)
    if isinstance(outputs, str) and outputs not in MODES:
        raise Mistake(
            f"outputs={in_short(outputs)}: give {', '.join(map(repr, MODES))} or a list of outputs, such as [0, 3]"
        )
    if sketch is not None:
        warn_of(module, output, reader.record(place, part(as_inputs(x1), slice(0, 2))), casts)
        return sketched_tangent(reader, place, x1, x2, outputs, sketch, seed)
    left = batches(reader, place, x1)
    warn_of(module, output, left.tape, casts)
    right = left if x2 is None else batches(reader, place, x2)
    refuse_sides(left, right, outputs)

    def read(some: Outputs) -> Float[Tensor, "probe out train out_"]:
        if some != "trace":
            found = tangent_in_turns(
                reader, place, x1, x2, wanted(some, left.tape.outputs.shape[1])
            )
            if found is not None:
                return found
        return kernel(left, right, some)

    if outputs == "diagonal":  # one output after the other, so that no block of outputs is formed
        return finite(
            torch.stack([read([c])[:, 0, :, 0] for c in range(left.tape.outputs.shape[1])], 2)
        )
    return finite(read(outputs))
