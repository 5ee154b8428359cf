"""What `follow` is given, before a loop begins: what does not fit is refused then, not after hours of training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from ntkexp.foreign_loop.calls import beginning_at, generator_states
from ntkexp.foreign_loop.example_names import Ids
from ntkexp.foreign_loop.output_signatures import left_alone
from ntkexp.foreign_loop.parameters import refuse_short
from ntkexp.foreign_loop.replayed_module import CalledModule
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import without_casts
from ntkexp.kernel.record.tape import as_inputs, examples, part
from ntkexp.kernel.secant.call import NoRule
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Inputs

ONE_NUMBER = (
    "the model gives one number for all examples of a call, such as their loss; follow one that gives a row for each, "
    "or name the part of its answer that does, as output='logits'"
)
NEVER_CALLED = "model(x) was never called with gradients enabled; follow the module that the loop calls so"
FEW = 2
"""Queries of which operations are recorded beforehand: of two it is seen whether examples are mixed."""
MOST = 1e9  # GB


def refuse_unusable(
    model: object,
    optimizers: Sequence[object],
    ids: Ids,
    loss: object,
    every: int | None,
    to: object = None,
    memory_gb: object = 4.0,
) -> None:
    """Refuse what nothing can be followed with.

    >>> refuse_unusable(nn.Linear(1, 1), [], None, None, None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: there is no optimizer to follow; give that of the loop, or a list of them
    """
    if not isinstance(model, nn.Module):
        raise Mistake(f"the model is a {type(model).__name__}; give the torch.nn.Module that the loop calls")
    if not optimizers:
        raise Mistake("there is no optimizer to follow; give that of the loop, or a list of them")
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise Mistake("an optimizer stands in the list twice; give each once")
    if not (ids is None or isinstance(ids, str) or callable(ids)):
        raise Mistake(f"ids= is a {type(ids).__name__}; give a function of a call, or the keyword that holds names")
    if not (loss is None or callable(loss)):
        raise Mistake(f"loss= is a {type(loss).__name__}; give a function of outputs and call")
    if not (to is None or isinstance(to, str | Path)):
        raise Mistake(f"to= is a {type(to).__name__}; give the path of a folder")
    if not isinstance(memory_gb, int | float) or not 0 < memory_gb < MOST:
        raise Mistake(f"memory_gb={memory_gb!r}: it takes a number > 0, and the machine has less than {MOST:g}")
    if every is not None and not (isinstance(every, int) and every > 0):
        raise Mistake(f"every={every!r}: weights are kept after so many steps; give 1 or more")


def checked_queries(queries: Inputs, module: nn.Module, output: str | int | None) -> Inputs:
    """The inputs at which a module in evaluation is explained, the first of which it has answered.

    >>> checked_queries(torch.ones(0, 3), nn.Linear(3, 1), None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: queries=: there is none among them; give inputs at which the model is to be explained
    """
    each = queries if isinstance(queries, tuple | list) else [queries]
    if any(isinstance(tensor, torch.Tensor) and tensor.is_nested for tensor in each):
        raise Mistake("queries=: there is a nested tensor among them; give a plain one")
    inputs = as_inputs(queries)
    if not examples(inputs):
        raise Mistake("queries=: there is none among them; give inputs at which the model is to be explained")
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    try:
        with torch.no_grad(), beginning_at(generator_states(module)), left_alone(module):
            answer = function_of(module, output)(weights, part(inputs, slice(1)))
    except Mistake:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        for name, weight in module.named_parameters():
            refuse_short(name, weight)  # which comes first, where queries would fit longer ones
        raise Mistake(f"queries=: the model does not take them: {str(error).splitlines()[0]}") from error
    if not answer.dim():
        raise Mistake(ONE_NUMBER)
    return inputs


def refuse_without_rules(called: CalledModule, trained: Collection[str], queries: Inputs) -> None:
    """Refuse operations between weights and outputs of which no secant is known, and a model that mixes examples.

    >>> class Products(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x).cumprod(1)
    >>> refuse_without_rules(CalledModule(Products(3, 4).eval(), None), ["weight"], torch.ones(1, 3))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: no difference rule for the operation aten.cumprod.default; follow a model without that
    """
    weights = {name: weight.detach() for name, weight in called.module.named_parameters() if name in trained}
    if not weights:
        return
    reader = Reader(without_casts(called.function), frozenset(weights))
    tape = reader.record(weights, part(queries, slice(FEW)))
    try:
        reader.secant(tape, tape, (0,))
    except NoRule as error:
        raise Mistake(f"{error}; follow a model without that") from error


def common_submodule(names: Sequence[str]) -> str:
    """The part of a module that holds all of these parameters.

    >>> common_submodule(["net.0.weight", "net.2.bias"]), common_submodule(["0.weight", "2.bias"])
    ('net', '')
    """
    paths = [name.split(".")[:-1] for name in names]
    return ".".join(takewhile(bool, (step[0] * (len(set(step)) == 1) for step in zip(*paths, strict=False))))
