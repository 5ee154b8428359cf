"""What users give: a module, and tensors by the names of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_flatten

from ntkexp.kernel import Casts, Reader, Tape, columns
from ntkexp.kernel.read.checks import Findings
from ntkexp.kernel.record.casts import remark, with_casts
from ntkexp.kernel.record.program import same
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors, tensors
from ntkexp.kernel.record.taping import is_out_of_memory
from ntkexp.mistake import Mistake, first_line, nearest
from ntkexp.model.functional import BATCH_AXIS, batch_axis_missing, function_of, hooked
from ntkexp.shapes import Inputs, Weights

SHORTEST = 32  # bits of numbers
FINDINGS: WeakKeyDictionary[nn.Module, dict[frozenset[str], Findings]] = WeakKeyDictionary()
"""What is known of each module that is still alive, by what it trains."""


P = ParamSpec("P")
R = TypeVar("R")
INPUTS = ("x1", "x2", "probes", "train")
"""What arguments are called that hold inputs."""


def of_module(function: Callable[P, R]) -> Callable[P, R]:
    """A function of a user's module and inputs: these are looked at first, and where it fails because the module does,
    that is a mistake of one line.
    """
    order = signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = order.bind(*args, **kwargs).arguments
        module = given["module"]
        # What is not a module, or cannot be called with other weights
        if not isinstance(module, nn.Module):
            raise Mistake(f"the module is a {type(module).__name__}; give a torch.nn.Module")
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
            kind = type(module).__name__
            raise Mistake(
                f"the module is a {kind}, which cannot be called with other weights; give the one inside it"
            )
        # A kernel is of the function: backward alone calls hooks, and many only watch
        if (hook := next(hooked(module), None)) is not None:
            warn(
                f"the parameter '{hook}' has a hook, which kernels leave out: they are of the derivative, and if the "
                "hook changes the gradient, training takes another",
                stacklevel=2,
            )
        inputs = {
            name: given[name]
            for name in INPUTS
            if name in given and (name != "x2" or given[name] is not None)
        }
        for name, value in inputs.items():
            refuse_unfit(value, name)
        if len(inputs) == 2:
            (one, left), (other, right) = inputs.items()
            refuse_unlike(one, left, other, right)
        try:
            return function(*args, **kwargs)
        except Mistake:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                refuse_failing(module, given.get("output"), inputs)
            raise

    return checked


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an array of numbers."""
    return not (
        tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
    )


def refuse_unfit(inputs: object, name: str) -> None:
    """Refuse inputs without examples, or of tensors that are no plain arrays of numbers.

    >>> refuse_unfit(torch.ones(0, 3), "x1")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: x1: there is no example; give at least one
    """
    if isinstance(inputs, Tensor) and is_plain(inputs) and inputs.dim() and len(inputs):
        return
    try:
        leaves = tree_flatten(dict(inputs) if isinstance(inputs, Mapping) else inputs)[0]
        if not all(is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            raise Mistake(
                "there is a tensor that is nested, sparse, quantized or without numbers; give a plain one"
            )
        if not examples(as_inputs(inputs)):
            raise Mistake("there is no example; give at least one")
    except Mistake as mistake:
        raise Mistake(f"{name}: {mistake}") from None


def refuse_unlike(one: str, inputs: Inputs, other: str, others: Inputs) -> None:
    """Refuse two sides of a kernel whose examples have other numbers of axes, by which a module may do something else;
    how long they are is the module's business."""
    left, right = tensors(as_inputs(inputs)), tensors(as_inputs(others))
    if [each.dim() for each in left] != [each.dim() for each in right]:
        shapes = [", ".join(str(list(each.shape)) for each in side) for side in (left, right)]
        raise Mistake(
            f"{one} has the shape {shapes[0]} and {other} {shapes[1]}; give both as many axes"
        )


def refuse_unlike_outputs(left: int, right: int) -> None:
    """Refuse two sides of a kernel for which a module gives as many outputs as it does not for the other."""
    if left != right:
        raise Mistake(
            f"the module gives {left} outputs for an example on one side of the kernel and {right} on the other; give "
            "inputs of one shape, or let the module give as many outputs for all"
        )


def refuse_failing(
    module: nn.Module, output: str | int | None, inputs: Mapping[str, Inputs]
) -> None:
    """Refuse a module that fails by itself on these inputs, or cannot be differentiated there."""
    for name, weight in module.named_parameters():
        if isinstance(weight, UninitializedParameter) or weight.is_meta:
            raise Mistake(
                f"the parameter '{name}' holds no numbers yet; give a module that was initialised"
            )
    for name, given in inputs.items():
        weights = {
            key: weight.detach().requires_grad_(weight.requires_grad)
            for key, weight in module.named_parameters()
        }
        trained = [weight for weight in weights.values() if weight.requires_grad]
        try:
            found = columns(
                function_of(module, output), weights, map_tensors(torch.clone, as_inputs(given))
            )
        except Mistake:
            raise
        except Exception as error:
            advice = (
                f"; {BATCH_AXIS}"
                if batch_axis_missing(function_of(module, output), weights, given)
                else ""
            )
            raise Mistake(
                f"{name}: the module does not take them: {first_line(error)}{advice}"
            ) from error
        try:
            torch.autograd.grad(found.sum(), trained, allow_unused=True)
        except Exception as error:
            raise Mistake(
                f"{name}: the module cannot be differentiated there: {first_line(error)}"
            ) from error


def finite(kernel: Float[Tensor, "probe *kernel"]) -> Float[Tensor, "probe *kernel"]:
    """The same kernel, if all its entries are finite; a sum is quick, and not finite if one of them is not."""
    if not kernel.sum().isfinite() and not kernel.isfinite().all():
        raise Mistake(
            "the kernel has entries that are not finite: outputs of the module or their gradients are not"
        )
    return kernel


def reader_of(
    module: nn.Module, output: str | int | None = None, casts: Casts = "keep"
) -> tuple[Reader, Weights]:
    """A reader of the module, and all its parameters."""
    own = {name: weight.detach() for name, weight in module.named_parameters()}
    trained = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad)
    if not trained:
        raise Mistake("no parameter of the module requires gradients, so it has no tangent kernel")
    refuse_short({name: own[name] for name in trained})
    findings = FINDINGS.setdefault(module, {}).setdefault(trained, Findings())
    return Reader(with_casts(function_of(module, output), casts), trained, findings), own


def refuse_short(weights: Weights) -> None:
    """Refuse weights in numbers so short that a kernel of them is mostly rounding, and may be infinite.

    >>> refuse_short({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float16)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the parameter 'b' is in float16, whose rounding no kernel includes; give module.float()
    """
    for name in sorted(weights):
        if (kind := weights[name].dtype).is_floating_point and torch.finfo(kind).bits < SHORTEST:
            kind_name = str(kind).removeprefix("torch.")
            said = f"the parameter '{name}' is in {kind_name}, whose rounding no kernel includes"
            raise Mistake(f"{said}; give module.float()")


def named(module: nn.Module, weights: Mapping[str, Tensor], argument: str) -> Weights:
    """The tensors of a mapping that are parameters; buffers in it are the module's business.

    A parameter may be given by any of its names, and by several that agree.
    """
    if not isinstance(weights, Mapping):
        raise Mistake(
            f"{argument} is a {type(weights).__name__}; give a mapping of tensors by the names of parameters"
        )
    own = {parameter: name for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    given: dict[str, str] = {}  # the name that it is given by
    for name, weight in weights.items():
        if name not in parameters:
            if name not in buffers:
                raise Mistake(
                    f"{argument}['{name}']: the module has no such parameter{nearest(str(name), parameters)}"
                )
            continue
        shape = parameters[name].shape
        if not isinstance(weight, Tensor):
            raise Mistake(f"{argument}['{name}'] is a {type(weight).__name__}; give a tensor")
        if not is_plain(weight):
            raise Mistake(
                f"{argument}['{name}'] is nested, sparse, quantized or without numbers; give a plain one"
            )
        if weight.shape != shape:
            raise Mistake(
                f"{argument}['{name}'] has shape {list(weight.shape)}; the module's has {list(shape)}"
            )
        first = given.setdefault(own[parameters[name]], name)
        if weight.dtype != weights[first].dtype or not same(weight, weights[first]):
            raise Mistake(
                f"{argument}['{first}'] and {argument}['{name}'] are one parameter of the module, and differ; give one"
            )
    return {name: weights[known].detach() for name, known in given.items()}


def warn_of(module: nn.Module, output: str | int | None, tape: Tape, casts: Casts) -> None:
    """Say what casts inside the module cost."""
    if (found := remark(function_of(module, output), tape, casts)) is not None:
        warn(found, stacklevel=5)
