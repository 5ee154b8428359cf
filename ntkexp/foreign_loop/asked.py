"""What following is asked for, before a loop begins: what does not fit is refused then, not after hours of training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from ntkexp.foreign_loop.attribution import factors_between
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.calls import Ids, ModelCall, beginning_at, states_for
from ntkexp.foreign_loop.moved import refuse_short
from ntkexp.foreign_loop.signed_outputs import left_alone
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import as_inputs, examples, part, tensors
from ntkexp.kernel.record.taping import columns, without_casts
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Inputs

ONE_NUMBER = (
    "the model gives one number for all examples of a call, such as their loss; follow one that gives a row for each, "
    "or name the part of its answer that does, as output='logits'"
)
NEVER_CALLED = "model(x) was never called with gradients enabled; follow the module that the loop calls so"
FEW = 2
"""Queries of which operations are looked at beforehand: of two it is seen whether examples are mixed."""
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
        with torch.no_grad(), beginning_at(states_for(module)), left_alone(module):
            answer = function_of(module, output)(weights, part(asked, slice(1)))
    except Mistake:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        for name, weight in module.named_parameters():
            refuse_short(name, weight)  # which comes first, where queries would fit longer ones
        raise Mistake(f"queries=: the model does not take them: {str(error).splitlines()[0]}") from error
    if not answer.dim():
        raise Mistake(ONE_NUMBER)
    return asked


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


def part_of(names: Sequence[str]) -> str:
    """The part of a module that holds all of these parameters.

    >>> part_of(["net.0.weight", "net.2.bias"]), part_of(["0.weight", "2.bias"])
    ('net', '')
    """
    ways = [name.split(".")[:-1] for name in names]
    return ".".join(takewhile(bool, (step[0] * (len(set(step)) == 1) for step in zip(*ways, strict=False))))


@dataclass
class FirstStep:
    """Proof (a) of the first step, right after it: what is no gradient of the examples seen is refused before the
    second, and not when all are attributed. What lies in several processes is looked at then."""

    called: CalledModule
    queries: Inputs
    done: bool = False

    def prove(self, step: FollowedStep) -> None:
        """Hold the gradient that was consumed against that of the calls."""
        if self.done:
            return
        self.done = True
        if not step.calls and any(bool(step.gradient[name].any()) for name in step.heard):
            part = part_of(step.heard)
            raise Mistake(f"step {step.index}: {NEVER_CALLED}" + (f", perhaps its part '{part}'" if part else ""))
        for call in step.calls:
            self.refuse_unlike(call)
        if all(call.at == step.index for call in step.calls):
            nothing = {name: torch.zeros_like(step.start[name]) for name in step.heard}
            found = nothing | self.called.gradient(step.calls, [step.start] * len(step.calls))
            room = max(map(self.called.room, (call.how for call in step.calls)), default=0.0)
            factors_between(found, {name: step.gradient[name] for name in step.heard}, step.index, step.calls, room)
            for weight in self.called.module.parameters():
                weight.grad = None
        self.called.twins.clear()

    def refuse_unlike(self, call: ModelCall) -> None:
        """Refuse queries that have other axes than what the loop calls the model with, and are answered with other
        outputs: an axis of theirs may be taken for that of the examples. Of as many axes any lengths are fine, and any
        axes to which the model gives the same outputs."""
        both = axes(self.queries), axes(call.inputs)
        if both[0].keys() != both[1].keys() or both[0] == both[1]:
            return
        weights = {name: weight.detach() for name, weight in self.called.module.named_parameters()}
        with torch.no_grad(), left_alone(self.called.module):
            asked = columns(self.called.function, weights, part(self.queries, slice(1))).shape[1]
        assert call.gradient is not None
        if asked != (given := call.gradient.shape[1]):
            raise Mistake(
                f"queries=: they have {counted_axes(both[0])}, which the model answers with {asked} outputs each, and "
                f"the loop calls it with {counted_axes(both[1])}, answered with {given}; give queries with the axes of "
                "a batch, also if there is only one"
            )


def axes(inputs: Inputs) -> dict[object, int]:
    """How many axes each tensor among the inputs has, by its place or name.

    >>> axes((torch.ones(2, 3), torch.ones(2))), axes({"x": torch.ones(2, 3), "scale": 2.0})
    ({0: 2, 1: 1}, {'x': 2})
    """
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(tensors(inputs))
    return {key: value.dim() for key, value in pairs if isinstance(value, torch.Tensor)}


def counted_axes(found: Mapping[object, int]) -> str:
    """The numbers of axes, in words.

    >>> counted_axes({0: 2}), counted_axes({"x": 2, "mask": 1})
    ('2 axes', '2 and 1 axes')
    """
    numbers = " and ".join(map(str, found.values()))
    return f"{numbers} axis" if numbers == "1" else f"{numbers} axes"


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
