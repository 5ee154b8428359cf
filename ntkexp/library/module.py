"""What users give: a module, and tensors by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ntkexp.kernel.read.found import Found
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import Casts, remark, with_casts
from ntkexp.kernel.record.tape import Tape
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights

SHORTEST = 32  # bits of numbers
FOUND: WeakKeyDictionary[nn.Module, dict[frozenset[str], Found]] = WeakKeyDictionary()
"""What was found of each module that is still alive, by what it trains."""


def reader_of(module: nn.Module, output: str | int | None = None, casts: Casts = "keep") -> tuple[Reader, Weights]:
    """A reader of the module, and all its parameters."""
    own = {name: weight.detach() for name, weight in module.named_parameters()}
    trained = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad)
    if not trained:
        raise Mistake("no parameter of the module requires gradients, so it has no tangent kernel")
    refuse_short({name: own[name] for name in trained})
    found = FOUND.setdefault(module, {}).setdefault(trained, Found())
    return Reader(with_casts(function_of(module, output), casts), trained, found), own


def refuse_short(weights: Weights) -> None:
    """Refuse weights in numbers so short that a kernel of them is mostly rounding, and may be infinite.

    >>> refuse_short({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float16)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the parameter 'b' is in float16, to whose rounding no kernel is told; give module.float()
    """
    for name in sorted(weights):
        if (kind := weights[name].dtype).is_floating_point and torch.finfo(kind).bits < SHORTEST:
            kind_name = str(kind).removeprefix("torch.")
            said = f"the parameter '{name}' is in {kind_name}, to whose rounding no kernel is told"
            raise Mistake(f"{said}; give module.float()")


def named(module: nn.Module, weights: Mapping[str, Tensor], argument: str) -> Weights:
    """The tensors of a mapping that are parameters; buffers in it are the module's business.

    A parameter may be given by any of its names, and by several that agree.
    """
    own = {parameter: name for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    given: dict[str, str] = {}  # the name that it is given by
    for name, weight in weights.items():
        if name not in parameters:
            if name not in buffers:
                raise Mistake(f"{argument}['{name}']: the module has no such parameter{nearest(name, parameters)}")
            continue
        shape = parameters[name].shape
        if weight.shape != shape:
            raise Mistake(f"{argument}['{name}'] has shape {list(weight.shape)}; the module's has {list(shape)}")
        first = given.setdefault(own[parameters[name]], name)
        if not same(weight, weights[first]):
            raise Mistake(
                f"{argument}['{first}'] and {argument}['{name}'] are one parameter of the module, and differ; give one"
            )
    return {name: weights[known].detach() for name, known in given.items()}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; one view of the same memory does, even where some are none."""
    one_view = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one.dtype == other.dtype and (one_view or torch.equal(one, other))


def warn_of(module: nn.Module, output: str | int | None, tape: Tape, casts: Casts) -> None:
    """Say what casts inside the module cost."""
    if (found := remark(function_of(module, output), tape, casts)) is not None:
        warn(found, stacklevel=4)
