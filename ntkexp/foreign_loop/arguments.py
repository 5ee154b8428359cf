"""What `follow` is given: the parameters that optimizers move, by name; what lies inside the wrappers of libraries; and
what is refused before a loop begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_flatten

from ntkexp.foreign_loop.call import beginning_at, generator_states
from ntkexp.foreign_loop.example_names import Ids
from ntkexp.foreign_loop.measure import Measure, MeasuredQueries, QueryCalls, query_names
from ntkexp.foreign_loop.model_function import CalledModule, left_alone
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import is_short, without_casts
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors, part
from ntkexp.kernel.secant.call import NoRule
from ntkexp.mistake import Mistake, checked_count, checked_number, first_line, in_short
from ntkexp.model.functional import BATCH_AXIS, batch_axis_missing
from ntkexp.shapes import Inputs

Group: TypeAlias = tuple[Mapping[str, Any], dict[str, nn.Parameter]]
"""The settings of a group of parameters, and these."""


@dataclass
class ParameterGroups:
    """The groups of each optimizer, by the names that the model gives to parameters; they are named again where a group
    has come, grown or been loaded."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    known: dict[int, tuple[list[int], list[Group]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {id(weight): name for name, weight in self.model.named_parameters()}

    def groups(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        """The settings and parameters of each group of an optimizer.

        >>> net = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD([net.weight])
        >>> [list(members) for _, members in ParameterGroups(net, [sgd]).groups(sgd)]
        [['weight']]
        """
        present = [
            id(part)
            for group in optimizer.param_groups
            for part in (group, *filter(moves, group["params"]))
        ]
        known = self.known.get(id(optimizer))
        if known is None or known[0] != present:
            for weight in (each for group in optimizer.param_groups for each in group["params"]):
                if id(weight) not in self.names:
                    self.refuse_copies(weight)
                    raise Mistake(
                        f"the optimizer moves a tensor of shape {list(weight.shape)} that is not a parameter of the "
                        "model; follow the module that holds all of them"
                    )
            groups: list[Group] = [
                (
                    group,
                    {self.names[id(weight)]: weight for weight in filter(moves, group["params"])},
                )
                for group in optimizer.param_groups
            ]
            for name, weight in (each for _, members in groups for each in members.items()):
                refuse_short(name, weight)
            known = self.known[id(optimizer)] = (present, groups)
        return known[1]

    def refuse_copies(self, weight: Tensor) -> None:
        """Refuse an optimizer that moves a copy of a short parameter in longer numbers, which is copied back."""
        for name, parameter in self.model.named_parameters():
            if is_short(parameter) and torch.equal(
                weight.detach().to(parameter), parameter.detach()
            ):
                raise Mistake(
                    f"the optimizer moves a copy of '{name}' in longer numbers, from which the parameter is copied; "
                    "no such step is followed: let the model hold the long weights, and train it under autocast"
                )

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """The parameters of one optimizer."""
        return {
            name: weight
            for _, members in self.groups(optimizer)
            for name, weight in members.items()
        }

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all."""
        for optimizer in self.optimizers:
            for _, members in self.groups(optimizer):
                yield from members.items()


def moved_names(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    """The parameters of the model that some optimizer moves, which has to be of a kind that is followed."""
    return {name for name, _ in ParameterGroups(model, optimizers)}


def moves(weight: Tensor) -> bool:
    """Whether an optimizer that is given a parameter may move it: not a frozen one in short numbers, as under adapters,
    which is not followed then."""
    return weight.requires_grad or not is_short(weight)


def refuse_short(name: str, weight: Tensor) -> None:
    """Refuse weights in numbers so short that no proof of a step says anything.

    >>> refuse_short("a", torch.ones(1)), refuse_short("b", torch.ones(1, dtype=torch.bfloat16))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: 'b' is in bfloat16, too coarse for any proof; train float32 under autocast
    """
    if is_short(weight):
        kind = str(weight.dtype).removeprefix("torch.")
        raise Mistake(
            f"'{name}' is in {kind}, too coarse for any proof; train float32 under autocast"
        )


# --- What lies inside the wrappers that libraries put around models and optimizers.


SHARDED = {"FullyShardedDataParallel", "FSDPModule"}
"""Classes that need not be imported, which takes a while, to be recognised."""


def unwrapped_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, without what is around them; a wrapper that moves weights itself is noticed later.

    >>> from types import SimpleNamespace
    >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    >>> unwrapped_optimizers([SimpleNamespace(optimizer=sgd)]) == unwrapped_optimizers(sgd) == [sgd]
    True
    """
    found = [given] if not isinstance(given, Sequence) else list(given)
    inner = [
        getattr(each, "optimizer", None) for each in found
    ]  # as accelerate and Lightning wrap them
    if not any(isinstance(each, torch.optim.Optimizer) for each in inner):
        return found
    pairs = zip(found, inner, strict=True)
    return unwrapped_optimizers(
        [one if isinstance(one, torch.optim.Optimizer) else each for each, one in pairs]
    )


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained."""
    inner = getattr(called_model(model), "_orig_mod", None)
    return unwrapped_model(inner) if isinstance(inner, nn.Module) else called_model(model)


def runs_as_it_is(model: nn.Module) -> bool:
    """Whether the model runs on processors alone, and nothing of it was compiled.

    >>> runs_as_it_is(nn.Linear(1, 1)), runs_as_it_is(nn.Linear(1, 1, device="meta"))
    (True, False)
    """
    compiled = any(
        hasattr(each, "_orig_mod") or each._compiled_call_impl is not None
        for each in model.modules()
    )
    return not compiled and all(weight.device.type == "cpu" for weight in model.parameters())


def called_model(model: nn.Module) -> nn.Module:
    """The module that calls reach in this process, without what averages gradients of several.

    >>> called_model(DataParallel(nn.Linear(1, 1)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is wrapped in DataParallel, which splits batches; use DistributedDataParallel
    """
    if isinstance(model, DataParallel):
        raise Mistake(
            "the model is wrapped in DataParallel, which splits batches; use DistributedDataParallel"
        )
    for name, layer in model.named_modules():
        if SHARDED & {kind.__name__ for kind in type(layer).__mro__}:
            where = f"layer '{name}'" if name else "the model"
            raise Mistake(
                f"{where} is a {type(layer).__name__}, whose weights are cut apart over the processes (FSDP), and "
                "none sees a whole step; wrap the model in DistributedDataParallel, or follow one process"
            )
    if not isinstance(model, DistributedDataParallel):
        return model
    if (size := model.process_group.size()) < get_world_size():
        raise Mistake(
            f"gradients are averaged over {size} of {get_world_size()} processes, and those of others are not known "
            "here; follow where all of them train one model"
        )
    inner: nn.Module = model.module
    return inner


# --- What `follow` is given, before a loop begins: what does not fit is refused then, not after hours of training.


ONE_NUMBER = (
    "the model gives one number for all examples of a call, such as their loss; follow one that gives a row for each, "
    "or name the part of its answer that does, as output='logits'"
)
NEVER_CALLED = (
    "model(x) was never called with gradients enabled, or only a copy of the model was (first-order MAML?); follow the "
    "module that the loop calls so"
)
FEW = 2  # queries of which operations are recorded beforehand: of two it is seen whether examples are mixed
MOST = 1e9  # GB


def refuse_unusable(
    model: object,
    optimizers: Sequence[object],
    ids: Ids,
    loss: object,
    every: int | None,
    to: object = None,
    memory_gb: object = 4.0,
    measure: object = None,
    rules: object = (),
    log: object = None,
) -> None:
    """Refuse what nothing can be followed with.

    >>> refuse_unusable(nn.Linear(1, 1), [], None, None, None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: there is no optimizer to follow; give the loop's, or a list of them
    """
    if not isinstance(model, nn.Module):
        raise Mistake(
            f"the model is a {type(model).__name__}; give the torch.nn.Module that the loop calls"
        )
    if not optimizers:
        raise Mistake("there is no optimizer to follow; give the loop's, or a list of them")
    if strange := [
        type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)
    ]:
        raise Mistake(
            f"the optimizer is a {strange[0]}; give a torch.optim.Optimizer, or a list of them"
        )
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise Mistake("an optimizer is in the list twice; give each once")
    if not (ids is None or isinstance(ids, str) or callable(ids)):
        raise Mistake(
            f"ids= is a {type(ids).__name__}; give a function of a call, or the keyword that holds names"
        )
    if not (loss is None or callable(loss)):
        raise Mistake(f"loss= is a {type(loss).__name__}; give a function of outputs and call")
    if not (log is None or callable(log)):
        raise Mistake(
            f"log= is a {type(log).__name__}; give a function of numbers and step, such as mlflow.log_metrics"
        )
    if not (measure is None or callable(measure)):
        raise Mistake(
            f"measure= is a {type(measure).__name__}; give a function of outputs and call that gives a number for each "
            "query"
        )
    if not (to is None or isinstance(to, str | Path)) or "\0" in str(to):
        raise Mistake(
            f"to={in_short(to)} is a {type(to).__name__} that names no folder; give the path of one"
        )
    checked_number("memory_gb", memory_gb, most=MOST, above=True)
    if not isinstance(rules, list | tuple) or not all(
        isinstance(each, AbstractOptimizerRule) for each in rules
    ):
        raise Mistake(
            "rules=: give a list of rules of optimizers, made of classes derived from AbstractOptimizerRule"
        )
    if every is not None:
        checked_count("every", every, 1)


def checked_queries(queries: Inputs, module: nn.Module, output: str | int | None) -> Inputs:
    """Copy the inputs at which a module in evaluation is explained, and let it answer the first. The loop may write
    to its own, and so may a module, which is refused later.

    >>> checked_queries(torch.ones(0, 3), nn.Linear(3, 1), None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: queries=: they are empty; give inputs at which the model is to be explained
    """
    each = tree_flatten(dict(queries) if isinstance(queries, Mapping) else queries)[0]
    if any(
        isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided)
        for leaf in each
    ):
        raise Mistake("queries=: there is a nested or sparse tensor among them; give a plain one")
    if not examples(inputs := map_tensors(torch.clone, as_inputs(queries))):
        raise Mistake("queries=: they are empty; give inputs at which the model is to be explained")
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    function = CalledModule(module, output).function
    try:
        with torch.no_grad(), beginning_at(generator_states(module)), left_alone(module):
            answer = function(weights, part(inputs, slice(1)))
    except Mistake:
        raise
    except (
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # the model's own
        with beginning_at(generator_states(module)), left_alone(module):
            advice = f"; {BATCH_AXIS}" if batch_axis_missing(function, weights, inputs) else ""
        raise Mistake(
            f"queries=: the model cannot be called with them: {first_line(error)}{advice}"
        ) from error
    if not answer.dim():
        raise Mistake(ONE_NUMBER)
    return inputs


def measured_queries(
    measure: Measure,
    queries: Inputs,
    sizes: tuple[int, ...],
    ids: Ids,
    module: nn.Module,
    output: str | int | None,
) -> MeasuredQueries:
    """The measure of these queries, which a module in evaluation has answered."""
    found = MeasuredQueries(measure, QueryCalls(sizes, query_names(queries, sizes, ids)))
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    with torch.no_grad(), beginning_at(generator_states(module)), left_alone(module):
        outputs = CalledModule(module, output).outputs(weights, queries)
    found.out_names(outputs, queries)
    found.refuse_unexplained(outputs, queries)
    return found


def refuse_without_rules(called: CalledModule, trained: Collection[str], queries: Inputs) -> None:
    """Refuse operations between weights and outputs of which no secant is known, and a model that mixes examples.

    >>> class Digamma(nn.Linear):
    ...     def forward(self, x):
    ...         return (2 + super().forward(x).tanh()).digamma()
    >>> refuse_without_rules(CalledModule(Digamma(3, 4).eval(), None), ["weight"], torch.ones(1, 3))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: no difference rule for the operation aten.digamma.default; follow a model without that
    """
    weights = {
        name: weight.detach()
        for name, weight in called.module.named_parameters()
        if name in trained
    }
    if not weights:
        return
    reader = Reader(without_casts(called.outputs), frozenset(weights))
    tape = reader.record(weights, part(queries, slice(FEW)))
    try:
        reader.checks.faithful_owners(tape)
    except NoRule as error:
        raise Mistake(f"{error}; follow a model without that") from error


def common_submodule(names: Sequence[str]) -> str:
    """The part of a module that holds all of these parameters.

    >>> common_submodule(["net.0.weight", "net.2.bias"]), common_submodule(["0.weight", "2.bias"])
    ('net', '')
    """
    paths = [name.split(".")[:-1] for name in names]
    return ".".join(
        takewhile(bool, (step[0] * (len(set(step)) == 1) for step in zip(*paths, strict=False)))
    )
