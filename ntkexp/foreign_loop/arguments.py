"""Check the arguments of `follow`, name the parameters, and unwrap models and
optimizers.

Unusable arguments raise an error before the loop begins, not after hours of training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.batch_norm import BatchNormMode, checked_mode
from ntkexp.foreign_loop.call import beginning_at, generator_states
from ntkexp.foreign_loop.clipping import ASK_LOSSES
from ntkexp.foreign_loop.example_names import Ids
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.foreign_loop.measure import (
    NO_QUERIES,
    Measure,
    MeasuredQueries,
    QueryCalls,
    query_names,
)
from ntkexp.foreign_loop.model_function import (
    QUERIES_TO_CHECK,
    CalledModule,
    left_alone,
)
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.user_loss import ExampleLoss
from ntkexp.kernel import NoRule, Reader
from ntkexp.kernel.read.checks import Unfaithful
from ntkexp.kernel.record.casts import has_casts, is_short, without_casts
from ntkexp.kernel.record.tape import (
    advice_for_lists,
    as_inputs,
    examples,
    map_tensors,
    part,
)
from ntkexp.mistake import Mistake, checked_count, first_line, in_short
from ntkexp.model.functional import BATCH_AXIS, Output, batch_axis_missing
from ntkexp.path.components import By
from ntkexp.shapes import Inputs

Group: TypeAlias = tuple[Mapping[str, Any], dict[str, nn.Parameter]]
"""The settings of a parameter group, and its parameters by name."""


@dataclass
class ParameterGroups:
    """The parameter groups of each optimizer, with the parameters' names in the model.

    The names are looked up again after a group was added, extended or loaded.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    # The latest result for each optimizer, by the optimizer's id: the ids of the groups
    # and parameters, the groups, and all parameters by name. Changed ids show that the
    # result is outdated.
    known: dict[int, tuple[list[int], list[Group], dict[str, nn.Parameter]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.names = {
            id(weight): name for name, weight in self.model.named_parameters()
        }

    def groups(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        """Return the settings and the parameters of each group of an optimizer.

        >>> net = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD([net.weight])
        >>> [list(members) for _, members in ParameterGroups(net, [sgd]).groups(sgd)]
        [['weight']]
        """
        groups, _ = self.present(optimizer)
        return groups

    def present(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[Group], dict[str, nn.Parameter]]:
        """Return the groups of an optimizer,
        and the parameters of all of its groups."""
        ids = list[int]()
        for group in optimizer.param_groups:
            ids.append(id(group))
            ids += [
                id(weight)
                for weight in group["params"]
                if weight.requires_grad or moves(weight)
            ]
        known = self.known.get(id(optimizer))
        if known is None or known[0] != ids:
            groups = [self.named_group(group) for group in optimizer.param_groups]
            members = {
                name: weight for _, named in groups for name, weight in named.items()
            }
            known = (ids, groups, members)
            self.known[id(optimizer)] = known
        return known[1:]

    def named_group(self, group: dict[str, Any]) -> Group:
        """Return a parameter group, with the names of its parameters in the model.
        Omit other tensors. Raise if a parameter cannot be followed."""
        members = dict[str, nn.Parameter]()
        for weight in group["params"]:
            if id(weight) not in self.names:
                self.refuse_copies(weight)
            elif moves(weight):
                members[self.names[id(weight)]] = weight
        for name, weight in members.items():
            refuse_short(name, weight)
        return group, members

    def not_in_model(self) -> list[nn.Parameter]:
        """Return the tensors of the optimizers that are not parameters of the model,
        such as a temperature of the loss. Raise if an optimizer updates no parameter of
        the model.

        >>> net, head = nn.Linear(2, 1), nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD([*net.parameters(), *head.parameters()])
        >>> [tensor is head.weight for tensor in ParameterGroups(net, [sgd]).not_in_model()]
        [True]
        """
        not_in_model = list[nn.Parameter]()
        for optimizer in self.optimizers:
            others = list(self.others(optimizer))
            if len(others) == sum(
                len(group["params"]) for group in optimizer.param_groups
            ):
                raise Mistake(
                    f"{type(optimizer).__name__} updates no parameter of the model; "
                    "give the optimizer of the model that is followed, and build it "
                    "after the last change of the model's parameters"
                )
            not_in_model += others
        return not_in_model

    def others(self, optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
        """Yield the tensors of an optimizer that are no parameters of the model."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) not in self.names:
                    yield weight

    def square_outside(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the squared norm of the gradients of an optimizer's tensors outside
        the model."""
        squares = [
            weight.grad.square().sum()
            for weight in self.others(optimizer)
            if weight.grad is not None
        ]
        return sum(read_numbers(squares))

    def refuse_copies(self, weight: Tensor) -> None:
        """Raise if `weight` is a float32 master copy of a half-precision parameter.

        After each step, the loop would copy the master weights back to the model.
        """
        for name, parameter in self.model.named_parameters():
            if is_short(parameter) and torch.equal(
                weight.detach().to(parameter), parameter.detach()
            ):
                raise Mistake(
                    f"the optimizer updates a float32 copy of '{name}', and copies it "
                    "back into the model, which cannot be followed; store the weights "
                    "of the model in float32, and train it under autocast"
                )

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        _, members = self.present(optimizer)
        return members

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of all optimizers."""
        for optimizer in self.optimizers:
            yield from self.of(optimizer).items()


def moves(weight: Tensor) -> bool:
    """Return False for a frozen parameter in half precision, such as a weight of a base
    model with adapters. `ParameterGroups` omits such parameters, even if an optimizer
    holds them.
    """
    return weight.requires_grad or not is_short(weight)


def refuse_short(name: str, weight: Tensor) -> None:
    """Raise if a trained weight is in half precision. Its rounding errors are too large
    for any proof.

    >>> refuse_short("a", torch.ones(1)), refuse_short("b", torch.ones(1, dtype=torch.bfloat16))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: 'b' is in bfloat16, whose rounding errors are too large for the proofs; train float32 \
weights under autocast
    """
    if is_short(weight):
        kind = str(weight.dtype).removeprefix("torch.")
        raise Mistake(
            f"'{name}' is in {kind}, whose rounding errors are too large for the "
            "proofs; train float32 weights under autocast"
        )


# --- Models and optimizers inside the wrappers of libraries.


SHARDED = {"FullyShardedDataParallel", "FSDPModule"}
"""Names of FSDP's classes. Comparing names avoids a slow import."""


def unwrapped_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers inside the wrappers of accelerate and Lightning.

    If a wrapper changes the step of its optimizer, the proof of the first step
    (`rule_proof.RuleProof`) raises an error.

    >>> from types import SimpleNamespace
    >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    >>> unwrapped_optimizers([SimpleNamespace(optimizer=sgd)]) == unwrapped_optimizers(sgd) == [sgd]
    True
    """
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    return [unwrapped_optimizer(optimizer) for optimizer in optimizers]


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside one or more wrappers, or the optimizer itself.

    Wrappers name the inner optimizer `optimizer`. SAM names it `base_optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    if "SAM" in type(optimizer).__name__:
        inner = getattr(optimizer, "base_optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return unwrapped_optimizer(inner)
    return optimizer


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `torch.compile` and
    DistributedDataParallel."""
    called = called_model(model)
    inner = getattr(called, "_orig_mod", None)
    return unwrapped_model(inner) if isinstance(inner, nn.Module) else called


def runs_as_it_is(model: nn.Module) -> bool:
    """Return True if all parameters are on the CPU, and the model contains no compiled
    part.

    >>> runs_as_it_is(nn.Linear(1, 1)), runs_as_it_is(nn.Linear(1, 1, device="meta"))
    (True, False)
    """
    is_compiled = any(
        hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None
        for layer in model.modules()
    )
    return not is_compiled and all(
        weight.device.type == "cpu" for weight in model.parameters()
    )


def called_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel.
    Raise if a wrapper splits batches or weights.

    >>> called_model(DataParallel(nn.Linear(1, 1)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is wrapped in DataParallel, which splits batches; use DistributedDataParallel
    """
    if isinstance(model, DataParallel):
        raise Mistake(
            "the model is wrapped in DataParallel, which splits batches; use "
            "DistributedDataParallel"
        )
    for name, layer in model.named_modules():
        if SHARDED & {kind.__name__ for kind in type(layer).__mro__}:
            where = f"layer '{name}'" if name else "the model"
            raise Mistake(
                f"{where} is a {type(layer).__name__}, which divides weights among the "
                "processes (FSDP), so that no process sees a complete step; wrap the "
                "model in DistributedDataParallel, or follow a single process"
            )
    if not isinstance(model, DistributedDataParallel):
        return model
    size = model.process_group.size()
    if size < get_world_size():
        raise Mistake(
            f"gradients are averaged over only {size} of {get_world_size()} processes, "
            "so those of the other processes are unknown here; follow a loop in which "
            "all processes train one model"
        )
    inner: nn.Module = model.module
    return inner


# --- Checks.


ONE_NUMBER = (
    "the model returns one number for all examples of a call, such as their loss; "
    "follow a module that returns a row for each example, or name an output that has "
    "such rows, for example output='logits'. If it returns x.squeeze(), return "
    "x.squeeze(-1), which keeps the axis of a single example"
)
NEVER_CALLED = (
    "model(x) was never called with gradients enabled, or the loop called only a copy "
    "of the model (first-order MAML?); follow the module that the loop calls, such as "
    "the result of torch.compile. Call it as model(x), because model.forward(x) is not "
    f"recorded. For a loss through torch.func (grad, vmap, jvp), {ASK_LOSSES}"
)


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """The options of `follow`, which documents their meaning."""

    output: Output
    measure: Measure | None
    ids: Ids
    loss: ExampleLoss | None
    to: Path | str | None
    every: int | None
    by: By | None
    memory_gb: float
    batch_norm: BatchNormMode
    rules: Sequence[AbstractOptimizerRule]
    log: Any

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.of_gb(self.memory_gb)

    def refuse_unusable(self) -> None:
        """Raise if an option has a value of the wrong kind."""
        checked_mode(self.batch_norm)
        if not (self.ids is None or isinstance(self.ids, str) or callable(self.ids)):
            raise Mistake(
                f"ids= is a {type(self.ids).__name__}; give a function of a call, or "
                "the name of the keyword that holds the names"
            )
        self.refuse_uncallable("loss", "outputs and call")
        self.refuse_uncallable("log", "numbers and step, such as mlflow.log_metrics")
        self.refuse_uncallable(
            "measure", "outputs and call that gives a number for each query"
        )
        if not isinstance(self.to, str | Path | None) or "\0" in str(self.to):
            raise Mistake(
                f"to={in_short(self.to)} is a {type(self.to).__name__}, which names no "
                "folder; give the path of a folder"
            )
        _ = self.budget  # raises if `memory_gb` is not a positive number
        are_rules = isinstance(self.rules, list | tuple) and all(
            isinstance(rule, AbstractOptimizerRule) for rule in self.rules
        )
        if not are_rules:
            raise Mistake(
                "rules=: give a list of optimizer rules, whose classes are derived "
                "from AbstractOptimizerRule"
            )
        if self.every is not None:
            checked_count("every", self.every, 1)

    def refuse_uncallable(self, name: str, arguments: str) -> None:
        """Raise unless an option is a function or None."""
        value = getattr(self, name)
        if not (value is None or callable(value)):
            raise Mistake(
                f"{name}= is a {type(value).__name__}; give a function of {arguments}"
            )


def refuse_other_objects(model: object, optimizers: Sequence[object]) -> None:
    """Raise unless `model` is a module, and `optimizers` are one
    or more distinct optimizers.

    >>> refuse_other_objects(nn.Linear(1, 1), [])
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: there is no optimizer to follow; give the loop's optimizer, or a list of its optimizers
    """
    if not isinstance(model, nn.Module):
        raise Mistake(
            f"the model is a {type(model).__name__}; give the torch.nn.Module that the loop calls"
        )
    if not optimizers:
        raise Mistake(
            "there is no optimizer to follow; give the loop's optimizer, or a list "
            "of its optimizers"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise Mistake(
            f"the model is a {type(model).__name__} of torch.jit, whose calls cannot be "
            "repeated at other weights; train and follow the module from which it was "
            "made"
        )
    for name, weight in model.named_parameters():
        if is_lazy(weight):
            raise Mistake(
                f"'{name}' has no shape yet, because its layer is lazy; call the model "
                "on a batch before following begins"
            )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Mistake(
                f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or "
                "a list of them"
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise Mistake("an optimizer is in the list twice; give each optimizer once")


def refuse_same_memory(weights: Mapping[str, nn.Parameter]) -> None:
    """Raise if two of the parameters that an optimizer updates begin at the same place
    in memory.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> refuse_same_memory({"first": first.weight, "second": second.weight})
    """
    places: dict[tuple[torch.device, int], str] = {}
    for name, weight in weights.items():
        if not weight.numel() or weight.is_meta:
            continue
        other = places.setdefault((weight.device, weight.data_ptr()), name)
        if other != name:
            raise Mistake(
                f"'{other}' and '{name}' are two parameters in the same memory, so the "
                "optimizer would update it twice; tie them by one parameter, as in "
                "second.weight = first.weight"
            )


def checked_queries(queries: Inputs, module: nn.Module, output: Output) -> Inputs:
    """Copy the queries, and check that the module
    in evaluation mode accepts the first one.

    >>> checked_queries(torch.ones(0, 3), nn.Linear(3, 1), None)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: queries=: there are none; give inputs at which the model is to be explained
    """
    for leaf in tree_leaves(dict(queries) if isinstance(queries, Mapping) else queries):
        if isinstance(leaf, Tensor) and (
            leaf.is_nested or leaf.layout is not torch.strided
        ):
            raise Mistake(
                "queries=: one of the tensors is nested or sparse; give plain tensors"
            )
    inputs = map_tensors(torch.clone, as_inputs(queries))
    if not examples(inputs):
        raise Mistake(NO_QUERIES)
    outputs = first_outputs(inputs, module, output)
    if not outputs.dim():
        raise Mistake(ONE_NUMBER)
    if len(outputs) != 1:
        raise Mistake(
            f"queries=: the model returns {len(outputs)} rows for one query; let it "
            "return one row for each query. The axis of queries must be the first "
            "(batch_first=True in recurrent layers); positions and views need axes of "
            f"their own after it{advice_for_lists(inputs)}"
        )
    return inputs


def first_outputs(inputs: Inputs, module: nn.Module, output: Output) -> Tensor:
    """Return the outputs at the first query. Raise with advice if the module fails."""
    called = CalledModule(module, output)
    weights = called.weights
    function = called.function
    try:
        with (
            torch.no_grad(),
            beginning_at(generator_states(module)),
            left_alone(module),
        ):
            return function(weights, part(inputs, slice(1)))
    except Mistake:
        raise
    # errors of the user's model
    except (
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        advice = advice_for_lists(inputs) or advice_for_arguments(inputs, error)
        with beginning_at(generator_states(module)), left_alone(module):
            if not advice and batch_axis_missing(function, weights, inputs):
                advice = f"; {BATCH_AXIS}"
        raise Mistake(
            "queries=: the model cannot be called with the queries: "
            f"{first_line(error)}{advice}"
        ) from error


def advice_for_arguments(inputs: Inputs, error: Exception) -> str:
    """Return advice if the model refuses the number, the names or the precision of its
    arguments. Otherwise return an empty string.

    >>> advice_for_arguments({"x": torch.ones(1)}, TypeError("got an unexpected keyword argument 'x'"))
    '; if the model takes one dict as its input, give queries=({…},)'
    """
    if isinstance(inputs, dict) and "unexpected keyword argument" in str(error):
        return "; if the model takes one dict as its input, give queries=({…},)"
    if isinstance(inputs, tuple) and "positional argument" in str(error):
        return (
            "; a list or tuple holds the arguments of one call, so stack several "
            "queries (torch.stack), and let a DataLoader yield no labels"
        )
    if "dtype" in str(error):
        return "; give queries in the dtype of the batches in the loop"
    return ""


def measured_queries(
    measure: Measure,
    queries: Inputs,
    sizes: tuple[int, ...],
    ids: Ids,
    called: CalledModule,
) -> MeasuredQueries:
    """Return the user's measure, and the calls of the model that evaluate the queries.

    As a check, call the measure on the module's outputs at the queries."""
    measured = MeasuredQueries(
        measure, QueryCalls(sizes, query_names(queries, sizes, ids))
    )
    module = called.module
    with torch.no_grad(), beginning_at(generator_states(module)), left_alone(module):
        outputs = called.outputs(called.weights, queries)
    measured.out_names(outputs, queries)
    measured.refuse_unexplained(outputs, queries)
    return measured


def refuse_without_rules(
    called: CalledModule, trained: Collection[str], queries: Inputs
) -> None:
    """Raise if an operation between weights and outputs has no secant rule, or if the
    model computes one example's outputs from several examples.

    The check records the model at the first queries.

    >>> class Entropy(nn.Linear):
    ...     def forward(self, x):
    ...         return torch.special.entr(2 + super().forward(x).tanh())
    >>> refuse_without_rules(CalledModule(Entropy(3, 4).eval(), None), ["weight"], torch.ones(1, 3))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: no difference rule for the operation aten.special_entr.default; follow a model without that
    """
    weights = {
        name: weight for name, weight in called.weights.items() if name in trained
    }
    if not weights:
        return
    few = part(queries, slice(QUERIES_TO_CHECK))
    reader = Reader(called.outputs, frozenset(weights))
    tape = reader.record(weights, few)
    # Ignore casts only if there are any. Ignoring them takes time in each run of the
    # model, and the checks run the model many times.
    if has_casts(tape):
        reader = Reader(without_casts(called.outputs), frozenset(weights))
        tape = reader.record(weights, few)
    try:
        reader.checks.faithful_owners(tape)
    except Unfaithful:
        # The model's autograd gradients are not the derivatives of its outputs, as with
        # straight-through estimators. Such a model is allowed, because the secant is
        # exact for the outputs.
        return
    except NoRule as error:
        raise Mistake(f"{error}; follow a model without that") from error


def common_submodule(names: Sequence[str]) -> str:
    """Return the name of the deepest submodule that holds all of these parameters.

    >>> common_submodule(["net.0.weight", "net.2.bias"]), common_submodule(["0.weight", "2.bias"])
    ('net', '')
    """
    paths = [name.split(".")[:-1] for name in names]
    common = list[str]()
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
