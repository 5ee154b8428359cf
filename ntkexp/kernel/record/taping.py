"""Run a function of weights once under a recorder, so that the recorded operations have
difference rules and overwrite nothing.

A module that writes nothing in place and reads no numbers from tensors is recorded as
it runs. Any other module runs again under torch's `functionalize`, which replaces its
writes by operations that return new tensors. If numbers leave torch as lists or arrays,
`functionalize` fails, and the recorder replaces the writes. If torch runs a recurrent
layer as one fused operation, the layer runs again as separate operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ntkexp.capacity import MemoryBudget
from ntkexp.kernel.record.recorder import (
    DispatchMode,
    NotPure,
    PureOnly,
    ReadRecorder,
    Recorder,
)
from ntkexp.kernel.record.tape import Tape, as_inputs, examples, map_tensors, tensors
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs, Weights

aten = torch.ops.aten

CELLS = (
    aten._cudnn_rnn.default,
    aten._thnn_fused_lstm_cell.default,
    aten._thnn_fused_gru_cell.default,
)
FUSED = (aten.mkldnn_rnn_layer.default, *CELLS)
"""Fused operations without a difference rule: recurrent layers,
and recurrent cells on GPUs."""


def columns(function: Function, weights: Weights, inputs: Inputs) -> Tensor:
    """Return the function's outputs as a matrix with one row for each example. Raise
    Mistake if the outputs have another form, or are not floating-point numbers."""
    outputs = function(weights, inputs)
    count = examples(inputs)
    if outputs.is_complex():
        raise Mistake(
            "the module returns complex outputs; let it return real and imaginary "
            "parts, by torch.view_as_real"
        )
    if outputs.dim() == 0 or len(outputs) != count:
        raise Mistake(
            f"the module returns outputs of shape {list(outputs.shape)} for {count} "
            "examples; their first axis must be the axis of examples"
        )
    if not outputs.is_floating_point():
        raise Mistake(
            f"the module returns outputs of {outputs.dtype}, which have no gradients; "
            "let it return floating-point numbers"
        )
    if not outputs.numel() and count:
        raise Mistake(
            f"the module returns outputs of shape {list(outputs.shape)}, which have no elements"
        )
    if outputs.dim() == 1:
        return outputs[:, None]
    return outputs.flatten(1)


def record(
    function: Function,
    weights: Weights,
    inputs: Inputs,
    *,
    differentiable: bool = False,
    repeats_random: bool = False,
    whole_batch: bool = False,
) -> Tape:
    """Run the function once and return its tape,
    with autograd's graph if `differentiable`.

    A function may draw random numbers only if `repeats_random` is set. This promises
    that it draws the same numbers every time it runs on a batch. With `whole_batch`,
    the function never runs on a part of its batch."""
    for name, weight in weights.items():
        if weight.is_complex():
            raise Mistake(
                f"the parameter '{name}' is complex, but kernels sum over real "
                "parameters; let the module hold its real and imaginary parts, and "
                "combine them by torch.view_as_complex"
            )

    taping = Taping(
        weights=weights,
        inputs=as_inputs(inputs),
        differentiable=differentiable,
        repeats_random=repeats_random,
        whole_batch=whole_batch,
    )
    run = partial(columns, function)
    tape = taping.pure_program(run)
    operations = {entry.op for entry in tape.entries}
    if operations.isdisjoint(FUSED):
        return tape
    with unfused(), nullcontext() if operations.isdisjoint(CELLS) else composed():
        return taping.pure_program(run)


@dataclass(frozen=True, kw_only=True)
class Taping:
    """The arguments with which `record` records a function."""

    weights: Weights
    inputs: Inputs
    differentiable: bool
    repeats_random: bool
    whole_batch: bool

    def pure_program(self, run: Callable[[Weights, Inputs], Tensor]) -> Tape:
        """Record the function as operations that overwrite nothing."""
        # first try to record the module unchanged: it may write nothing in place, and
        # read no numbers
        with suppress(NotPure), PureOnly():
            return self.tape(run, rewrites=False)
        # `functionalize` replaces writes in place by operations that return new
        # tensors. It fails for a custom autograd.Function, and if numbers leave torch
        # as a list or an array
        try:
            with ReadRecorder(in_memory=False):
                return self.tape(torch.func.functionalize(run), rewrites=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            with ReadRecorder(in_memory=True):
                return self.tape(run, rewrites=True)

    def tape(self, run: Callable[[Weights, Inputs], Tensor], *, rewrites: bool) -> Tape:
        """Run a function once under a `Recorder` with the option `rewrites`."""
        leaves = {
            name: weight.detach().requires_grad_(self.differentiable)
            for name, weight in self.weights.items()
        }
        # copies, in case the module overwrites its inputs
        inputs = map_tensors(torch.clone, self.inputs)
        versions = [tensor._version for tensor in tensors(inputs)]
        with (
            torch.set_grad_enabled(self.differentiable),
            plain_kernels(),
            Recorder(rewrites=rewrites, repeats_random=self.repeats_random) as recorder,
        ):
            named = {recorder.slot(weight): name for name, weight in leaves.items()}
            arguments = tree_map(recorder.slot, inputs)
            output = recorder.slot(run(leaves, inputs))
            if versions != [tensor._version for tensor in tensors(inputs)]:
                raise Mistake(
                    "the module overwrites its inputs; let it work on a copy, such as x = x.clone()"
                )
            return Tape(
                entries=tuple(recorder.entries),
                values=tuple(recorder.values),
                weights=named,
                arguments=arguments,
                output=output,
                overwrites=bool(recorder.flats),
                drawn=tuple(recorder.drawn),
                whole_batch=self.whole_batch,
            )


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside the context, run attention and encoders by operations with difference
    rules, not by fused operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def unfused() -> Iterator[None]:
    """Inside the context, run recurrent layers by operations with difference rules. For
    other layers, this would be slower and less accurate."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with warnings.catch_warnings():
            # suppress torch's warning about TF32, which its own default causes
            warnings.filterwarnings("ignore", message=".*TF32", category=UserWarning)
            with torch.backends.mkldnn.flags(enabled=False, allow_tf32=False):
                yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def composed() -> Iterator[None]:
    """Inside the context, run composite operations by torch's Python code. Without
    this, a GPU runs each recurrent cell as one fused operation, even if cuDNN is
    disabled."""
    from torch._dispatch.python import enable_python_dispatcher  # noqa: PLC0415  it takes half a second to load

    with enable_python_dispatcher():
        yield


# If one way to compute a kernel fails, another way is tried. But if memory runs out, the
# error must reach the user, because results must not depend on the memory that other
# programs take.


OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception of Python or torch reports a lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), is_out_of_memory(MemoryError())
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    has_sign = any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
    return isinstance(error, RuntimeError) and has_sign


class MemoryLimit(DispatchMode):
    """A mode that limits the total bytes of new arrays. It adds up the sizes of arrays
    before torch allocates them.

    For the error message, `what` names the arrays, and `remedy` names the setting that
    makes them smaller. `copies` is the number of such arrays that will exist in the
    end.

    >>> with MemoryLimit(MemoryBudget.of_gb(1), "the data", "examples"):  # doctest: +ELLIPSIS
    ...     numbers = torch.zeros(10**6, 10**6)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: memory_gb=1 is less than the 4.04e+03 GB of the data with an array of [1000000, 1000000]...
    """

    def __init__(
        self, budget: MemoryBudget, what: str, remedy: str, copies: float = 1.0
    ) -> None:
        super().__init__()
        self.budget = budget
        self.what = what
        self.remedy = remedy
        self.copies = copies
        self.taken = 0.0  # bytes of new arrays so far

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        size = size_of_new_array(func, args)
        if size is not None:
            kind = named.get("dtype") or torch.get_default_dtype()
            self.taken += self.copies * prod(size) * kind.itemsize
            what = f"{self.what} with an array of {size}"
            self.budget.require(self.taken, what, f"lower {self.remedy}")
        return func(*args, **named)


def size_of_new_array(func: Any, args: Any) -> list[int] | None:
    """Return the shape of the array that an operation allocates. Return None for arrays
    that are computed from other tensors."""
    names = [argument.name for argument in func._schema.arguments]
    if "device" not in names or any(isinstance(value, Tensor) for value in args):
        return None
    values = dict(zip(names, args, strict=False))
    if "size" in values:
        return list(values["size"])
    length = values.get("n", values.get("end"))  # arguments of randperm and arange
    return None if length is None else [max(0, int(length))]
