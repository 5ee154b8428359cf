"""Checks and conversions of the arguments of library functions: modules,
inputs and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar
from warnings import catch_warnings, warn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from ntkexp.kernel import Casts, Reader, Tape, columns
from ntkexp.kernel.read.checks import CheckCache
from ntkexp.kernel.record.casts import remark, with_casts
from ntkexp.kernel.record.program import same
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors, tensors
from ntkexp.kernel.record.taping import is_out_of_memory
from ntkexp.mistake import Mistake, first_line, nearest
from ntkexp.model.functional import (
    BATCH_AXIS,
    batch_axis_missing,
    function_of,
    hooked_parameters,
)
from ntkexp.shapes import Inputs, Weights

MIN_WEIGHT_BITS = 32  # a kernel of weights with fewer bits is mostly rounding
CHECK_CACHES: WeakKeyDictionary[nn.Module, dict[frozenset[str], CheckCache]] = (
    WeakKeyDictionary()
)
"""For each module in use: the stored results of checks, by the names of the module's
trained parameters."""


P = ParamSpec("P")
R = TypeVar("R")
INPUTS = ("x1", "x2", "queries", "train")
"""Names of the arguments that hold inputs of the module."""


def of_module(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a user's module and inputs with checks of its arguments.

    If the function raises an error, call the module alone on the inputs. If this also
    fails, raise the error of the module."""
    parameters = signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = parameters.bind(*args, **kwargs).arguments
        module = arguments["module"]
        refuse_uncallable(module)
        # hooks on weights act only in `backward`, which kernels do not call
        hook = next(hooked_parameters(module), None)
        if hook is not None:
            warn(
                f"the parameter '{hook}' has a hook, which kernels ignore: they use the "
                "derivative, and training uses the gradient that the hook returns",
                stacklevel=2,
            )
        inputs = {name: arguments[name] for name in INPUTS if name in arguments}
        if inputs.get("x2", ...) is None:
            del inputs["x2"]
        for name, value in inputs.items():
            refuse_unfit(value, name)
        if len(inputs) == 2:
            (left_name, left), (right_name, right) = inputs.items()
            refuse_unlike(left_name, left, right_name, right)
        try:
            return function(*args, **kwargs)
        except Mistake:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                refuse_failing(module, arguments.get("output"), inputs)
            raise

    return checked


# --- Checks.


def refuse_uncallable(module: object) -> None:
    """Raise unless the module is an `nn.Module` that can be called
    with different weights."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise Mistake(f"the module is a {kind}; give a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
        raise Mistake(
            f"the module is a {kind}, which cannot be called with other weights; give the one "
            "inside it"
        )


def is_plain(tensor: Tensor) -> bool:
    """Return True for a plain tensor: one that is not nested, sparse, quantized or on
    the meta device."""
    return not (
        tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
    )


def as_tensor(array: np.ndarray[Any, Any], name: str) -> Tensor:
    """Convert an array of numbers to a tensor. Raise for other arrays."""
    if array.dtype.kind not in "biuf":
        raise Mistake(f"{name} is an array of {array.dtype}; give one of numbers")
    # torch takes neither negative strides, as of x[::-1], nor a foreign byte order
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    # torch warns of read-only arrays, such as those of pandas; nothing is written here
    with catch_warnings(action="ignore"):
        return torch.as_tensor(native)


def refuse_unfit(inputs: object, name: str) -> None:
    """Raise if there is no example, or if a tensor
    of the inputs is not a plain array of numbers.

    >>> refuse_unfit(torch.ones(0, 3), "x1")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: x1: there is no example; give at least one
    """
    if isinstance(inputs, Tensor) and is_plain(inputs) and inputs.dim() and len(inputs):
        return
    try:
        leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
        if not all(is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            raise Mistake(
                "there is a tensor that is nested, sparse, quantized or without numbers; give a "
                "plain one"
            )
        if not examples(as_inputs(inputs)):
            raise Mistake("there is no example; give at least one")
    except Mistake as mistake:
        raise Mistake(f"{name}: {mistake}") from None


def refuse_unlike(left_name: str, left: Inputs, right_name: str, right: Inputs) -> None:
    """Raise if the left and right inputs of a kernel have different numbers of axes.

    A module may treat inputs with different numbers of axes differently. The lengths of
    axes may differ.
    """
    sides = [tensors(as_inputs(inputs)) for inputs in (left, right)]
    axes = [[tensor.dim() for tensor in inputs] for inputs in sides]
    if axes[0] != axes[1]:
        shapes = [
            ", ".join(str(list(tensor.shape)) for tensor in inputs) for inputs in sides
        ]
        raise Mistake(
            f"{left_name} has the shape {shapes[0]} and {right_name} {shapes[1]}; give both the "
            "same number of axes"
        )


def refuse_unlike_outputs(left: int, right: int) -> None:
    """Raise if a module gives different numbers of outputs for the left
    and right inputs of a kernel."""
    if left != right:
        raise Mistake(
            f"the module returns {left} outputs for an example on one side of the "
            f"kernel and {right} on the other; give inputs of one shape"
        )


def refuse_failing(
    module: nn.Module, output: str | int | None, inputs: Mapping[str, Inputs]
) -> None:
    """Raise if the module fails on the inputs, or cannot be differentiated there."""
    for name, weight in module.named_parameters():
        if isinstance(weight, UninitializedParameter) or weight.is_meta:
            raise Mistake(
                f"the parameter '{name}' has no values yet; give a module that was "
                "initialised"
            )
    function = function_of(module, output)
    for name, values in inputs.items():
        weights = {
            key: weight.detach().requires_grad_(weight.requires_grad)
            for key, weight in module.named_parameters()
        }
        trained = [weight for weight in weights.values() if weight.requires_grad]
        try:
            outputs = columns(
                function, weights, map_tensors(torch.clone, as_inputs(values))
            )
        except Mistake:
            raise
        except Exception as error:
            advice = ""
            if batch_axis_missing(function, weights, values):
                advice = f"; {BATCH_AXIS}"
            raise Mistake(
                f"{name}: the module does not take them: {first_line(error)}{advice}"
            ) from error
        try:
            torch.autograd.grad(outputs.sum(), trained, allow_unused=True)
        except Exception as error:
            raise Mistake(
                f"{name}: the module cannot be differentiated there: {first_line(error)}"
            ) from error


def finite(kernel: Float[Tensor, " query *kernel"]) -> Float[Tensor, " query *kernel"]:
    """Return the kernel, or raise if an entry is not finite."""
    if not kernel.sum().isfinite() and not kernel.isfinite().all():
        raise Mistake(
            "the kernel has entries that are not finite, because outputs of the module or their "
            "gradients are not finite"
        )
    return kernel


# --- Build readers of Jacobians, together with the module's weights


def reader_of(
    module: nn.Module, output: str | int | None = None, casts: Casts = "keep"
) -> tuple[Reader, Weights]:
    """Return a reader of the module's Jacobians, and all parameters, detached."""
    parameters = dict(module.named_parameters())
    trained = frozenset(
        name for name, weight in parameters.items() if weight.requires_grad
    )
    if not trained:
        raise Mistake(
            "no parameter of the module requires gradients, so it has no tangent kernel"
        )
    weights = {name: weight.detach() for name, weight in parameters.items()}
    refuse_short({name: weights[name] for name in trained})
    check_cache = CHECK_CACHES.setdefault(module, {}).setdefault(trained, CheckCache())
    function = with_casts(function_of(module, output), casts)
    return Reader(function, trained, check_cache), weights


def refuse_short(weights: Weights) -> None:
    """Raise if trained weights have less than 32 bits. The kernel of such weights is
    mostly rounding, and may overflow.

    >>> refuse_short({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float16)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the parameter 'b' is in float16, and kernels do not include its rounding; give \
module.float()
    """
    for name in sorted(weights):
        dtype = weights[name].dtype
        if dtype.is_floating_point and torch.finfo(dtype).bits < MIN_WEIGHT_BITS:
            kind = str(dtype).removeprefix("torch.")
            raise Mistake(
                f"the parameter '{name}' is in {kind}, and kernels do not include its "
                "rounding; give module.float()"
            )


def named(
    module: nn.Module, weights: Mapping[str, Tensor] | None, argument: str
) -> Weights:
    """Return the parameters in a mapping of tensors, each under its first name.
    Ignore buffers. If the mapping is None, there are no parameters.

    A shared parameter may be given under any of its names. It may be given under
    several names if the tensors are equal."""
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise Mistake(
            f"{argument} is a {type(weights).__name__}; give a mapping of tensors by the names of "
            "parameters"
        )
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    # first name of a parameter ↦ the name that the user gave
    tied_names: dict[str, str] = {}
    for name, weight in weights.items():
        if name not in parameters:
            if name not in buffers:
                raise Mistake(
                    f"{argument}['{name}']: the module has no such "
                    f"parameter{nearest(str(name), parameters)}"
                )
            continue
        refuse_unfit_weight(weight, parameters[name], f"{argument}['{name}']")
        tied_name = tied_names.setdefault(first_names[parameters[name]], name)
        other = weights[tied_name]
        if weight.dtype != other.dtype or not same(weight, other):
            raise Mistake(
                f"{argument}['{tied_name}'] and {argument}['{name}'] are the same "
                "parameter of the module, but they differ; give only one of them"
            )
    return {name: weights[tied_name].detach() for name, tied_name in tied_names.items()}


def refuse_unfit_weight(weight: object, parameter: Tensor, name: str) -> None:
    """Raise unless the weight is a plain tensor of the parameter's shape."""
    if not isinstance(weight, Tensor):
        raise Mistake(f"{name} is a {type(weight).__name__}; give a tensor")
    if not is_plain(weight):
        raise Mistake(
            f"{name} is nested, sparse, quantized or without numbers; give a plain one"
        )
    if weight.shape != parameter.shape:
        raise Mistake(
            f"{name} has shape {list(weight.shape)}; the module's has {list(parameter.shape)}"
        )


def warn_of(
    module: nn.Module, output: str | int | None, tape: Tape, casts: Casts
) -> None:
    """Warn if casts inside the module cause rounding errors."""
    cost = remark(function_of(module, output), tape, casts)
    if cost is not None:
        warn(cost, stacklevel=5)
