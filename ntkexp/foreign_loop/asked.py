"""What following is asked for, before a loop begins: what does not fit is refused then, not after hours of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ntkexp.foreign_loop.members import refuse_short
from ntkexp.foreign_loop.model_call import Ids
from ntkexp.kernel.record.inputs import as_inputs, examples, part
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Inputs

MOST = 1e9  # GB


def as_queries(queries: Inputs, module: nn.Module, output: str | int | None) -> Inputs:
    """The inputs at which a module in evaluation is to be asked, the first of which it has answered.

    >>> as_queries(torch.ones(0, 3), nn.Linear(3, 1), None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: queries=: there is none among them; give inputs at which the model is to be explained
    """
    if any(
        tensor.is_nested
        for tensor in (queries if isinstance(queries, tuple | list) else [queries])
        if isinstance(tensor, torch.Tensor)
    ):
        raise Mistake("queries=: there is a nested tensor among them; give a plain one")
    asked = as_inputs(queries)
    if not examples(asked):
        raise Mistake("queries=: there is none among them; give inputs at which the model is to be explained")
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    try:
        with torch.no_grad():
            function_of(module, output)(weights, part(asked, slice(1)))
    except Mistake:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        for name, weight in module.named_parameters():
            refuse_short(name, weight)  # which comes first, where queries would fit longer ones
        raise Mistake(f"queries=: the model does not take them: {str(error).splitlines()[0]}") from error
    return asked


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
